"""Model families, and how a file's tensors (never its name) tell its family and kind."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ...config import ConnectedConfig, Defaults, for_reader, node, setting
from ..base import Prediction
from ..files.safetensors_file import FileHeader, Shapes, opened, shapes_under
from .identify import name_unsupported

UNET, VAE = "model.diffusion_model.", "first_stage_model."  # prefixes of tensors in a checkpoint
SIZE_CHANNELS = 256  # of the embedding of each of the six size and crop numbers of Stable Diffusion XL


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """One text encoder of a family: its names in files, and the layer that conditions the UNet."""

    prefix: str  # of its tensors in a checkpoint
    open_clip: bool  # OpenCLIP's names, rows padded with 0; else CLIP's, padded with EOS
    layer: int  # hidden state in use, counted from the end; clip skip can only raise it
    final_norm: bool
    pooled: bool  # also gives the pooled embedding
    kohya: str  # prefix of its layers' names in a LoRA file
    folder: str  # its folder in a diffusers folder
    comfy: str  # ComfyUI's name for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family: the constants that its tensors do not show."""

    name: str
    title: str
    texts: tuple[TextPart, ...]
    latent_scale: float  # of the autoencoder
    heads: int  # of every attention layer; 0: heads of 64 channels
    ldm_names: bool  # LoRA files use the original code's names for UNet layers, not diffusers'
    base_version: str  # kohya's ss_base_model_version
    architecture: str  # modelspec's
    defaults: Defaults


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="sd1",
            title="Stable Diffusion 1",
            texts=(
                TextPart(
                    prefix="cond_stage_model.transformer.",
                    open_clip=False,
                    layer=1,
                    final_norm=True,
                    pooled=False,
                    kohya="lora_te",
                    folder="text_encoder",
                    comfy="clip_l",
                ),
            ),
            latent_scale=0.18215,
            heads=8,
            ldm_names=False,
            base_version="sd_v1",
            architecture="stable-diffusion-v1",
            defaults=Defaults(resolution=512),
        ),
        Family(
            name="sd2",
            title="Stable Diffusion 2",
            texts=(
                TextPart(
                    prefix="cond_stage_model.model.",
                    open_clip=True,
                    layer=2,
                    final_norm=True,
                    pooled=False,
                    kohya="lora_te",
                    folder="text_encoder",
                    comfy="clip_h",
                ),
            ),
            latent_scale=0.18215,
            heads=0,
            ldm_names=False,
            base_version="sd_v2",
            architecture="stable-diffusion-v2-512",
            defaults=Defaults(resolution=512),
        ),
        Family(
            name="sdxl",
            title="Stable Diffusion XL",
            texts=(
                TextPart(
                    prefix="conditioner.embedders.0.transformer.",
                    open_clip=False,
                    layer=2,
                    final_norm=False,
                    pooled=False,
                    kohya="lora_te1",
                    folder="text_encoder",
                    comfy="clip_l",
                ),
                TextPart(
                    prefix="conditioner.embedders.1.model.",
                    open_clip=True,
                    layer=2,
                    final_norm=False,
                    pooled=True,
                    kohya="lora_te2",
                    folder="text_encoder_2",
                    comfy="clip_g",
                ),
            ),
            latent_scale=0.13025,
            heads=0,
            ldm_names=True,
            base_version="sdxl_base_v1-0",
            architecture="stable-diffusion-xl-v1-base",
            defaults=Defaults(resolution=1024),
        ),
    )
}

V_RESOLUTION = 768  # of Stable Diffusion 2 models that predict v
TOY_CHANNELS = 128  # of the UNet's first block; below it a model is a toy
TOY_CFG = 3.0  # at 7 the little that a toy has learned is drawn in glaring colours
TOY = Defaults(preset="full", learning_rate=3e-3, resolution=128, step=32)

LATENT_CHANNELS = 4  # of all families here
INPAINTING_CHANNELS = 9  # noised latents, mask, latents of the picture with the masked region blanked
SUPPORTED = "Stable Diffusion 1, 2 or XL"
VAE_FILE, TEXT_FILES = "vae", ("text_encoder", "text_encoder_2")  # parts that files of their own can give
EDITING_CHANNELS = 8
UNSUPPORTED_CHANNELS = {  # kinds of UNets by their number of input channels
    5: "a depth model",
    7: "an upscaling model",
    EDITING_CHANNELS: "an edit model (as InstructPix2Pix)",
}
FAMILY_BY_WIDTH = {768: "sd1", 1024: "sd2"}  # families by the width of the UNet's text input
SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
V_BIAS = "output_blocks.11.1.transformer_blocks.0.norm1.bias"


def other_vae() -> str:
    """Tell what to do about a VAE that does not fit."""
    return f"Set {setting('base_model.vae')} to another file."


def connect_it() -> str:
    """Tell what to do about a whole model of another kind, as the end of a sentence."""
    instead = for_reader(
        f"link them into {node('connected')} in place of {node('base_model')}",
        f"train the workflow that links them into {ConnectedConfig.NODE}",
    )
    return f"load it with ComfyUI's own loaders and {instead}"


def choose_another() -> str:
    """Tell what to do about a file that is no model, as the end of a sentence."""
    return f"choose a checkpoint of {SUPPORTED}, the kinds trained here"


def is_stable_diffusion(shapes: Shapes) -> bool:
    """Tell whether tensors are those of a checkpoint of Stable Diffusion."""
    return unet_prefix(shapes) is not None


def unet_prefix(shapes: Shapes) -> str | None:
    """Find the prefix of a UNet's tensors in a file: "" in files of a UNet alone, None without a UNet."""
    return next((prefix for prefix in (UNET, "") if f"{prefix}input_blocks.0.0.weight" in shapes), None)


def detect_family(header: FileHeader, given: Collection[str] = ()) -> Family:
    """Detect the family of a checkpoint from its tensors; raise ValueError, with the kind, for any other file.

    given: names of VAE_FILE and TEXT_FILES whose parts come from other files, so that this one may lack them.
    """
    name, shapes = header.path.name, header.shapes
    if SHARD.search(name):
        raise ValueError(f"{name} is one part of a model in several files; choose the same model in one file.")
    if other := name_unsupported(shapes):
        raise ValueError(f"{name} is {other.kind}; {connect_it() if other.model else choose_another()}.")
    prefix = unet_prefix(shapes)
    if prefix is not None and any(key.startswith("conditioner.embedders.0.model.") for key in shapes):
        raise ValueError(f"{name} is the refiner of Stable Diffusion XL; choose the base model or one made from it.")
    found = [
        family
        for family in FAMILIES.values()
        if any(key.startswith(text.prefix) for text in family.texts for key in shapes)
    ]
    if not found and prefix is None:
        raise ValueError(
            f"{name} is not a checkpoint, and its kind is unknown (first tensor: {next(iter(shapes))}); "
            f"{choose_another()}."
        )
    family = found[0] if found else _family_of_unet(shapes_under(shapes, prefix or ""))
    _check_whole(header, family, given)
    _check_kind(name, shapes_under(shapes, prefix or ""), family)
    return family


def _family_of_unet(shapes: Shapes) -> Family:
    """Detect the family of a UNet without text encoders by its text and size inputs."""
    if "label_emb.0.0.weight" in shapes:
        return FAMILIES["sdxl"]
    linear = any(key.endswith("1.proj_in.weight") and len(shape) == 2 for key, shape in shapes.items())
    return FAMILIES[FAMILY_BY_WIDTH.get(context_width(shapes), "sd2" if linear else "sd1")]


def context_width(shapes: Shapes) -> int:
    """Find the width of a UNet's text input; 0 if its tensors do not show it."""
    return next((s[1] for key, s in shapes.items() if key.endswith("attn2.to_k.weight") and len(s) == 2), 0)


def text_widths(family: Family, context: int, conditioning_channels: int) -> tuple[int, ...]:
    """Compute the width of each text encoder of a UNet whose text input has the width `context`.

    conditioning_channels: of its added conditioning, the second encoder's pooled embedding and the six size numbers.
    """
    if len(family.texts) == 1:
        return (context,)
    pooled = conditioning_channels - 6 * SIZE_CHANNELS
    return context - pooled, pooled


def _check_whole(header: FileHeader, family: Family, given: Collection[str]) -> None:
    """Raise ValueError for a checkpoint that lacks a part, unless another file gives it."""
    name, shapes = header.path.name, header.shapes
    missing = [] if unet_prefix(shapes) is not None else ["UNet"]
    lacking = [
        ordinal
        for ordinal, text, file in zip(("first", "second"), family.texts, TEXT_FILES, strict=False)
        if file not in given and not any(key.startswith(text.prefix) for key in shapes)
    ]
    if lacking:
        one = "text encoder" if len(family.texts) == 1 else f"{lacking[0]} text encoder"
        missing.append("text encoders" if len(lacking) == 2 else one)
    if VAE_FILE not in given and not any(key.startswith(VAE) for key in shapes):
        missing.append("VAE")
    if missing:
        other = "" if "UNet" in missing else ", or another file for each missing part"
        raise ValueError(f"{name} has no {' and no '.join(missing)}; choose a full checkpoint{other}.")


def _check_kind(name: str, shapes: Shapes, family: Family) -> None:
    """Raise ValueError for a UNet (shapes without prefix) with other inputs than those trained here."""
    check_channels(name, shapes["input_blocks.0.0.weight"][1], family)
    if family.name != "sdxl" and "label_emb.0.0.weight" in shapes:
        raise ValueError(
            f"{name} is an unCLIP model, conditioned on pictures; choose an ordinary {family.title} model."
        )


def check_channels(name: str, channels: int, family: Family) -> None:
    """Raise ValueError for a UNet with other input channels than ordinary and inpainting models."""
    if channels not in (LATENT_CHANNELS, INPAINTING_CHANNELS):
        raise ValueError(
            f"{name} takes {channels} input channels, it is {UNSUPPORTED_CHANNELS.get(channels, 'no ordinary model')}; "
            f"choose an ordinary or an inpainting checkpoint of {family.title}{_linked(channels)}."
        )


def _linked(channels: int) -> str:
    return f", or link it by {node('connected')}" if channels == EDITING_CHANNELS else ""


def check_vae(header: FileHeader, family: Family) -> None:
    """Raise ValueError for a file that is not an autoencoder of a family's latents."""
    name, shapes = header.path.name, header.shapes
    convolution = next((shapes[key] for key in shapes if key.endswith("decoder.conv_in.weight")), None)
    if convolution is None or not any(key.endswith("encoder.conv_in.weight") for key in shapes):
        other = None if unet_prefix(shapes) is not None else name_unsupported(shapes)
        kind = "a checkpoint" if unet_prefix(shapes) is not None else other and other.kind
        if kind is None or "(VAE)" in kind:
            kind = f"another one, or incomplete (first tensor: {next(iter(shapes))})"
        raise ValueError(f"{name} is not a Stable Diffusion autoencoder but {kind}. {other_vae()}")
    if len(convolution) != 4 or convolution[1] != LATENT_CHANNELS:
        raise ValueError(
            f"{name} is an autoencoder of {convolution[1]} latent channels; {family.title} needs one of "
            f"{LATENT_CHANNELS}. {other_vae()}"
        )


def check_own_vae(header: FileHeader, family: Family) -> None:
    """Raise ValueError for a checkpoint whose own autoencoder is incomplete or has other latents than its family."""
    own = [key.removeprefix(VAE) for key in header.shapes if key.startswith(VAE)]
    parts = ("encoder.conv_in.weight", "decoder.conv_in.weight"), ("taesd_encoder.0.weight", "taesd_decoder.1.weight")
    if not any(set(names) <= set(own) for names in parts):
        raise ValueError(f"The VAE of {header.path.name} is incomplete. {other_vae()}")
    for name in (f"{VAE}decoder.conv_in.weight", f"{VAE}taesd_decoder.1.weight"):
        channels = header.shapes.get(name, (0, LATENT_CHANNELS))[1]
        if channels != LATENT_CHANNELS:
            raise ValueError(
                f"The VAE of {header.path.name} has {channels} latent channels, {family.title} needs one of "
                f"{LATENT_CHANNELS}. {other_vae()}"
            )


def declared_prediction(header: FileHeader, family: Family) -> tuple[Prediction, str] | None:
    """Read a file's prediction, "epsilon" or "v_prediction", and where it was found; None if it has no sign of it.

    A `v_pred` tensor or modelspec decides. Else ComfyUI's rule for Stable Diffusion 2 does: one bias has a large
    spread in v models only. Its inpainting models all predict epsilon.
    """
    declared = header.metadata.get("modelspec.prediction_type", "")
    if "v_pred" in header.shapes:
        return "v_prediction", "a v_pred tensor"
    if declared in ("v", "v_prediction", "epsilon", "eps"):
        return "v_prediction" if declared.startswith("v") else "epsilon", "modelspec.prediction_type in its metadata"
    prefix = unet_prefix(header.shapes)
    bias, first = f"{prefix}{V_BIAS}", f"{prefix}input_blocks.0.0.weight"
    if family.name != "sd2" or bias not in header.shapes or header.shapes[first][1] != LATENT_CHANNELS:
        return None
    with opened(header) as file:
        wide = float(file.get_tensor(bias).float().std(unbiased=False)) > 0.09
    return "v_prediction" if wide else "epsilon", "the spread of one of its biases"


def detect_zero_terminal_snr(header: FileHeader) -> bool:
    """Tell whether a file declares zero terminal SNR (a `ztsnr` tensor)."""
    return "ztsnr" in header.shapes
