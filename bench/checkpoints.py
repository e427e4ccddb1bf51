"""Write checkpoints of random weights in the original single-file layout, tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_atelier.trainer_core.models.sd.family import FAMILIES, UNET, VAE
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names, vae_ldm_names

HEAD = 64  # channels of an attention head in text encoders
XL_UNET: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The parts of a checkpoint: diffusers' shape of the UNet, the sizes of its text encoders and its autoencoder."""

    family: str
    unet: dict[str, Any]
    texts: tuple[tuple[int, int], ...]  # (width, layers) of each
    vae: tuple[int, ...] = (128, 256, 512, 512)  # channels of each level
    markers: tuple[str, ...] = ()  # tensors without values that say something of the model


ARCHITECTURES = {
    "sd15": Architecture(family="sd1", unet={"cross_attention_dim": 768, "attention_head_dim": 8}, texts=((768, 12),)),
    "sd2": Architecture(
        family="sd2",
        unet={"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
        texts=((1024, 24),),
        markers=("v_pred",),
    ),
    "sdxl": Architecture(
        family="sdxl",
        unet={
            **XL_UNET,
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 768 + 1280,
            "projection_class_embeddings_input_dim": 1280 + 6 * 256,
        },
        texts=((768, 12), (1280, 32)),
    ),
    "toy-sdxl": Architecture(
        family="sdxl",
        unet={
            **XL_UNET,
            "block_out_channels": (32, 64, 128),
            "layers_per_block": 1,
            "transformer_layers_per_block": (1, 1, 2),
            "attention_head_dim": (1, 1, 2),
            "cross_attention_dim": 64 + 128,
            "projection_class_embeddings_input_dim": 128 + 6 * 256,
        },
        texts=((64, 2), (128, 3)),
        vae=(32, 32, 32, 32),
    ),
}


def write_checkpoint(path: Path, architecture: Architecture) -> None:
    """Write a whole checkpoint of seeded random float16 values, holding no more than one tensor at a time."""
    header, offset, tensors = {}, 0, checkpoint_shapes(architecture)
    for name, tensor in tensors.items():
        end = offset + 2 * tensor.numel()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors wants its data aligned
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    seeded = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, tensor in tensors.items():
                file.write(random_values(name, tensor, seeded).cpu().numpy().tobytes())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def checkpoint_shapes(architecture: Architecture) -> dict[str, Tensor]:
    """List a checkpoint's tensors on the meta device by their original names."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    levels = len(architecture.vae)
    with torch.device("meta"):
        unet = UNet2DConditionModel(**architecture.unet)
        vae = AutoencoderKL(
            block_out_channels=architecture.vae,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=2,
            latent_channels=4,
        )
    names = unet_ldm_names(unet.state_dict(), unet.config.layers_per_block)
    tensors = {f"{UNET}{names[k]}": tensor for k, tensor in unet.state_dict().items()}
    for part, (width, layers) in zip(FAMILIES[architecture.family].texts, architecture.texts, strict=True):
        found = _text_shapes(width, layers, open_clip=part.open_clip)
        tensors |= {f"{part.prefix}{k}": tensor for k, tensor in found.items()}
    names = vae_ldm_names(vae.state_dict(), levels)
    for k, tensor in vae.state_dict().items():
        wide = "attentions" in k and tensor.ndim == 2  # 1x1 convolutions in the original
        tensors[f"{VAE}{names[k]}"] = tensor[..., None, None] if wide else tensor
    return tensors | {name: torch.empty(0, device="meta") for name in architecture.markers}


def _text_shapes(width: int, layers: int, *, open_clip: bool) -> dict[str, Tensor]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        projection_dim=width,
    )
    with torch.device("meta"):
        model = (CLIPTextModelWithProjection if open_clip else CLIPTextModel)(config)
        if open_clip:
            return open_clip_tensors(model) | {"logit_scale": torch.empty(())}
    return {f"text_model.{k.removeprefix('text_model.')}": tensor for k, tensor in model.state_dict().items()}


def open_clip_tensors(model: Any) -> dict[str, Tensor]:
    """Convert a transformers text encoder's tensors to OpenCLIP's names and layout."""
    state = {k.removeprefix("text_model."): v for k, v in model.state_dict().items()}
    found = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
    }
    parts = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    parts["self_attn.out_proj"] = "attn.out_proj"
    for i in range(model.config.num_hidden_layers):
        mine, theirs = f"encoder.layers.{i}.", f"transformer.resblocks.{i}."
        for kind in ("weight", "bias"):
            found |= {f"{theirs}{name}.{kind}": state[f"{mine}{part}.{kind}"] for part, name in parts.items()}
            rows = [state[f"{mine}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            found[f"{theirs}attn.in_proj_{kind}"] = torch.cat(rows)
    if "text_projection.weight" in state:
        found["text_projection"] = state["text_projection.weight"].t()
    return found


def random_values(name: str, tensor: Tensor, seeded: torch.Generator) -> Tensor:
    """Draw values that keep activations finite: N(0, 1/fan in), norm weights 1, biases 0."""
    if tensor.ndim < 2:
        return torch.full(tensor.shape, float(name.endswith("weight")), dtype=torch.float16)
    std = 0.02 if "token_embedding" in name or "position" in name else 1 / math.sqrt(tensor[0].numel())
    return (torch.randn(tensor.shape, generator=seeded, device=seeded.device) * std).half()
