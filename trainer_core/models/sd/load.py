"""Load Stable Diffusion models from one checkpoint or a diffusers folder; the tensors give the architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common import json_files
from ...common.disk_errors import reason
from ...common.files import short_hash
from ...config import BaseModelConfig
from ..base import Prediction
from ..files.kept import KeptFiles
from ..files.safetensors_file import opened, read_header, read_part, shapes_under
from ..files.tensors import check_finite, hash_folder, hash_tensors
from .autoencoder import build_vae, read_vae
from .encoder import build_text, check_text, read_text, to_text_encoder
from .family import (
    FAMILIES,
    INPAINTING_CHANNELS,
    LATENT_CHANNELS,
    OTHER_VAE,
    SUPPORTED,
    TEXT_FILES,
    VAE,
    VAE_FILE,
    Family,
    check_channels,
    check_own_vae,
    check_vae,
    declared_prediction,
    detect_family,
    detect_zero_terminal_snr,
    text_widths,
    unet_prefix,
)
from .model import StableDiffusion
from .text import find_tokenizer, load_tokenizer
from .unet import build_unet, unet_shape


def load_base_model(
    config: BaseModelConfig,
    dtype: torch.dtype = torch.float32,
    amend: Callable[[StableDiffusion], None] | None = None,
    kept: KeptFiles | None = None,
) -> StableDiffusion:
    """Load a base model to the CPU, frozen, offline. Raises ValueError, with file and reason.

    amend: called to change the weights before the cast to dtype. kept: files in memory.
    """
    path, given = Path(config.path), given_files(config)
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, path))
    kept = kept or KeptFiles()
    base = (_load_folder if path.is_dir() else _load_file)(path, tokenizer, given, kept)
    base.dtype = dtype
    if amend is not None:
        amend(base)
    for part, part_dtype in (
        (base.unet, dtype),
        *((text.model, dtype) for text in base.texts),
        (base.vae, torch.float32),  # its latents are cached
    ):
        nn.Module.to(part.requires_grad_(False).train(False), part_dtype)
    layers = min(text.model.config.num_hidden_layers + text.absent for text in base.texts)
    if config.clip_skip > layers:
        raise ValueError(f"clip_skip is {config.clip_skip}, but a text encoder of {path.name} has {layers} layers.")
    for text in base.texts:
        text.layer = max(text.layer, config.clip_skip)
    base.clip_skip = config.clip_skip
    base.inpainting = base.unet.config.in_channels == INPAINTING_CHANNELS
    base.prediction, base.zero_terminal_snr = detect_noise(config)
    return base


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
            "zero_terminal_snr is on, but the model predicts epsilon; turn it off, or set prediction of Load Base "
            "Model to v_prediction."
        )
    return prediction, zero


def declared_noise(config: BaseModelConfig) -> tuple[tuple[Prediction, str] | None, bool]:
    """Read from file or folder: ((prediction, where it was found) or None, zero terminal SNR)."""
    path = Path(config.path)
    if path.is_dir():
        scheduler = read_json(path / "scheduler" / "scheduler_config.json")
        prediction = scheduler.get("prediction_type")
        known = prediction in ("epsilon", "v_prediction")
        declared = (prediction, "its scheduler's configuration") if known else None
        return declared, bool(scheduler.get("rescale_betas_zero_snr", False))
    header = read_header(path)
    return declared_prediction(header, detect_family(header, (VAE_FILE, *TEXT_FILES))), detect_zero_terminal_snr(header)


def check_base_model(config: BaseModelConfig) -> None:
    """Raise ValueError for a model that cannot be trained, from its headers alone."""
    path, given = Path(config.path), given_files(config)
    if path.is_dir():
        family = check_folder(path, given)
        unet = read_json(path / "unet" / "config.json")
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


def _load_file(path: Path, tokenizer: Any, given: dict[str, Path], kept: KeptFiles) -> StableDiffusion:
    """Load UNet, text encoders and VAE, with their hashes, from a checkpoint; given files replace its parts."""
    header = read_header(path)
    family = detect_family(header, given)
    with opened(header, kept.take(header)) as file:
        unet = read_part(file, header.shapes, unet_prefix(header.shapes) or "")
        vae = {} if VAE_FILE in given else read_part(file, header.shapes, VAE)
        texts = [
            read_text(given[name], kept) if name in given else read_part(file, header.shapes, part.prefix)
            for name, part in zip(TEXT_FILES, family.texts, strict=False)
        ]
    vae = read_vae(given[VAE_FILE], family, kept) if VAE_FILE in given else vae
    names = [given.get(name, path).name for name in TEXT_FILES]
    return StableDiffusion(
        family=family,
        name=path.name,
        unet=build_unet(unet, family, path.name),
        texts=tuple(
            build_text(tensors, part, name) for tensors, part, name in zip(texts, family.texts, names, strict=False)
        ),
        vae=build_vae(vae, given.get(VAE_FILE, path).name),
        tokenizer=tokenizer,
        identity={"text_encoder": "/".join(map(hash_tensors, texts)), "vae": hash_tensors(vae)},
        short_hash=short_hash(path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration of a diffusers folder; raises ValueError for anything but a JSON object."""
    try:
        values = json_files.read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} of a diffusers folder cannot be read ({reason(error)}); get the folder again."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} of a diffusers folder holds no JSON object; get the folder again.")
    return values


def check_folder(path: Path, given: Collection[str]) -> Family:
    """Detect the family of a diffusers folder; raises ValueError for any other folder and for broken files in it."""
    if (path / "transformer").is_dir() or (path / "prior").is_dir():
        kind = (
            read_json(path / "model_index.json").get("_class_name") if (path / "model_index.json").is_file() else None
        )
        raise ValueError(f"{path.name} is a model for diffusers' {kind or 'transformers'}; choose one of {SUPPORTED}.")
    needed = [part for part in ("unet", "text_encoder", "vae", "scheduler") if part not in given]
    for part in needed:
        if not any((path / part).glob("*.json")):
            raise ValueError(
                f"{path} is an incomplete diffusers folder: {part}/ with its config .json is missing; get it again, or "
                "choose a checkpoint in one file."
            )
    unet = read_json(path / "unet" / "config.json")
    if unet.get("encoder_hid_dim_type") == "text_proj":
        raise ValueError(f"{path.name} is a Kolors model; choose one of {SUPPORTED}, the kinds trained here.")
    if (path / "text_encoder_2").is_dir() or unet.get("addition_embed_type") == "text_time":
        name = "sdxl"
    else:
        name = "sd2" if unet.get("cross_attention_dim") == 1024 else "sd1"
    family = FAMILIES[name]
    if not isinstance(unet.get("cross_attention_dim"), int):
        raise ValueError(f"unet/config.json of {path.name} has no cross_attention_dim; get the folder again.")
    if VAE_FILE not in given and read_json(path / "vae" / "config.json").get("latent_channels", 4) != LATENT_CHANNELS:
        raise ValueError(f"The VAE of {path.name} has other than {LATENT_CHANNELS} latent channels. {OTHER_VAE}")
    check_channels(path.name, unet.get("in_channels", LATENT_CHANNELS), family)
    for part in ("unet", *TEXT_FILES[: len(family.texts)], "vae"):
        if part not in given:
            files = sorted((path / part).glob("*.safetensors"))
            if not files:
                raise ValueError(
                    f"{path.name} has no .safetensors file in {part}/, and pickles (.bin) are not read; get the folder "
                    "again with such a file, or choose a checkpoint in one file."
                )
            for file in files:
                read_header(file)
    return family


def _pretrained(kind: Any, folder: Path) -> Any:
    """Load a part of a diffusers folder, also one with float16 weights only.

    Raises ValueError if the weights do not fit its configuration: the libraries would fill gaps with random weights.
    """
    half = all(".fp16" in file.name for file in folder.glob("*.safetensors"))
    options: dict[str, Any] = {"variant": "fp16"} if half else {}
    what = f"{folder.name}/ of {folder.parent.name}"
    try:
        model, info = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    except (ValueError, RuntimeError) as error:  # wrong shapes
        raise ValueError(f"The weights in {what} do not fit its config.json; get the folder again.") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{what} lacks {len(missing)} tensors, for example {missing[0]}; get the folder again.")
    return model


def _load_folder(path: Path, tokenizer: Any, given: dict[str, Path], kept: KeptFiles) -> StableDiffusion:
    """Load a diffusers folder, safetensors only, never from a hub; given files replace its parts."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    family = check_folder(path, given)
    texts, hashes = [], []
    try:
        unet = _pretrained(UNet2DConditionModel, path / "unet")
        for name, part in zip(TEXT_FILES, family.texts, strict=False):
            if name in given:
                tensors = read_text(given[name], kept)
                texts.append(build_text(tensors, part, given[name].name))
                hashes.append(hash_tensors(tensors))
            else:
                kind = CLIPTextModelWithProjection if part.pooled else CLIPTextModel
                texts.append(to_text_encoder(_pretrained(kind, path / name), part))
                hashes.append(hash_folder(path / name))
        if VAE_FILE in given:
            tensors = read_vae(given[VAE_FILE], family, kept)
            vae, vae_hash = build_vae(tensors, given[VAE_FILE].name), hash_tensors(tensors)
        else:
            tiny = read_json(path / "vae" / "config.json").get("_class_name") == "AutoencoderTiny"
            vae = _pretrained(AutoencoderTiny if tiny else AutoencoderKL, path / "vae")
            vae_hash = hash_folder(path / "vae")
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read as a diffusers folder: {error}") from error
    for module in (unet, *(text.model for text in texts), vae):
        check_finite(module.state_dict(), f"a model of {path.name}")
    return StableDiffusion(
        family=family,
        name=path.name,
        unet=unet,
        texts=tuple(texts),
        vae=vae,
        tokenizer=tokenizer,
        identity={"text_encoder": "/".join(hashes), "vae": vae_hash},
    )
