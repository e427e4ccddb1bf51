"""The base models that are measured: their files, and their UNets with and without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lora_atelier.bench.cases import BASES
from lora_atelier.bench.checkpoints import ARCHITECTURES, write_checkpoint
from lora_atelier.trainer_core.models.family import UNET, detect_family, read_header
from lora_atelier.trainer_core.models.sd import build_unet, read_part, unet_shape


def ready(name: str) -> Path:
    """Return the file of a base model, making one of random weights if it is not there yet."""
    path = BASES[name].path
    if not path.exists():
        if name not in ARCHITECTURES:
            raise SystemExit(f"{path} is missing; get a complete checkout.")
        write_checkpoint(path, ARCHITECTURES[name])
    return path


def load_unet(path: Path) -> nn.Module:
    """Load the frozen UNet of a checkpoint alone, to the CPU and in the file's dtype."""
    from safetensors import safe_open

    family = detect_family(read_header(path))
    with safe_open(path, framework="pt") as file:
        unet = build_unet(read_part(file, list(file.keys()), UNET), family, path.name)
    return unet.requires_grad_(False).eval()


def empty_unet(path: Path) -> nn.Module:
    """Build the frozen UNet of a checkpoint on the meta device, from the file's header alone."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    header = read_header(path)
    shapes = {k.removeprefix(UNET): v for k, v in header.shapes.items() if k.startswith(UNET)}
    with torch.device("meta"):
        unet = UNet2DConditionModel(**unet_shape(shapes, detect_family(header)))
    return unet.requires_grad_(False).eval()
