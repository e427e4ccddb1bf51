"""Models, pictures and LoRA files for the recipes: the same bytes on every machine, with every version of a library.

Nothing here comes from a library's own initialisation, nor from `randn`, whose last digits depend on the processor:
all values are uniform draws of whole numbers and products of them. Pictures are lossless, and are trained at their
own size, or at exactly half of it, so that no resampling of Pillow has a part in a loss.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_models import checkpoint_tensors, family_tensors, kl_autoencoder_tensors
from torch import Tensor

COLOURS = ("red", "green", "blue", "grey", "brown")
VAE = "first_stage_model."
UNET_IN = "model.diffusion_model.input_blocks.0.0.weight"
LATENTS = ("taesd_encoder.14.weight", "quant_conv.weight")  # what autoencoders give latents with
EMBEDDINGS = ("token_embedding", "position")  # in the names of text encoders' tables
# Layers of tiny SD1 models that the LoRA files hold: (name, outputs, inputs).
LAYERS = (
    ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", 32, 32),
    ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 32, 64),
    ("lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_ff_net_2", 32, 128),
)


def uniform(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    """Draw float32 numbers between -scale and scale that depend on the arguments alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**20), 2**20, shape, generator=draws).float() * 2.0**-20 * scale


# --- models ------------------------------------------------------------------------------------------------


def write_model(kind: str, path: Path) -> None:
    """Write a whole tiny checkpoint: "sd1", "inpainting", "sd2" or "sdxl", the last with a KL autoencoder."""
    tensors = family_tensors(kind) if kind in ("sd2", "sdxl") else checkpoint_tensors()
    if kind == "inpainting":
        tensors[UNET_IN] = tensors[UNET_IN].new_zeros(32, 9, 3, 3)
    if kind == "sdxl":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(VAE)}
        tensors |= {VAE + name: tensor for name, tensor in kl_autoencoder_tensors().items()}
    save_file({name: redrawn(name, tensor) for name, tensor in tensors.items()}, path)


def redrawn(name: str, tensor: Tensor) -> Tensor:
    """Draw a tensor anew: norms near 1, biases near 0, others so that activations keep about their size."""
    if not tensor.is_floating_point():
        return tensor.contiguous()
    shape = tuple(tensor.shape)
    if tensor.ndim < 2:
        return uniform(name, shape, 0.1) + float(name.endswith("weight"))
    if any(part in name for part in EMBEDDINGS):
        return uniform(name, shape, 0.5)
    larger = 4.0 if name.removeprefix(VAE) in LATENTS else 1.0  # so that latents are no smaller than noise by much
    return uniform(name, shape, larger * (3 / tensor[0].numel()) ** 0.5)


# --- pictures ----------------------------------------------------------------------------------------------


def write_pictures(folder: Path) -> None:
    """Write folders of captioned pictures: squares (with masks), tall ones, large ones, held-out squares.

    less: another picture for each square, at the other end of a slider.
    """
    for name, size, count in (
        ("squares", (64, 64), 4),
        ("tall", (64, 96), 3),
        ("large", (128, 128), 2),
        ("held", (64, 64), 2),
        ("less", (64, 64), 4),
    ):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            at = folder / name / f"{i}"
            picture(f"{name} {i}", size).save(at.with_suffix(".png"))
            caption = f"thing, number {i}, {COLOURS[i]}, of {name}"
            at.with_suffix(".txt").write_text(caption, encoding="utf-8")
            if name == "squares" and i:
                mask(f"{name} {i}", size).save(folder / name / f"{i}-masklabel.png")


def picture(name: str, size: tuple[int, int]) -> Image.Image:
    """Draw blocks of 8 pixels of one colour with grain on them; size (width, height)."""
    width, height = size
    blocks = uniform(f"blocks of {name}", (height // 8, width // 8, 3), 110).round() + 128
    grain = uniform(f"grain of {name}", (height, width, 3), 16).round()
    values = blocks.repeat_interleave(8, 0).repeat_interleave(8, 1) + grain
    return Image.fromarray(values.clamp(0, 255).to(torch.uint8).numpy())


def mask(name: str, size: tuple[int, int]) -> Image.Image:
    """Draw a mask of blocks of 16 pixels, black, grey or white."""
    width, height = size
    levels = (uniform(f"mask of {name}", (height // 16, width // 16), 1.5).round() + 1) * 127.5
    values = levels.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return Image.fromarray(values.clamp(0, 255).to(torch.uint8).numpy())


# --- LoRA files --------------------------------------------------------------------------------------------


def write_lora(name: str, path: Path) -> None:
    """Write a LoRA of rank 3 on a few layers of tiny SD1 models."""
    tensors = {}
    for layer, outputs, inputs in LAYERS:
        tensors[f"{layer}.lora_down.weight"] = uniform(f"{name} {layer} down", (3, inputs), 0.2)
        tensors[f"{layer}.lora_up.weight"] = uniform(f"{name} {layer} up", (outputs, 3), 0.2)
        tensors[f"{layer}.alpha"] = torch.tensor(1.5)
    save_file(tensors, path)
