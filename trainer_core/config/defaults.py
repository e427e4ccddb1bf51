"""Settings that are left open, and the defaults of the base model's family that fill them in.

0 leaves a setting open; OPEN does where 0 has a meaning of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .algorithms import ALGORITHMS
from .clips import OPEN_RATE, ClipConfig
from .dataset import BucketConfig, ConceptConfig, DatasetConfig
from .model import BaseModelConfig
from .network import AUTO, LoraConfig, Preset
from .optimizer import OptimizerConfig
from .optimizer_table import OPTIMIZERS
from .prompt_lines import MOST_FRAMES
from .run import RunConfig, TrainConfig

OPEN = -1
VARIANTS = 8  # of each line of a caption, where captions are encoded before the training
PLAIN_RATE = OPTIMIZERS["adamw"].learning_rate  # the rates of other optimizers are scaled as this one
FAR = 0.75  # a resolution is far from the model's own below this share of it, or above its inverse


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a run takes for a family of base models where its settings are left open."""

    rank: int = 16  # the alpha is the same
    preset: Preset = "attn-mlp"  # layers that are trained
    learning_rate: float = PLAIN_RATE  # of the denoiser, with AdamW
    resolution: int = 1024  # pixels
    step: int = 64  # pixels; sides of buckets are multiples of it
    caption_dropout: float = 0.05  # of pictures that are trained, 0..1
    guidance: float | None = None  # distilled guidance in training; None where the model takes none
    clip_step: int = 0  # frames of a clip per latent frame after the first; 0: the model draws single pictures
    clip_rate: float = 0.0  # frames per second that it was made for
    clip_begins: bool = False  # it draws a clip from its first frame
    clip_keeps: bool = False  # it may keep a clip's first frame


def fill(config: RunConfig, defaults: Defaults) -> RunConfig:
    """Fill in every setting that a run leaves open."""
    train = fill_train(config.train, defaults)
    side = max(train.resolution // defaults.step * defaults.step, 64)
    dataset = fill_dataset(config.dataset, defaults, live=_encodes_live(config))
    return config.replace(
        base_model=_fill_base(config.base_model, defaults),
        dataset=dataset,
        lora=fill_lora(config.lora, defaults),
        optimizer=_fill_optimizer(config.optimizer, defaults),
        train=train,
        sample=config.sample.replace(
            width=config.sample.width or side,
            height=config.sample.height or side,
            frames=config.sample.frames or _most_frames(dataset),
        ),
    )


def _most_frames(dataset: DatasetConfig) -> int:
    """Find the most frames that a clip is trained with; 1 for models of pictures."""
    clips = [each.clips for each in dataset.concepts if each.role == "train" and each.clips and each.clips.step]
    return min(max((each.most for each in clips), default=1), MOST_FRAMES)


def fill_train(train: TrainConfig, defaults: Defaults) -> TrainConfig:
    """Fill in the resolution and the step of buckets."""
    return train.replace(
        resolution=train.resolution or defaults.resolution, bucket_step=train.bucket_step or defaults.step
    )


def _encodes_live(config: RunConfig) -> bool:
    """Tell whether captions are encoded at each step, as text encoders or embeddings are trained."""
    rates = config.optimizer.text_encoder_learning_rate, config.optimizer.text_encoder_2_learning_rate
    return bool(config.lora.embeddings) or max(rates) > 0


def fill_dataset(dataset: DatasetConfig, defaults: Defaults, *, live: bool = False) -> DatasetConfig:
    """Fill in how clips are taken, variants of captions, and their dropout: 0 for concepts that teach no pictures.

    live: captions are encoded at each step, so that they may be new at every visit.
    """

    def filled(concept: ConceptConfig) -> ConceptConfig:
        captions, concept = concept.captions, concept.replace(clips=fill_clips(concept.clips, defaults))
        if captions.variants == OPEN:
            captions = captions.replace(variants=0 if live else VARIANTS)
        if captions.dropout != OPEN:
            return concept.replace(captions=captions)
        trained = concept.role in ("train", "regularisation")
        dropout = defaults.caption_dropout if trained else 0.0
        return concept.replace(captions=captions.replace(dropout=dropout))

    return dataset.replace(concepts=tuple(map(filled, dataset.concepts)))


def fill_clips(clips: ClipConfig | None, defaults: Defaults) -> ClipConfig | None:
    """Fill in the rate of clips and the frames that a model of clips takes; None stays for others."""
    if not defaults.clip_step:
        return clips and clips.replace(step=0, begins=False, keeps=False)  # as a run of another model may have left it
    clips = clips or ClipConfig()
    rate = defaults.clip_rate if clips.rate == OPEN_RATE else clips.rate
    own = {"step": defaults.clip_step, "begins": defaults.clip_begins, "keeps": defaults.clip_keeps}
    return clips.replace(rate=rate, **own)


def fill_lora(lora: LoraConfig, defaults: Defaults) -> LoraConfig:
    """Fill in rank, alpha and preset; an open alpha is the rank. Some algorithms have their own choice of layers."""
    rank, preset = lora.rank or defaults.rank, lora.preset
    if preset == AUTO:
        preset = "attn-mlp" if ALGORITHMS[lora.algorithm].layers else defaults.preset
    return lora.replace(rank=rank, alpha=lora.alpha or float(rank), preset=preset)


def _fill_optimizer(optimizer: OptimizerConfig, defaults: Defaults) -> OptimizerConfig:
    """Fill in the learning rate: the optimizer's own good start, scaled as the family's is to AdamW's."""
    if optimizer.learning_rate != OPEN:
        return optimizer
    kind = OPTIMIZERS[optimizer.name]
    scale = 1.0 if kind.estimates else defaults.learning_rate / PLAIN_RATE
    return optimizer.replace(learning_rate=kind.learning_rate * scale)


def _fill_base(base: BaseModelConfig, defaults: Defaults) -> BaseModelConfig:
    """Fill in the distilled guidance of a connected model that takes one."""
    if base.connected is None or base.connected.guidance != OPEN or defaults.guidance is None:
        return base
    return base.replace(connected=base.connected.replace(guidance=defaults.guidance))


def describe_filled(config: RunConfig, filled: RunConfig, title: str) -> str:
    """Say in a line which settings were left open and what they are now; "" if none was. title: of the model."""
    found = list(_filled(config, filled))
    return f"Left open, so taken from the defaults for {title}: {', '.join(found)}." if found else ""


def _filled(config: RunConfig, filled: RunConfig) -> Iterator[str]:
    """List the settings that were open, with their values."""
    if config.lora.rank != filled.lora.rank:
        yield f"rank {filled.lora.rank}"
    if config.lora.alpha != filled.lora.alpha:
        yield f"alpha {filled.lora.alpha:g}"
    if config.lora.preset != filled.lora.preset:
        yield f"preset {filled.lora.preset}"
    if config.optimizer.learning_rate != filled.optimizer.learning_rate:
        yield f"learning rate {filled.optimizer.learning_rate:g} ({filled.optimizer.name})"
    if config.train.resolution != filled.train.resolution:
        yield f"resolution {filled.train.resolution}"
    pairs = zip(config.dataset.concepts, filled.dataset.concepts, strict=True)
    changed = [after.captions.dropout for before, after in pairs if before.captions.dropout != after.captions.dropout]
    if changed:
        yield f"caption dropout {max(changed):g}"
    if config.sample.frames != filled.sample.frames and config.sample.prompts:
        yield f"sample frames {filled.sample.frames}"
    if config.base_model != filled.base_model and filled.base_model.connected:
        yield f"guidance {filled.base_model.connected.guidance:g}"


def resolution_remarks(train: TrainConfig, dataset: DatasetConfig, defaults: Defaults, title: str) -> list[str]:
    """List a remark on each setting whose resolutions are all far from the one that the model was made for."""
    own = defaults.resolution
    usual = train.buckets.resolutions or (str(train.resolution),)
    of_all = BucketConfig.named("resolutions") if train.buckets.resolutions else train.named("resolution")
    names = {}
    for concept in dataset.concepts:
        texts = concept.resolutions or usual
        names[texts] = concept.named("resolutions") if concept.resolutions else of_all
    return [
        f"{name} is {', '.join(texts)}, and {title} was made for about {own} pixels. Set it to {own}, unless "
        "this is meant."
        for texts, name in names.items()
        if all(_is_far(text, own) for text in texts)
    ]


def _is_far(resolution: str, own: int) -> bool:
    """Tell whether the side of the square of a resolution's area is far from the model's own."""
    sides = [int(side) for side in resolution.split("x")]
    return not own * FAR <= math.sqrt(sides[0] * sides[-1]) <= own / FAR
