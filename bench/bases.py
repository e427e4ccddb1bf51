"""The base models that are measured: their files, and their UNets with and without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lora_atelier.bench.cases import BASES
from lora_atelier.bench.checkpoints import ARCHITECTURES, random_values, write_checkpoint
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


def load_unet(name: str, device: torch.device) -> nn.Module:
    """Return the frozen UNet of a base model alone, in RAM and float16.

    Where its file would hold random weights there is no file: they are drawn at once, fast on a GPU.
    """
    if name in ARCHITECTURES:
        unet, seeded = empty_unet(name), torch.Generator(device).manual_seed(0)
        drawn = {k: random_values(k, tensor, seeded).cpu() for k, tensor in unet.state_dict().items()}
        unet.load_state_dict(drawn, assign=True)
    else:
        header = read_header(ready(name))
        with opened(header) as file:
            unet = build_unet(read_part(file, header.shapes, UNET), detect_family(header), name)
    return unet.requires_grad_(False).eval()


def empty_unet(name: str) -> nn.Module:
    """Build the frozen UNet of a base model on the meta device."""
    if name not in ARCHITECTURES:
        return outline_base_model(BaseModelConfig(path=str(ready(name)))).unet
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**ARCHITECTURES[name].unet).requires_grad_(False).eval()
