"""The weights of a checkpoint of Stable Diffusion by the names of their layers in LoRA files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from ...config import BaseModelConfig
from ..files.safetensors_file import FileHeader, TensorFile, read_part
from .encoder import transformers_names
from .family import detect_family, unet_prefix
from .layers import PREFIX
from .outline import outline_base_model


def stable_diffusion_weights(header: FileHeader, file: TensorFile) -> dict[str, Callable[[], Tensor]]:
    """Map kohya's names of layers to readers of their weights; empty for files of other models."""
    prefix = unet_prefix(header.shapes)
    if prefix is None:
        return {}
    base = outline_base_model(BaseModelConfig(path=str(header.path)))
    parts = {part.kohya: part for part in detect_family(header).texts}

    @cache
    def text(start: str) -> dict[str, Tensor]:
        return transformers_names(read_part(file, header.shapes, start))

    def reader(part: str, path: str) -> Callable[[], Tensor]:
        if part == PREFIX:
            return lambda: file.get_tensor(path)
        return lambda: text(parts[part].prefix)[path]

    found = {}
    for layer in base.layers.listed():
        if layer.trainable and layer.module.weight.ndim > 1:
            own = prefix + layer.comfy.partition(".")[2] if layer.part == PREFIX else layer.path
            found[layer.name] = reader(layer.part, f"{own.removeprefix('text_model.')}.weight")
    return found
