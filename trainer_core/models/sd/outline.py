"""Build a base model without weights, on the meta device, from headers and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import BaseModelConfig
from ..files.safetensors_file import read_header, shapes_under
from ..files.tensors import empty_tensors, of_possible_shapes
from .autoencoder import build_vae, original_names, vae_prefix
from .encoder import build_text
from .family import INPAINTING_CHANNELS, TEXT_FILES, VAE, VAE_FILE, detect_family, unet_prefix
from .folder import check_folder, folder_autoencoder, folder_shapes, outline_folder
from .load import detect_noise, given_files
from .model import StableDiffusion
from .text import find_tokenizer, load_tokenizer
from .unet import outline_unet


def outline_base_model(config: BaseModelConfig, dtype: torch.dtype = torch.float32) -> StableDiffusion:
    """Build UNet and text encoders as `load_base_model` does, but without weights."""
    with of_possible_shapes(Path(config.path).name):
        return _outline(config, dtype)


def _outline(config: BaseModelConfig, dtype: torch.dtype) -> StableDiffusion:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    path, given = Path(config.path), given_files(config)
    header = None if path.is_dir() else read_header(path)
    family = check_folder(path, given) if header is None else detect_family(header, given)
    texts = []
    for name, part in zip(TEXT_FILES, family.texts, strict=False):
        if name in given:
            shapes = read_header(given[name]).shapes
        else:
            shapes = folder_shapes(path / name) if header is None else shapes_under(header.shapes, part.prefix)
        texts.append(build_text(empty_tensors(shapes), part, given.get(name, path).name))
    if header is None:
        unet: Any = outline_folder(UNet2DConditionModel, path / "unet")
    else:
        unet = outline_unet(shapes_under(header.shapes, unet_prefix(header.shapes) or ""), family, path.name)
    for model in (unet, *(text.model for text in texts)):
        nn.Module.to(model.requires_grad_(False).train(False), "meta", dtype)
    named = config.tokenizer or path.is_dir()  # otherwise only shapes are needed
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, path)) if named else None
    base = StableDiffusion(family=family, name=path.name, unet=unet, texts=tuple(texts), vae=None, tokenizer=tokenizer)
    base.identity = {"text_encoder": "", "vae": ""}
    base.dtype, base.paints = dtype, unet.config.in_channels == INPAINTING_CHANNELS
    base.clip_skip, base.prompt_weights = config.clip_skip, config.prompt_weights
    base.prediction, base.zero_terminal_snr = detect_noise(config)
    return base


def outline_autoencoder(config: BaseModelConfig) -> nn.Module:
    """Build the autoencoder as `load_base_model` does, but without weights, in float32."""
    path, given = Path(config.path), given_files(config)
    if VAE_FILE not in given and path.is_dir():
        return outline_folder(folder_autoencoder(path), path / "vae")
    header = read_header(given.get(VAE_FILE, path))
    shapes = shapes_under(header.shapes, vae_prefix(header.shapes) if VAE_FILE in given else VAE)
    with of_possible_shapes(header.path.name):
        return nn.Module.to(build_vae(original_names(empty_tensors(shapes)), header.path.name), "meta", torch.float32)
