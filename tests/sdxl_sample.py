"""A few layers of SDXL, with a random LoRA and random weights: the same numbers on every machine."""

import math

import torch

# Name in kohya's files -> end of its name in the checkpoint, its weight's shape, number of its noise.
LAYERS = {
    "lora_unet_input_blocks_1_0_in_layers_2": ("input_blocks.1.0.in_layers.2", (320, 320, 3, 3), 0),
    "lora_unet_input_blocks_4_0_skip_connection": ("input_blocks.4.0.skip_connection", (640, 320, 1, 1), 1),
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q": (
        "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
        (640, 640),
        2,
    ),
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": (
        "input_blocks.4.1.transformer_blocks.0.attn2.to_k",
        (640, 2048),
        3,
    ),
    "lora_unet_middle_block_1_proj_in": ("middle_block.1.proj_in", (1280, 1280), 5),
    "lora_te1_text_model_encoder_layers_0_mlp_fc1": ("encoder.layers.0.mlp.fc1", (3072, 768), 6),
}
RANK, ALPHA = 16, 8.0


def lora() -> dict[str, torch.Tensor]:
    """Build the LoRA: each direction half as strong as the one before; layers of other strengths."""
    tensors = {}
    for name, (_, (outer, inner, *kernel), number) in LAYERS.items():
        decay = 0.5 ** torch.arange(RANK)
        down = noise(3 * number, RANK, inner, *kernel) / math.sqrt(inner * math.prod(kernel))
        up = noise(3 * number + 1, outer, RANK, *(1 for _ in kernel)) * 0.02 * (1 + number)
        tensors[f"{name}.lora_down.weight"] = down * decay.view(-1, *(1 for _ in down.shape[1:]))
        tensors[f"{name}.lora_up.weight"] = up
        tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
    return tensors


def weights() -> dict[str, torch.Tensor]:
    """Build the checkpoint's weights by the names of their layers in kohya's files."""
    return {name: noise(3 * number + 2, *shape) * 0.03 for name, (_, shape, number) in LAYERS.items()}


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Draw values between -1 and 1 from a generator of 31 bits, which no library's version changes."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    mixed = (index * 2654435761 + seed * 40503 + 12345) % 2**32
    for shift, factor in ((16, 2246822519), (13, 3266489917)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**32
    mixed ^= mixed >> 16
    return (mixed.double() / 2**31 - 1).float().reshape(shape)
