"""Read and build CLIP text encoders from a checkpoint or from separate files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import setting
from ..files.kept import KeptFiles
from ..files.safetensors_file import FileHeader, Shapes, highest_number, opened, read_header
from ..files.tensors import Complete, fill, of_possible_shapes
from .family import TEXT_FILES, Family, TextPart
from .names import from_open_clip
from .text import ClipEncoder

HEAD = 64  # channels of an attention head in CLIP
ROWS = 77  # tokens in a sequence, of CLIP and in ComfyUI
EMBEDDING, POSITIONS = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"
EMBEDDING_NAMES = (f"text_model.{EMBEDDING}", EMBEDDING, "token_embedding.weight")  # two of CLIP, one of OpenCLIP
POSITION_NAMES = (f"text_model.{POSITIONS}", POSITIONS, "positional_embedding")
TEXT_MODULES = (
    "embeddings.token_",
    "embeddings.position_embedding.",
    "encoder.layers.",
    "final_layer_norm.",
    "text_projection",
)
# (part of a tensor's name, kind of file)
OTHER_FILES = (
    ("encoder.block.0.", "a T5 text encoder"),
    ("layers.0.self_attn.sinks", "a language model"),
    ("model.layers.0.", "a language model"),
    ("decoder.conv_in.", "an autoencoder (VAE)"),
    ("diffusion_model.", "a checkpoint or a UNet"),
    ("input_blocks.", "a UNet"),
    ("lora_", "a LoRA"),
    ("vision_model.", "CLIP's encoder of pictures"),
)


def transformers_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a text encoder's tensors from CLIP's or OpenCLIP's names to transformers', without `text_model.`.

    Tensors of other models are dropped.
    """
    if any(name.startswith("transformer.resblocks.") for name in tensors):
        return from_open_clip(tensors)
    found = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    if "text_projection" in found:  # ComfyUI saves it as (in, out)
        found["text_projection.weight"] = found.pop("text_projection").t()
    return {name: tensor for name, tensor in found.items() if name.startswith(TEXT_MODULES)}


def embedding_shape(shapes: Shapes, prefix: str = "") -> tuple[int, ...] | None:
    """Find the shape of a text encoder's token embedding; None if there is none."""
    return next((shapes[prefix + name] for name in EMBEDDING_NAMES if prefix + name in shapes), None)


def check_text(header: FileHeader, family: Family, index: int, needed: int) -> None:
    """Raise ValueError for a file that is not text encoder number `index` of a family, of width `needed`."""
    name, shapes = header.path.name, header.shapes
    embedding = embedding_shape(shapes)
    if embedding is None or len(embedding) != 2:
        kind = next((kind for part, kind in OTHER_FILES if any(part in key for key in shapes)), "something else")
        raise ValueError(
            f"{name} is not a CLIP text encoder but {kind} (first tensor: {next(iter(shapes))}); choose one "
            f"for {family.title}."
        )
    if embedding[1] != needed:
        ordinal = ("first ", "second ")[index] if len(family.texts) > 1 else ""
        raise ValueError(
            f"{name} is a text encoder {embedding[1]} wide; the {ordinal}one of this {family.title} model is {needed} "
            f"wide. Set {setting(f'base_model.{TEXT_FILES[index]}')} to one of this width."
        )
    rows = next((shapes[key][0] for key in POSITION_NAMES if shapes.get(key)), 0)
    if rows != ROWS:
        raise ValueError(f"{name} takes {rows} tokens in a row, ComfyUI uses {ROWS}; choose an ordinary CLIP encoder.")
    if family.texts[index].pooled and not any(key.startswith("text_projection") for key in shapes):
        raise ValueError(f"{name} lacks its text_projection, which {family.title} needs; get a complete file.")


def read_text(path: Path, kept: KeptFiles | None = None) -> dict[str, Tensor]:
    """Read a text encoder's file under transformers' names without `text_model.`; kept: files in memory."""
    header = read_header(path)
    ours = [name for name in header.shapes if not name.startswith(("vision_model.", "visual."))]
    with opened(header, kept and kept.take(header)) as file:
        return transformers_names({name: file.get_tensor(name) for name in ours})


def build_text(tensors: dict[str, Tensor], part: TextPart, source: str) -> ClipEncoder:
    """Build a text encoder from its tensors under the names of CLIP or OpenCLIP."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    what = f"the text encoder of {source}"
    tensors = Complete(transformers_names(tensors), what)
    vocabulary, width = tensors[EMBEDDING].shape
    layers = 1 + highest_number(tensors, r"encoder\.layers\.(\d{1,2})\.")
    projected: dict[str, Any] = {"projection_dim": tensors["text_projection.weight"].shape[0]} if part.pooled else {}
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=tensors["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // HEAD),
        max_position_embeddings=tensors[POSITIONS].shape[0],
        hidden_act="gelu" if part.open_clip else "quick_gelu",
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=0 if part.open_clip else vocabulary - 1,
        **projected,
    )
    with torch.device("meta"), of_possible_shapes(what, ValueError):
        encoder = (CLIPTextModelWithProjection if part.pooled else CLIPTextModel)(config)
    encoder = fill(encoder, {k: k.removeprefix("text_model.") for k in encoder.state_dict()}, tensors, what)
    for module in encoder.modules():
        if "position_ids" in module._buffers:  # not stored in files
            module._buffers["position_ids"] = torch.arange(config.max_position_embeddings)[None]
    short = part.comfy == "clip_h" and layers == 23  # such files lack the unused last layer
    return ClipEncoder(
        model=encoder,
        layer=part.layer,
        final_norm=part.final_norm,
        pooled=part.pooled,
        open_clip=part.open_clip,
        prefix=part.kohya,
        absent=int(short),
    )
