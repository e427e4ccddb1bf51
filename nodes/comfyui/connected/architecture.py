"""The architecture of a connected MODEL: what is known of it, and what to tell the person."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_detection
import torch

from ....trainer_core.common.wording import count
from ....trainer_core.config import ConnectedConfig, Defaults, Preset
from ....trainer_core.models import Layer, LevelDefaults
from ....trainer_core.models.architectures import (
    ARCHITECTURES,
    FEW,
    NONE_FOUND,
    OTHER_KINDS,
    OWN,
    OWN_SHIFT,
    Architecture,
    Sampling,
    middle,
    uniform,
)
from ....trainer_core.models.base import Side
from ....trainer_core.models.files.safetensors_file import read_header
from ....trainer_core.models.sd.family import TOY_CFG, TOY_CHANNELS
from ....trainer_core.networks.layers.shape import is_matrix
from ....trainer_core.objective import describe_levels
from .beside import beside_of, continues, keeps
from .experts import sides_of
from .layers import list_layers
from .live import ATTENTION
from .noise import NODE, is_flow, noise_model, own_shift
from .vision import reads_of

__all__ = ["Architecture", "Sampling", "architecture_of", "describe", "distilled", "name_of", "remarks"]

PREDICTS = {
    "epsilon": "noise",
    "v_prediction": "v",
    "flow": "the flow from picture to noise",
    "x0": "the clean picture",
    "affine": "a mixture of picture and noise",
}
OF_TOYS = "sd1_clip"  # tokenizer of a CLIP that fits no large model, and of the toy models that come with the pack
PRESETS = {
    "attn-mlp": "attention and MLP, as ai-toolkit and OneTrainer choose layers",
    "full": "all layers, since none of this architecture is called attention or MLP",
}
BUT = r"(?<!un)(?<!de)(?<!de[-_ ])(?<!non)(?<!non[-_ ])"  # words before it that undo it
# In names of files, lower case: of models that are distilled to a few steps. Some are longer words' beginnings.
FEW_STEPS = rf"{BUT}(turbo|lightning|schnell|distill)|(?<![a-z])(lcm|hyper|dmd2?)(?![a-z])"
OPEN = ConnectedConfig()
MOST_FEW = 50  # steps that a name may tell; a larger number is one of training
BEGUN = ("WAN21", "HunyuanVideo15", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V")  # classes of image to video
IMAGE_TO_VIDEO = re.compile(r"i2v", re.I)  # in the name of a file
NO_ROW = Architecture(kind="", title="", classes=(), levels=LevelDefaults(), untried=True)  # of one not listed


def architecture_of(patcher: Any) -> Architecture:
    """Find the architecture of a MODEL by ComfyUI's classes, with everything filled in that the MODEL itself tells.

    Raises ValueError for models of other things than pictures with captions.
    """
    model = patcher.model
    _check_kind(model)
    found = _row(model.model_config, type(model).__name__)
    row = _generic(patcher) if found is None else found
    name = row.kind.replace("_", "-")
    levels = row.levels
    if levels.shift == OWN:
        levels = replace(levels, shift=round(own_shift(patcher), 6))
    if not _takes_guidance(model):
        row = replace(row, guidance=None, sampling=replace(row.sampling, guidance=None))
    return replace(
        row,
        levels=levels,
        modelspec=row.modelspec or name,
        base_version=row.base_version or row.kind,
        step=row.step or model.latent_format.spacial_downscale_ratio * _patch(model),
    )


def architecture_of_file(path: Path) -> Architecture:
    """Find the architecture of a model file by ComfyUI's own detection, from the file's header alone.

    Raises ValueError for a file that ComfyUI does not know, and for an architecture that is not listed.
    """
    zero = torch.zeros(())  # some values are looked at, so that tensors without any would not do
    tensors = {name: zero.expand(shape) for name, shape in read_header(path).shapes.items()}
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    start = prefix if any(name.startswith(prefix) for name in tensors) else ""
    config = comfy.model_detection.model_config_from_unet(tensors, start)
    row = None if config is None else _row(config)
    if row is None:
        raise ValueError(f"{path.name} is of no architecture whose usual settings are known; choose them yourself.")
    return row


def defaults_of(architecture: Architecture) -> Defaults:
    """What a run takes for an architecture where its settings are left open."""
    return Defaults(
        rank=architecture.rank,
        learning_rate=architecture.learning_rate,
        resolution=architecture.resolution,
        step=math.lcm(Defaults().step, architecture.step or 1),
        caption_dropout=architecture.caption_dropout,
        guidance=architecture.guidance,
        clip_step=architecture.frames,
        clip_rate=architecture.rate,
    )


def preset_of(layers: Iterable[Layer]) -> Preset:
    """Choose the layers that a run trains by default: attention and MLP, or all where none is called so."""
    usual = Defaults().preset
    return usual if any(usual in layer.presets and is_matrix(layer.module) for layer in layers) else "full"


def describe(
    patcher: Any,
    config: ConnectedConfig = OPEN,
    clip: Any = None,
    sampled: Any = None,
    high: Any = None,
    vision: Any = None,
) -> list[str]:
    """List sentences on what a MODEL is and on the defaults it takes, for the person.

    clip: the CLIP beside it. sampled: the MODEL that draws its samples instead. high: the expert for high
    noise, where the MODEL is that for low. vision: the CLIP_VISION that it reads.
    """
    row, latents, guidance = architecture_of(patcher), patcher.model.latent_format, config.guidance
    levels = replace(row.levels, sides=sides_of(patcher, row.halves, config, both=high is not None))
    kind = PREDICTS[noise_model(patcher).kind]
    drawing = sampled or patcher
    cfg, few = sampling_of(drawing), _few_steps_word(drawing)
    layers = [layer for layer in list_layers(patcher.model) if is_matrix(layer.module)]
    preset = preset_of(layers)
    trained = [layer for layer in layers if preset in layer.presets]
    blocks = {layer.block for layer in trained} - {""}
    sentences = [
        f"{row.title}, weights in {_precision(patcher.model)}. It predicts {kind}.",
        f"Latents have {latents.latent_channels} channels. Sides of pictures are multiples of {row.step} pixels.",
        f"Timesteps are drawn from {describe_levels(levels)} ({row.levels.source}).",
        f"What you leave open becomes rank {row.rank}, learning rate {row.learning_rate:g}, resolution "
        f"{row.resolution}, caption dropout {row.caption_dropout:g} ({row.source}; the resolution is near the "
        "model's own).",
        f"The preset auto is {preset}: {PRESETS[preset]}. "
        f"That is {count(trained, 'layer')} in {count(blocks, 'block')}.",
        f"Samples: {cfg.steps} steps, cfg {cfg.cfg:g}, sampler {cfg.sampler}, scheduler {cfg.scheduler} "
        + (f"(few, as {file_of(drawing)} is distilled)." if few else "(as in ComfyUI's templates)."),
    ]
    if row.guidance is not None and cfg.guidance is not None:
        trained_with = (
            f"{row.guidance:g} in training ({row.guidance_source})"
            if guidance < 0
            else f"{guidance:g} in training, as you set it (by default {row.guidance:g})"
        )
        sentences.append(f"Distilled guidance is {trained_with} and {cfg.guidance:g} in samples.")
    elif guidance >= 0 and row.classes:  # of others it is not known
        sentences.append(f"This MODEL takes no distilled guidance, so set guidance of {NODE} to -1.")
    sentences += _experts(levels.sides, config.switch_every)
    whose = config.noise_range if high is None else "low"
    return sentences + _beside(row, patcher) + remarks(patcher, clip, whose, sees=vision is not None)


def _experts(sides: Sequence[Side], every: int) -> list[str]:
    """Say which of two experts is trained when; [] where there is one."""
    if len(sides) < 2:
        return []
    turns = "as often as its timesteps are drawn" if not every else f"{count(every, 'step')} at a time, by turns"
    low, high = sides
    return [
        f"Each step trains one of two experts, {turns}: model at the timesteps {low.first} to {low.last}, and "
        f"model_high at {high.first} to {high.last}. Each gets a LoRA file of its own."
    ]


def _beside(row: Architecture, patcher: Any) -> list[str]:
    """Say which pictures a MODEL reads beside its latents, and where they come from."""
    beside = beside_of(patcher.model)
    if beside.paints:
        return ["It paints the white region of a mask and sees the rest: link Mask Loader to the dataset."]
    if continues(patcher.model):
        return ["It draws each clip from its first frame, which training takes from the clip."]
    if keeps(patcher.model):
        return ["It may also begin clips with a picture: set first_frame of Clips to the share that trains so."]
    if not beside.controls:
        return []
    does = "may also start from a control picture" if row.alone else "makes each picture from a control picture"
    clips = ["It draws each clip from its first frame, which training takes from the clip."] if begins(patcher) else []
    return [f"It {does}: link Control Pictures to the dataset.", *clips]


def remarks(patcher: Any, clip: Any = None, noise_range: str = "all", *, sees: bool = False) -> list[str]:
    """List warnings about a MODEL, and the CLIP beside it, that can be trained but may surprise.

    noise_range: the person's choice of what noise the MODEL is for. sees: whether a CLIP_VISION is linked.
    """
    row, name = architecture_of(patcher), file_of(patcher).lower()
    sentences = list(filter(None, [distilled(patcher)]))
    if row.untried:
        sentences.append(
            f"No trainer's settings for {row.title} were found, so its defaults are untried. Look at samples early."
        )
    if (part := _half(row, name)) and part != noise_range:
        assert row.halves is not None
        sentences.append(
            f"By its name this is the {part}-noise expert of {row.halves.title}. Set noise_range of {NODE} to {part}, "
            "so that it is trained where it is used."
        )
    if other := _other_clip(patcher.model, clip):
        sentences.append(other)
    if not sees and begins(patcher) and reads_of(patcher.model, beside_of(patcher.model)):
        sentences.append(
            "It may also see the first frame by CLIP vision, which training and its samples leave out. To draw with "
            f"clip_vision_output, link Load CLIP Vision to clip_vision of {NODE}."
        )
    usual, wired = patcher.model.model_sampling, patcher.get_model_object("model_sampling")
    if getattr(usual, "noise_scale", 1.0) != getattr(wired, "noise_scale", 1.0):
        sentences.append(
            "A node before this one changes how strong the MODEL's noise is. Unless that is meant, link the MODEL "
            "without it."
        )
    if ATTENTION in patcher.model_options.get("transformer_options", {}):
        sentences.append(
            "A node before this one sets how the MODEL computes attention. Training computes it by PyTorch, whole and "
            "exact, and samples as that node says. Look at samples early, or link the MODEL without it."
        )
    return sentences


def _half(row: Architecture, name: str) -> str:
    """Tell by a file's name which expert of a model of two files it is: high or low; "" for neither."""
    found = next((part for part in ("high", "low") if part in name), "")
    return found if row.halves and "noise" in name else ""


def distilled(patcher: Any) -> str:
    """Say that a MODEL is distilled to a few steps, by its class or else by its file's name; "" for others."""
    row, file, word = architecture_of(patcher), file_of(patcher), _few_steps_word(patcher)
    if not row.distilled and not word:
        return ""
    sentence = row.distilled or (
        f"By its name ({word}) {file} is distilled to a few steps, which training undoes. Train on {row.train_on}, and "
        "use the LoRA on this one."
    )
    own = "Extract LoRA makes one of its base, a template one of its own pictures"
    adapter = f"its training adapter ({row.adapter})" if row.adapter else f"a training adapter ({own})"
    return f"{sentence} Or load {adapter} with Existing LoRA, and set its use to beneath and training_only to true."


def _few_steps_word(patcher: Any) -> str:
    """Find what says that a MODEL is distilled to a few steps, in its file's name; "" for nothing."""
    row, name = _row(patcher.model.model_config, type(patcher.model).__name__), file_of(patcher).lower()
    patterns = {FEW_STEPS: "", **(row.few_steps if row else {})}
    return next((word or found[0] for pattern, word in patterns.items() if (found := re.search(pattern, name))), "")


def _other_clip(model: Any, clip: Any) -> str:
    """Say that a CLIP is of another kind than ComfyUI loads for a MODEL, by its tokenizer; "" where it is not."""
    try:
        # Of the class: ComfyUI's own look-up of what a configuration lacks prints a warning.
        target = getattr(type(model.model_config), "clip_target", None)
        usual = None if target is None else getattr(target(model.model_config, {}), "tokenizer", None)
    except (AttributeError, LookupError, NameError, TypeError):  # some of ComfyUI's ask the file for its text encoder
        return ""
    tokenizers = type(getattr(clip, "tokenizer", None)), usual or type(None)
    linked, own = (each.__module__.rpartition(".")[2] for each in tokenizers)
    if "builtins" in (linked, own) or linked in (own, OF_TOYS):
        return ""
    return (
        f"The linked CLIP is of the kind {linked}, and ComfyUI loads {own} for this MODEL. Unless that is meant, link "
        "the CLIP that belongs to it."
    )


def name_of(patcher: Any) -> str:
    """Name the file that ComfyUI loaded a MODEL from; the architecture's title where it does not say."""
    return file_of(patcher) or architecture_of(patcher).title


def file_of(patcher: Any) -> str:
    """Name the file that ComfyUI loaded a MODEL from; "" where it does not say."""
    given = getattr(patcher, "cached_patcher_init", None)
    first = given[1][0] if given and given[1] else None
    return Path(first).name if isinstance(first, str) else ""


def sampling_of(patcher: Any) -> Sampling:
    """Find how pictures of a MODEL are drawn, also of one that cannot be trained."""
    row = _row(patcher.model.model_config, type(patcher.model).__name__)
    usual = Sampling() if row is None else row.sampling
    if _few_steps_word(patcher) and not (row and row.distilled):
        told = re.search(r"(\d+)[-_ ]?step", file_of(patcher).lower())
        of_file = {"steps": int(told[1])} if told and 0 < int(told[1]) <= MOST_FEW else {}
        usual = replace(usual, **{**FEW, **(row.few if row else {}), **of_file})
    elif patcher.model.model_config.unet_config.get("model_channels", TOY_CHANNELS) < TOY_CHANNELS:
        usual = replace(usual, cfg=TOY_CFG)
    return usual if _takes_guidance(patcher.model) else replace(usual, guidance=None)


def clip_rate(patcher: Any) -> int:
    """Find the frames a second of the clips that a MODEL draws; 0 where it draws single pictures."""
    row = _row(patcher.model.model_config, type(patcher.model).__name__)
    return row.rate if row and patcher.model.latent_format.latent_dimensions > 2 else 0


def begins(patcher: Any) -> bool:
    """Tell whether a MODEL draws a clip from its first frame; one that also draws from captions, by its file's name."""
    model = patcher.model
    if continues(model):
        return True
    if type(model).__name__ not in BEGUN or beside_of(model).pictures != 1:
        return False
    row = _row(model.model_config, type(model).__name__)
    return row is None or not row.alone or bool(IMAGE_TO_VIDEO.search(file_of(patcher)))


def resolution_of(patcher: Any) -> int:
    """Find the side of the pictures, in pixels, that a MODEL draws best, also of one that cannot be trained."""
    row = _row(patcher.model.model_config, type(patcher.model).__name__)
    return NO_ROW.resolution if row is None else row.resolution


def _check_kind(model: Any) -> None:
    """Raise ValueError for a model that is trained by other means than pictures, captions and levels of noise."""
    listed = {name for architecture in ARCHITECTURES for name in architecture.classes}
    first = next((name for name in _names(model) if name in OTHER_KINDS or name in listed), "")
    what = OTHER_KINDS.get(first, "")
    if not what and isinstance(model, comfy.model_base.SD21UNCLIP):
        what = "a model with noise of its own in its prompt"
    if not what and getattr(model.diffusion_model, "time_r_in", None) is not None:
        what = "a mean-flow model, distilled to a few steps, which learns from two times at once"
    if what:
        raise ValueError(
            f"The MODEL linked to {NODE} is {what}, and cannot be trained here. Link a model that draws pictures from "
            "captions."
        )


def _names(model: Any) -> Iterator[str]:
    """Yield the names of a model's ComfyUI classes: its configuration's before those of its ancestors, its own."""
    yield from (each.__name__ for each in type(model.model_config).__mro__)
    yield type(model).__name__


def _row(config: Any, *classes: str) -> Architecture | None:
    """Find the row of a model by ComfyUI's configuration of it and its own class; that of an ancestor is a guess."""
    details, ancestors = config.unet_config, [each.__name__ for each in type(config).__mro__]
    for name in (*ancestors, *classes):
        rows = [row for row in ARCHITECTURES if name in row.classes]
        fitting = [row for row in rows if all(details.get(key) == value for key, value in row.where.items())]
        if fitting:
            row = max(fitting, key=lambda row: len(row.where))
            if name == ancestors[0] or name not in ancestors:
                return row
            name = type(config).__name__.replace("_", " ")
            return replace(row, title=f"{name}, a relative of {row.title}", untried=True)
    return None


def _generic(patcher: Any) -> Architecture:
    """Make the row of an architecture that is not listed."""
    name = type(patcher.model.model_config).__name__
    levels = middle(OWN_SHIFT, OWN) if is_flow(patcher) else uniform(NONE_FOUND)
    return replace(NO_ROW, kind=name.lower(), title=name, levels=levels)


def _takes_guidance(model: Any) -> bool:
    """Tell whether a model may take distilled guidance; those that say no in their parameters do not."""
    return bool(getattr(getattr(model.diffusion_model, "params", None), "guidance_embed", True))


def _patch(model: Any) -> int:
    """Find the sides of a model's patches in latent pixels; 1 without patches."""
    for name in ("patch_size", "patch_spatial", "patch"):
        found = getattr(model.diffusion_model, name, None)
        found = found[-1] if isinstance(found, tuple | list) and found else found
        if isinstance(found, int) and found > 0:
            return found
    return 1


def _precision(model: Any) -> str:
    """Name the dtypes of a model's weights, the most frequent first."""
    counts: Counter[str] = Counter()
    for weight in model.diffusion_model.parameters():
        counts[str(getattr(weight, "_qdata", weight).dtype).removeprefix("torch.")] += weight.numel()
    return " and ".join(name for name, count in counts.most_common() if count * 100 > counts.total())
