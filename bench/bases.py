"""The base models that are measured: the pack's tiny one, and a full-size one of random weights made once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_atelier.trainer_core.models.names import unet_ldm_names, vae_ldm_names

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bench"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base model and the sizes it is measured at."""

    name: str
    title: str
    path: Path
    resolution: int  # pixels on the CPU
    gpu_resolution: int  # pixels on CUDA
    race_steps: int  # steps of each contender per round
    stock_steps: int  # steps of the stock node per round
    loop_steps: int  # steps of the real training loop


BASES = {
    "tiny": Base(
        name="tiny",
        title="the tiny base of this pack",
        path=ROOT / "assets" / "atelier-tiny.safetensors",
        resolution=128,
        gpu_resolution=128,
        race_steps=20,
        stock_steps=8,
        loop_steps=40,
    ),
    "sd15": Base(
        name="sd15",
        title="Stable Diffusion 1.5 at full size, random weights",
        path=CACHE / "sd15-random.safetensors",
        resolution=256,
        gpu_resolution=512,
        race_steps=5,
        stock_steps=3,
        loop_steps=6,
    ),
}


def ready(base: Base) -> Path:
    """Return the file of a base model, making the full-size one if it is not there yet (2.1 GB)."""
    if not base.path.exists():
        if base.name != "sd15":
            raise SystemExit(f"{base.path} is missing; get a complete checkout.")
        base.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = base.path.with_suffix(".tmp")
        save_file(dict(sd15_tensors()), temporary)
        os.replace(temporary, base.path)
    return base.path


def sd15_tensors() -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Stable Diffusion 1.5 checkpoint by original name, float16, seeded random values."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
        )
        text = CLIPTextModel(
            CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        )
    unet_names = unet_ldm_names(unet.state_dict(), layers_per_block=2)
    vae_names = vae_ldm_names(vae.state_dict(), levels=4)
    seeded = torch.Generator().manual_seed(0)

    for name, tensor in unet.state_dict().items():
        yield f"model.diffusion_model.{unet_names[name]}", _random(name, tensor, seeded)
    for name, tensor in text.state_dict().items():
        stem = name.removeprefix("text_model.")
        yield f"cond_stage_model.transformer.text_model.{stem}", _random(name, tensor, seeded)
    for name, tensor in vae.state_dict().items():
        value = _random(name, tensor, seeded)
        if "attentions" in name and value.ndim == 2:  # 1x1 convolutions in the original
            value = value[..., None, None]
        yield f"first_stage_model.{vae_names[name]}", value


def _random(name: str, tensor: Tensor, seeded: torch.Generator) -> Tensor:
    """Return values under which activations stay finite: N(0, 1/fan in), norm weights 1, biases 0."""
    if tensor.ndim < 2:
        return torch.full(tensor.shape, float(name.endswith("weight")), dtype=torch.float16)
    std = 0.02 if "embedding" in name and "time" not in name else 1 / math.sqrt(tensor[0].numel())
    return (torch.randn(tensor.shape, generator=seeded) * std).half()


def load_unet(path: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load the frozen UNet of a checkpoint alone."""
    from safetensors import safe_open

    from lora_atelier.trainer_core.models.family import FAMILIES, UNET
    from lora_atelier.trainer_core.models.header import read_part
    from lora_atelier.trainer_core.models.unet import build_unet

    with safe_open(path, framework="pt") as file:
        unet = build_unet(read_part(file, list(file.keys()), UNET), FAMILIES["sd1"], path.name)
    return nn.Module.to(unet.requires_grad_(False).eval(), device, dtype)
