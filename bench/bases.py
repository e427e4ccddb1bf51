"""Build the measured base models: their files, their UNets with and without weights, and networks on these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_atelier.bench.cases import BASES
from lora_atelier.bench.checkpoints import ARCHITECTURES, random_values, write_checkpoint
from lora_atelier.trainer_core.config import BaseModelConfig, LoraConfig
from lora_atelier.trainer_core.models.files.safetensors_file import opened, read_header, read_part, shapes_under
from lora_atelier.trainer_core.models.sd import StableDiffusion, outline_base_model
from lora_atelier.trainer_core.models.sd.family import FAMILIES, UNET, detect_family
from lora_atelier.trainer_core.models.sd.layers import PREFIX, unet_layers
from lora_atelier.trainer_core.models.sd.unet import fill_unet, outline_unet
from lora_atelier.trainer_core.networks import Network, choose_layers


def ready(name: str) -> Path:
    """Find the file of a base model; write one of random weights if it is missing."""
    path = BASES[name].path
    if not path.exists():
        if name not in ARCHITECTURES:
            raise SystemExit(f"{path} is missing; get a complete checkout.")
        write_checkpoint(path, ARCHITECTURES[name])
    return path


def load_unet(name: str, device: torch.device) -> nn.Module:
    """Load the frozen UNet of a base model, in RAM and float16.

    Random weights are drawn at once, fast on a GPU, instead of read from a file.
    """
    if name in ARCHITECTURES:
        unet, seeded = empty_unet(name), torch.Generator(device).manual_seed(0)
        drawn = {k: random_values(k, tensor, seeded).cpu() for k, tensor in unet.state_dict().items()}
        unet.load_state_dict(drawn, assign=True)
    else:
        header = read_header(ready(name))
        with opened(header) as file:
            outline = outline_unet(shapes_under(header.shapes, UNET), detect_family(header), name)
            unet = fill_unet(outline, read_part(file, header.shapes, UNET), name)
    return unet.requires_grad_(False).eval()


def tokenizer() -> str:
    """Find the folder of CLIP's tokenizer, in the ComfyUI of COMFYUI_PATH."""
    return str(Path(os.environ.get("COMFYUI_PATH", "")) / "comfy" / "sd1_tokenizer")


def empty_unet(name: str) -> nn.Module:
    """Build the frozen UNet of a base model on the meta device."""
    if name not in ARCHITECTURES:
        return outline_base_model(BaseModelConfig(path=str(ready(name)))).unet
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**ARCHITECTURES[name].unet).requires_grad_(False).eval()


def model_of(unet: Any, dtype: torch.dtype = torch.float32) -> StableDiffusion:
    """Wrap a UNet as a base model without text encoders and autoencoder."""
    family = FAMILIES["sdxl" if unet.config.addition_embed_type == "text_time" else "sd1"]
    return StableDiffusion(family=family, name="", unet=unet, texts=(), vae=None, tokenizer=None, dtype=dtype)


def network_on(unet: nn.Module, lora: LoraConfig) -> Network:
    """Build a new network on a UNet."""
    return Network(choose_layers(model_of(unet), lora, [PREFIX]), lora, seed=0)


def matrices_of(unet: nn.Module, preset: str) -> dict[str, nn.Module]:
    """List the linear layers and convolutions of a UNet that a preset trains, by their own names."""
    layers = [layer for layer in unet_layers(unet) if preset in layer.presets]
    return {layer.path: layer.module for layer in layers if isinstance(layer.module, nn.Linear | nn.Conv2d)}
