"""What a model file is, read from its tensors: never from its name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PICKLE_SUFFIXES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}

Shapes = Mapping[str, tuple[int, ...]]

# (a tensor name or a part of it, what such a file is)
OTHER_KINDS = (
    ("conditioner.embedders.", "an SDXL checkpoint"),
    ("cond_stage_model.model.", "a Stable Diffusion 2 checkpoint"),
    ("joint_blocks.", "a Stable Diffusion 3 model"),
    ("double_blocks.", "a FLUX-like model"),
    ("lora_down", "a LoRA"),
    ("lora_A", "a LoRA"),
    ("lora.down", "a LoRA"),
    ("hada_w1", "a LoHa"),
    ("lokr_w", "a LoKr"),
    ("emb_params", "a textual inversion embedding"),
    ("control_model.", "a ControlNet"),
)


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


def check_sd1(header: FileHeader) -> None:
    """Refuse a file that is not a Stable Diffusion 1 shaped checkpoint, saying what it is instead."""
    name, shapes = header.path.name, header.shapes
    for part, kind in OTHER_KINDS:
        if any(part in key for key in shapes):
            raise ValueError(f"{name} is {kind}; choose a Stable Diffusion 1 checkpoint, the kind trained here.")
    missing = [
        part
        for part, key in (
            ("UNet", "model.diffusion_model.input_blocks.0.0.weight"),
            ("text encoder", "cond_stage_model.transformer."),
            ("VAE", "first_stage_model."),
        )
        if not any(k.startswith(key) for k in shapes)
    ]
    if len(missing) == 3:
        raise ValueError(f"{name} is not a Stable Diffusion checkpoint (first tensor: {next(iter(shapes))}).")
    if missing:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; choose a full checkpoint.")
    channels = shapes["model.diffusion_model.input_blocks.0.0.weight"][1]
    if channels != 4:
        raise ValueError(
            f"{name} takes {channels} input channels (an inpainting or edit model); choose one with 4, an ordinary "
            "Stable Diffusion 1 checkpoint."
        )


def detect_prediction(header: FileHeader) -> str:
    """Return "v_prediction" when the file says so, else "epsilon", the rule of Stable Diffusion 1."""
    declared = header.metadata.get("modelspec.prediction_type", "")
    return "v_prediction" if "v_pred" in header.shapes or declared in ("v", "v_prediction") else "epsilon"
