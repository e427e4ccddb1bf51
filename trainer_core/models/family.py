"""What a model file is, read from its tensors: never from its name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

PICKLE_SUFFIXES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}

Shapes = Mapping[str, tuple[int, ...]]

UNET, VAE = "model.diffusion_model.", "first_stage_model."  # tensors in a checkpoint begin with these


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

# (a tensor name or a part of it, what such a file is)
OTHER_KINDS = (
    ("joint_blocks.", "a Stable Diffusion 3 model"),
    ("double_blocks.", "a FLUX-like model"),
    ("img_mod.1.", "a Qwen-Image model"),
    ("noise_refiner.", "a Lumina or Z-Image model"),
    ("blocks.0.cross_attn.k_img", "a Wan video model"),
    ("blocks.0.cross_attn.norm_k", "a Wan video model"),
    ("temporal_transformer", "a video model"),
    ("time_stack", "a Stable Video Diffusion model"),
    ("adaln_single.", "a PixArt-like model"),
    ("clip_txt_mapper", "a Stable Cascade model"),
    ("lora_down", "a LoRA"),
    ("lora_A", "a LoRA"),
    ("lora.down", "a LoRA"),
    ("hada_w1", "a LoHa"),
    ("lokr_w", "a LoKr"),
    ("emb_params", "a textual inversion embedding"),
    ("control_model.", "a ControlNet"),
)
LATENT_CHANNELS = 4  # of all families here
TRAINED = "Stable Diffusion 1, 2 and XL"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """The header of a safetensors file: shapes by tensor name, and its metadata."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


def read_header(path: Path) -> FileHeader:
    """Read and check a safetensors header without touching a tensor.

    Raises ValueError that says what the file is when it is not a whole safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"There is no model file at {path}; choose one that exists.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            raise ValueError(f"{path.name} is a GGUF file; training needs a .safetensors checkpoint.")
        if path.suffix.lower() in PICKLE_SUFFIXES or start[:2] in (b"PK", b"\x80\x02"):
            raise ValueError(
                f"{path.name} is a pickle, which can run code when opened; convert it to .safetensors first."
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{path.name} is not a whole safetensors file ({size} bytes); get it again.")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise ValueError(f"{path.name} has a broken safetensors header; get the file again.") from None
    metadata = header.pop("__metadata__", None) or {}
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if not ends:
        raise ValueError(f"{path.name} holds no tensors; choose a checkpoint.")
    if size != 8 + length + max(ends):
        raise ValueError(
            f"{path.name} is cut short or damaged: it has {size} bytes, its header needs {8 + length + max(ends)}; "
            "get the file again."
        )
    return FileHeader(path=path, shapes={k: tuple(v["shape"]) for k, v in header.items()}, metadata=metadata)


def check_vae(header: FileHeader, family: Family) -> None:
    """Refuse a file that is not an autoencoder for a family, saying why."""
    name, shapes = header.path.name, header.shapes
    convolution = next((shapes[key] for key in shapes if key.endswith("decoder.conv_in.weight")), None)
    if convolution is None or not any(key.endswith("encoder.conv_in.weight") for key in shapes):
        raise ValueError(f"{name} is not a Stable Diffusion autoencoder (first tensor: {next(iter(shapes))}).")
    if convolution[1] != LATENT_CHANNELS or len(convolution) != 4:
        raise ValueError(
            f"{name} is an autoencoder of {convolution[1]} latent channels; {family.title} needs one of "
            f"{LATENT_CHANNELS}."
        )


def detect_family(header: FileHeader, *, vae: bool = True) -> Family:
    """Tell the family of a checkpoint from its tensors; refuse any other file, saying what it is instead.

    vae: the file must hold an autoencoder.
    """
    name, shapes = header.path.name, header.shapes
    for part, kind in OTHER_KINDS:
        if any(part in key for key in shapes):
            raise ValueError(f"{name} is {kind}; choose a checkpoint of {TRAINED}, the kinds trained here.")
    if "edm_mean" in shapes or "edm_vpred.sigma_max" in shapes:
        raise ValueError(f"{name} is an EDM model (as Playground 2.5 and CosXL), whose noise is not trained here.")
    has_unet = f"{UNET}input_blocks.0.0.weight" in shapes
    if has_unet and any(key.startswith("conditioner.embedders.0.model.") for key in shapes):
        raise ValueError(f"{name} is the refiner of Stable Diffusion XL; choose the base model or one made from it.")
    found = [
        family
        for family in FAMILIES.values()
        if any(key.startswith(text.prefix) for text in family.texts for key in shapes)
    ]
    missing = [] if has_unet else ["UNet"]
    family = found[0] if found else None
    texts = family.texts if family else ()
    if not texts or not all(any(key.startswith(text.prefix) for key in shapes) for text in texts):
        missing.append("text encoder" if len(texts) < 2 else "second text encoder")
    if vae and not any(key.startswith(VAE) for key in shapes):
        missing.append("VAE")
    if len(missing) == 2 + vae:
        raise ValueError(f"{name} is not a Stable Diffusion checkpoint (first tensor: {next(iter(shapes))}).")
    if missing or family is None:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; choose a full checkpoint.")
    channels = shapes[f"{UNET}input_blocks.0.0.weight"][1]
    if channels != 4:
        raise ValueError(
            f"{name} takes {channels} input channels (an inpainting or edit model); choose one with 4, an ordinary "
            f"{family.title} checkpoint."
        )
    return family


def detect_prediction(header: FileHeader, family: Family) -> str:
    """Return what the file says that it predicts: "epsilon" or "v_prediction".

    Markers count first: a `v_pred` tensor or modelspec. A Stable Diffusion 2 file without one is told by a bias that is
    spread wide in v models only, the rule by which ComfyUI tells them.
    """
    declared = header.metadata.get("modelspec.prediction_type", "")
    if "v_pred" in header.shapes or declared in ("v", "v_prediction"):
        return "v_prediction"
    spread = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
    if family.name == "sd2" and not declared and spread in header.shapes:
        with safe_open(header.path, framework="pt") as file:
            return "v_prediction" if float(file.get_tensor(spread).float().std(unbiased=False)) > 0.09 else "epsilon"
    return "epsilon"


def detect_zero_terminal_snr(header: FileHeader) -> bool:
    """Tell whether the file says that its noise schedule ends in pure noise (a `ztsnr` tensor)."""
    return "ztsnr" in header.shapes
