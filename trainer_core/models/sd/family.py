"""What a model file is, read from its tensors: never from its name."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ..base import Prediction
from ..files.safetensors_file import FileHeader, Shapes, opened, under
from .identify import name_other

UNET, VAE = "model.diffusion_model.", "first_stage_model."  # tensors in a checkpoint begin with these
SIZE_CHANNELS = 256  # of each of the six size and crop numbers that Stable Diffusion XL is told


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    """One text encoder of a family: where it lies, and which of its layers conditions the UNet."""

    prefix: str  # of its tensors in a checkpoint
    open_clip: bool  # OpenCLIP's names and rows padded with 0; else CLIP's, padded with EOS
    layer: int  # hidden state in use, counted from the end; clip skip only goes deeper
    final_norm: bool
    pooled: bool  # gives the pooled embedding as well
    kohya: str  # what names of its layers in a LoRA file begin with
    folder: str  # in a diffusers folder
    comfy: str  # ComfyUI's name of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models of one architecture: all that the code must know beyond what the tensors tell."""

    name: str
    title: str
    texts: tuple[TextPart, ...]
    latent_scale: float  # of the autoencoder
    heads: int  # of every attention layer, 0: as many as 64 channels each give
    ldm_names: bool  # LoRA files name UNet layers as the original code does, not as diffusers
    base_version: str  # kohya's ss_base_model_version
    architecture: str  # modelspec's


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
        ),
    )
}

LATENT_CHANNELS = 4  # of all families here
INPAINTING_CHANNELS = 9  # noised latents, mask, latents of the picture without what the mask covers
TRAINED = "Stable Diffusion 1, 2 or XL"
VAE_FILE, TEXT_FILES = "vae", ("text_encoder", "text_encoder_2")  # parts that files of their own can give
OTHER_CHANNELS = {  # what UNets of other input channels are
    5: "a depth model",
    7: "an upscaling model",
    8: "an edit model (as InstructPix2Pix)",
}
OF_WIDTH = {768: "sd1", 1024: "sd2"}  # families by the width of the text that their UNets take
PART_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.")
SPREAD = "output_blocks.11.1.transformer_blocks.0.norm1.bias"


def unet_prefix(shapes: Shapes) -> str | None:
    """Return what a UNet's tensors begin with in a file, "" in files that hold nothing else, None without one."""
    return next((prefix for prefix in (UNET, "") if f"{prefix}input_blocks.0.0.weight" in shapes), None)


def detect_family(header: FileHeader, given: Collection[str] = ()) -> Family:
    """Tell the family of a checkpoint from its tensors; refuse any other file, saying what it is instead.

    given: of VAE_FILE and TEXT_FILES, what other files give, so that this one need not hold it.
    """
    name, shapes = header.path.name, header.shapes
    if PART_OF_SEVERAL.search(name):
        raise ValueError(f"{name} is one part of a model in several files; choose the same model in one file.")
    if kind := name_other(shapes):
        raise ValueError(f"{name} is {kind}; choose a checkpoint of {TRAINED}, the kinds trained here.")
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
            f"{name} is no checkpoint, and no other file known here (first tensor: {next(iter(shapes))}); choose a "
            f"checkpoint of {TRAINED}."
        )
    family = found[0] if found else _family_of_unet(under(shapes, prefix or ""))
    _check_whole(header, family, given)
    _check_kind(name, under(shapes, prefix or ""), family)
    return family


def _family_of_unet(shapes: Shapes) -> Family:
    """Tell the family of a UNet without text encoders, by the text and the size numbers that it takes."""
    if "label_emb.0.0.weight" in shapes:
        return FAMILIES["sdxl"]
    linear = any(key.endswith("1.proj_in.weight") and len(shape) == 2 for key, shape in shapes.items())
    return FAMILIES[OF_WIDTH.get(context_width(shapes), "sd2" if linear else "sd1")]


def context_width(shapes: Shapes) -> int:
    """Return the width of the text that a UNet takes, 0 when its tensors do not tell."""
    return next((s[1] for key, s in shapes.items() if key.endswith("attn2.to_k.weight") and len(s) == 2), 0)


def text_widths(family: Family, context: int, told: int) -> tuple[int, ...]:
    """Return how wide each text encoder must be for a UNet that takes a context of that width.

    told: channels of what the UNet is told beside it, the pooled embedding of the second encoder and six numbers.
    """
    if len(family.texts) == 1:
        return (context,)
    pooled = told - 6 * SIZE_CHANNELS
    return context - pooled, pooled


def _check_whole(header: FileHeader, family: Family, given: Collection[str]) -> None:
    """Refuse a checkpoint that lacks a part which no other file gives."""
    name, shapes = header.path.name, header.shapes
    missing = [] if unet_prefix(shapes) is not None else ["UNet"]
    lacking = [
        place
        for place, text, file in zip(("first", "second"), family.texts, TEXT_FILES, strict=False)
        if file not in given and not any(key.startswith(text.prefix) for key in shapes)
    ]
    if lacking:
        one = "text encoder" if len(family.texts) == 1 else f"{lacking[0]} text encoder"
        missing.append("text encoders" if len(lacking) == 2 else one)
    if VAE_FILE not in given and not any(key.startswith(VAE) for key in shapes):
        missing.append("VAE")
    if missing:
        other = "" if "UNet" in missing else ", or another file for what is missing"
        raise ValueError(f"{name} has no {' and no '.join(missing)}; choose a full checkpoint{other}.")


def _check_kind(name: str, shapes: Shapes, family: Family) -> None:
    """Refuse a UNet (shapes without prefix) that is told something else than those trained here."""
    check_channels(name, shapes["input_blocks.0.0.weight"][1], family)
    if family.name != "sdxl" and "label_emb.0.0.weight" in shapes:
        raise ValueError(f"{name} is an unCLIP model, which is told a picture; choose an ordinary {family.title} one.")


def check_channels(name: str, channels: int, family: Family) -> None:
    """Refuse a UNet of other input channels than ordinary and inpainting models have."""
    if channels not in (LATENT_CHANNELS, INPAINTING_CHANNELS):
        raise ValueError(
            f"{name} takes {channels} input channels, it is {OTHER_CHANNELS.get(channels, 'no ordinary model')}; "
            f"choose an ordinary or an inpainting checkpoint of {family.title}."
        )


def check_vae(header: FileHeader, family: Family) -> None:
    """Refuse a file that is not an autoencoder for a family, saying why."""
    name, shapes = header.path.name, header.shapes
    convolution = next((shapes[key] for key in shapes if key.endswith("decoder.conv_in.weight")), None)
    if convolution is None or not any(key.endswith("encoder.conv_in.weight") for key in shapes):
        kind = "a checkpoint" if unet_prefix(shapes) is not None else name_other(shapes)
        if kind is None or "(VAE)" in kind:
            kind = f"another one, or not whole (first tensor: {next(iter(shapes))})"
        raise ValueError(f"{name} is not a Stable Diffusion autoencoder but {kind}; choose another file as vae.")
    if len(convolution) != 4 or convolution[1] != LATENT_CHANNELS:
        raise ValueError(
            f"{name} is an autoencoder of {convolution[1]} latent channels; {family.title} needs one of "
            f"{LATENT_CHANNELS}."
        )


def check_own_vae(header: FileHeader, family: Family) -> None:
    """Refuse a checkpoint whose own autoencoder has other latents than its family, or only a part of its tensors."""
    own = [key.removeprefix(VAE) for key in header.shapes if key.startswith(VAE)]
    parts = ("encoder.conv_in.weight", "decoder.conv_in.weight"), ("taesd_encoder.0.weight", "taesd_decoder.1.weight")
    if not any(set(names) <= set(own) for names in parts):
        raise ValueError(f"The VAE of {header.path.name} is not whole; choose another file as vae.")
    for name in (f"{VAE}decoder.conv_in.weight", f"{VAE}taesd_decoder.1.weight"):
        channels = header.shapes.get(name, (0, LATENT_CHANNELS))[1]
        if channels != LATENT_CHANNELS:
            raise ValueError(
                f"The VAE of {header.path.name} has {channels} latent channels, {family.title} needs one of "
                f"{LATENT_CHANNELS}; choose another file as vae."
            )


def declared_prediction(header: FileHeader, family: Family) -> tuple[Prediction, str] | None:
    """Return what a file says that it predicts, "epsilon" or "v_prediction", and by what; None if it says nothing.

    Markers count first: a `v_pred` tensor or modelspec. A Stable Diffusion 2 file without one is told by a bias that is
    spread wide in v models only, the rule by which ComfyUI tells them (its inpainting models all predict noise).
    """
    said = header.metadata.get("modelspec.prediction_type", "")
    if "v_pred" in header.shapes:
        return "v_prediction", "a v_pred tensor"
    if said in ("v", "v_prediction", "epsilon", "eps"):
        return "v_prediction" if said.startswith("v") else "epsilon", "modelspec.prediction_type in its metadata"
    prefix = unet_prefix(header.shapes)
    spread, first = f"{prefix}{SPREAD}", f"{prefix}input_blocks.0.0.weight"
    if family.name != "sd2" or spread not in header.shapes or header.shapes[first][1] != LATENT_CHANNELS:
        return None
    with opened(header) as file:
        wide = float(file.get_tensor(spread).float().std(unbiased=False)) > 0.09
    return "v_prediction" if wide else "epsilon", "the spread of one of its biases"


def detect_zero_terminal_snr(header: FileHeader) -> bool:
    """Tell whether the file says that its noise schedule ends in pure noise (a `ztsnr` tensor)."""
    return "ztsnr" in header.shapes
