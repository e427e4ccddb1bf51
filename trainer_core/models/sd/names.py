"""Layer names of the original (LDM) checkpoint layout and of diffusers, for UNet and VAE.

The numbering rules are those of the original Stable Diffusion code; n is the number of resnets per level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from ..base import NameForm

KOHYA = NameForm("lora_unet_", flat=True)  # also of transformers
# Starts of the denoiser's own paths in files: of kohya and musubi, ai-toolkit, Wan Fun, diffusers, OneTrainer, LyCORIS.
PREFIXES = (
    *("lora_unet_", "diffusion_model_", "model_diffusion_model_", "lora_unet__"),
    *("transformer_", "lora_transformer_", "lycoris_", "unet_", ""),
)
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_ldm_names(names: Iterable[str], layers_per_block: int) -> dict[str, str]:
    """Map diffusers tensor names of a UNet to LDM names, without the `model.diffusion_model.` prefix."""
    names = list(names)
    n = layers_per_block + 1
    attended = {m[1] for name in names if (m := re.match(r"up_blocks\.(\d+)\.attentions", name))}

    def renamed(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in UNET_OUTSIDE:
            return f"{UNET_OUTSIDE[stem]}.{kind}"
        if m := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", name):
            side, i, part, j, rest = m[1], int(m[2]), m[3], int(m[4]), m[5]
            block = f"input_blocks.{1 + n * i + j}" if side == "down" else f"output_blocks.{n * i + j}"
            return f"{block}.0.{_resnet(rest)}" if part == "resnets" else f"{block}.1.{rest}"
        if m := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.+)", name):
            return f"input_blocks.{n * (int(m[1]) + 1)}.0.op.{m[2]}"
        if m := re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.+)", name):
            return f"output_blocks.{n * int(m[1]) + n - 1}.{2 if m[1] in attended else 1}.conv.{m[2]}"
        if m := re.match(r"mid_block\.resnets\.(\d)\.(.+)", name):
            return f"middle_block.{2 * int(m[1])}.{_resnet(m[2])}"
        if m := re.match(r"mid_block\.attentions\.0\.(.+)", name):
            return f"middle_block.1.{m[1]}"
        raise KeyError(f"no LDM name for the UNet tensor {name}")

    return {name: renamed(name) for name in names}


def _resnet(rest: str) -> str:
    stem, _, kind = rest.rpartition(".")
    return f"{RESNET[stem]}.{kind}"


def vae_ldm_names(names: Iterable[str], levels: int) -> dict[str, str]:
    """Map diffusers tensor names of an AutoencoderKL to LDM names, without the `first_stage_model.` prefix."""

    def renamed(name: str) -> str:
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        if m := re.match(r"(encoder|decoder)\.mid_block\.attentions\.0\.(.+)\.(weight|bias)", name):
            return f"{m[1]}.mid.attn_1.{VAE_ATTENTION.get(m[2], m[2])}.{m[3]}"
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
        name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample", name)
        return re.sub(r"up_blocks\.(\d)\.resnets", lambda m: f"up.{levels - 1 - int(m[1])}.block", name)

    return {name: renamed(name) for name in names}


def tiny_vae_names(names: Iterable[str]) -> dict[str, str]:
    """Map diffusers AutoencoderTiny names to those of a TAESD file (its decoder starts with a clamp, index 0)."""

    def renamed(name: str) -> str:
        side, _, index, rest = name.split(".", 3)
        return f"taesd_{side}.{int(index) + (side == 'decoder')}.{rest}"

    return {name: renamed(name) for name in names}


OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def from_open_clip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename OpenCLIP's text tensors to transformers' names (without `text_model.`), and split queries, keys, values.

    OpenCLIP stores the projection as (in, out).
    """
    found = {name: tensors[source] for name, source in OPEN_CLIP.items() if source in tensors}
    blocks = sorted({int(m[1]) for k in tensors if (m := re.match(r"transformer\.resblocks\.(\d{1,2})\.", k))})
    for i in blocks:
        source, name = f"transformer.resblocks.{i}.", f"encoder.layers.{i}."
        for kind in ("weight", "bias"):
            for ours, theirs in OPEN_CLIP_LAYER.items():
                if f"{source}{theirs}.{kind}" in tensors:
                    found[f"{name}{ours}.{kind}"] = tensors[f"{source}{theirs}.{kind}"]
            if (in_proj := tensors.get(f"{source}attn.in_proj_{kind}")) is not None:
                for part, piece in zip("qkv", in_proj.chunk(3), strict=True):
                    found[f"{name}self_attn.{part}_proj.{kind}"] = piece
    if "text_projection" in tensors:
        found["text_projection.weight"] = tensors["text_projection"].t()
    return found


def file_forms(*, original: bool) -> dict[str, NameForm]:
    """Give how programs name a UNet's layers in LoRA files; original: sd-scripts uses the original code's names."""
    kohya = NameForm("lora_unet_", diffusers=not original, flat=True)
    return {
        "kohya": kohya,
        "comfyui": NameForm("diffusion_model."),
        "diffusers": NameForm("unet.", diffusers=True),
        "ai-toolkit": kohya,
        "onetrainer": NameForm("lora_unet_", diffusers=True, flat=True),
    }
