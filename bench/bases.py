"""The base models that are measured: their files, and their UNets with and without weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lora_atelier.bench.cases import BASES
from lora_atelier.bench.checkpoints import ARCHITECTURES, write_checkpoint
from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models import outline_base_model
from lora_atelier.trainer_core.models.family import UNET, detect_family
from lora_atelier.trainer_core.models.header import opened, read_header, read_part
from lora_atelier.trainer_core.models.unet import build_unet


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
    header = read_header(path)
    with opened(header) as file:
        unet = build_unet(read_part(file, header.shapes, UNET), detect_family(header), path.name)
    return unet.requires_grad_(False).eval()


def empty_unet(path: Path) -> nn.Module:
    """Build the frozen UNet of a checkpoint on the meta device, from the file's header alone."""
    return outline_base_model(BaseModelConfig(path=str(path))).unet
