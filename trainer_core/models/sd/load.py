"""Load Stable Diffusion models from one checkpoint or a diffusers folder; the tensors give the architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.files import short_hash
from ...common.side_by_side import begin
from ...config import BaseModelConfig, setting
from ..base import Prediction
from ..files.kept import KeptFiles
from ..files.safetensors_file import opened, read_header, read_part, shapes_under, stored_part
from ..files.tensors import hash_folder, hash_tensors, of_possible_shapes
from .autoencoder import build_vae, read_vae
from .encoder import build_text, check_text, read_text
from .family import (
    INPAINTING_CHANNELS,
    TEXT_FILES,
    VAE,
    VAE_FILE,
    check_own_vae,
    check_vae,
    declared_prediction,
    detect_family,
    detect_zero_terminal_snr,
    text_widths,
    unet_prefix,
)
from .folder import check_folder, folder_autoencoder, folder_tensors, load_folder, outline_folder, read_config
from .model import StableDiffusion
from .text import find_tokenizer, load_tokenizer
from .unet import fill_unet, outline_unet, unet_shape


def load_base_model(
    config: BaseModelConfig,
    dtype: torch.dtype = torch.float32,
    amend: Callable[[StableDiffusion], None] | None = None,
    kept: KeptFiles | None = None,
    *,
    in_file: bool = False,
) -> StableDiffusion:
    """Load a base model to the CPU, frozen, offline. Raises ValueError, with file and reason.

    Without `amend` the UNet is read in a thread of its own, beside what the caller does with the other parts: whoever
    uses it waits. amend: called to change the weights before the cast to dtype. kept: files in memory. in_file: the
    weights of the UNet's linear layers and convolutions stay in their files.
    """
    path, given = Path(config.path), given_files(config)
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, path))
    kept = kept or KeptFiles()
    base, read_unet = (_load_folder if path.is_dir() else _load_file)(path, tokenizer, given, kept, in_file)
    base.dtype, base.paints = dtype, base.unet.config.in_channels == INPAINTING_CHANNELS
    if amend is None:
        base.unet = begin(lambda: _frozen(read_unet(), dtype))
    else:
        base.unet = read_unet()
        amend(base)
        base.unet = _frozen(base.unet, dtype)
    for text in base.texts:
        _frozen(text.model, dtype)
    _frozen(base.vae, torch.float32)  # its latents are cached
    layers = min(text.model.config.num_hidden_layers + text.absent for text in base.texts)
    if config.clip_skip > layers:
        raise ValueError(f"clip_skip is {config.clip_skip}, but a text encoder of {path.name} has {layers} layers.")
    for text in base.texts:
        text.layer = max(text.layer, config.clip_skip)
    base.clip_skip, base.prompt_weights = config.clip_skip, config.prompt_weights
    base.prediction, base.zero_terminal_snr = detect_noise(config)
    return base


def _frozen(module: Any, dtype: torch.dtype) -> Any:
    return nn.Module.to(module.requires_grad_(False).train(False), dtype)


def given_files(config: BaseModelConfig) -> dict[str, Path]:
    """Map parts of the model, by their names in the configuration, to the files that replace them."""
    return {name: Path(file) for name in (VAE_FILE, *TEXT_FILES) if (file := getattr(config, name))}


def detect_noise(config: BaseModelConfig) -> tuple[Prediction, bool]:
    """Find (prediction, zero terminal SNR): from the configuration, else from the model's file or folder.

    Raises ValueError for zero terminal SNR with epsilon prediction: at pure noise, epsilon is the input itself.
    """
    declared, zero = declared_noise(config)
    prediction = declared[0] if declared else "epsilon"
    if config.prediction != "auto":
        prediction = config.prediction
    if config.zero_terminal_snr == "auto":
        return prediction, zero and prediction == "v_prediction"
    zero = config.zero_terminal_snr == "on"
    if zero and prediction != "v_prediction":
        raise ValueError(
            "zero_terminal_snr is on, but the model predicts epsilon; turn it off, or set "
            f"{setting('base_model.prediction')} to v_prediction."
        )
    return prediction, zero


def declared_noise(config: BaseModelConfig) -> tuple[tuple[Prediction, str] | None, bool]:
    """Read from file or folder: ((prediction, where it was found) or None, zero terminal SNR)."""
    path = Path(config.path)
    if path.is_dir():
        scheduler = read_config(path / "scheduler" / "scheduler_config.json")
        prediction = scheduler.get("prediction_type")
        known = prediction in ("epsilon", "v_prediction")
        declared = (prediction, "its scheduler's configuration") if known else None
        return declared, bool(scheduler.get("rescale_betas_zero_snr", False))
    header = read_header(path)
    return declared_prediction(header, detect_family(header, (VAE_FILE, *TEXT_FILES))), detect_zero_terminal_snr(header)


def check_base_model(config: BaseModelConfig) -> None:
    """Raise ValueError for a model that cannot be trained, from its headers alone."""
    with of_possible_shapes(Path(config.path).name):
        _check_base_model(config)


def _check_base_model(config: BaseModelConfig) -> None:
    path, given = Path(config.path), given_files(config)
    if path.is_dir():
        family = check_folder(path, given)
        unet = read_config(path / "unet" / "config.json")
        context = unet["cross_attention_dim"]
        conditioning_channels = unet.get("projection_class_embeddings_input_dim") or 0
    else:
        header = read_header(path)
        family = detect_family(header, given)
        shape = unet_shape(shapes_under(header.shapes, unet_prefix(header.shapes) or ""), family, path.name)
        context = shape["cross_attention_dim"]
        conditioning_channels = shape.get("projection_class_embeddings_input_dim", 0)
        if VAE_FILE not in given:
            check_own_vae(header, family)
    if VAE_FILE in given:
        check_vae(read_header(given[VAE_FILE]), family)
    if TEXT_FILES[1] in given and len(family.texts) == 1:
        raise ValueError(
            f"text_encoder_2 is set, but {family.title} has one text encoder; set text_encoder_2 to baked."
        )
    widths = text_widths(family, context, conditioning_channels)
    for index, (name, width) in enumerate(zip(TEXT_FILES, widths, strict=False)):
        if name in given:
            check_text(read_header(given[name]), family, index, width)
    detect_noise(config)
    find_tokenizer(config.tokenizer, path)


def _load_file(
    path: Path, tokenizer: Any, given: dict[str, Path], kept: KeptFiles, in_file: bool
) -> tuple[StableDiffusion, Callable[[], Any]]:
    """Load text encoders and VAE, with their hashes, from a checkpoint; given files replace its parts.

    Return the model with an outline of its UNet, and what reads that UNet.
    """
    header = read_header(path)
    family, prefix = detect_family(header, given), unet_prefix(header.shapes) or ""
    in_memory = kept.take(header)
    unet = outline_unet(shapes_under(header.shapes, prefix), family, path.name)
    with opened(header, in_memory) as file:
        vae = {} if VAE_FILE in given else read_part(file, header.shapes, VAE)
        texts = [
            read_text(given[name], kept) if name in given else read_part(file, header.shapes, part.prefix)
            for name, part in zip(TEXT_FILES, family.texts, strict=False)
        ]
    vae = read_vae(given[VAE_FILE], family, kept) if VAE_FILE in given else vae
    names = [given.get(name, path).name for name in TEXT_FILES]

    def read_unet() -> Any:
        with opened(header, in_memory) as file:
            tensors = stored_part(header, prefix) if in_file else read_part(file, header.shapes, prefix)
        return fill_unet(unet, tensors, path.name, in_file=in_file)

    base = StableDiffusion(
        family=family,
        name=path.name,
        unet=unet,
        texts=tuple(
            build_text(tensors, part, name) for tensors, part, name in zip(texts, family.texts, names, strict=False)
        ),
        vae=build_vae(vae, given.get(VAE_FILE, path).name),
        tokenizer=tokenizer,
        identity={"text_encoder": "/".join(map(hash_tensors, texts)), "vae": hash_tensors(vae)},
        short_hash=short_hash(path),
    )
    return base, read_unet


def _load_folder(
    path: Path, tokenizer: Any, given: dict[str, Path], kept: KeptFiles, in_file: bool
) -> tuple[StableDiffusion, Callable[[], Any]]:
    """Do as `_load_file` with a diffusers folder, safetensors only, never from a hub."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    family = check_folder(path, given)
    texts, hashes = [], []
    for name, part in zip(TEXT_FILES, family.texts, strict=False):
        tensors = read_text(given[name], kept) if name in given else folder_tensors(path / name)
        texts.append(build_text(tensors, part, given[name].name if name in given else path.name))
        hashes.append(hash_tensors(tensors) if name in given else hash_folder(path / name))
    if VAE_FILE in given:
        tensors = read_vae(given[VAE_FILE], family, kept)
        vae, vae_hash = build_vae(tensors, given[VAE_FILE].name), hash_tensors(tensors)
    else:
        vae = load_folder(folder_autoencoder(path), path / "vae")
        vae_hash = hash_folder(path / "vae")
    base = StableDiffusion(
        family=family,
        name=path.name,
        unet=outline_folder(UNet2DConditionModel, path / "unet"),
        texts=tuple(texts),
        vae=vae,
        tokenizer=tokenizer,
        identity={"text_encoder": "/".join(hashes), "vae": vae_hash},
    )
    return base, lambda: load_folder(UNet2DConditionModel, path / "unet", in_file=in_file)
