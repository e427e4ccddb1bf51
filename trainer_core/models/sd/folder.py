"""Read diffusers folders: configurations within bounds, and weights by our own reader, from plain files alone.

The libraries' own loaders would follow what a configuration or an index of weights names: other files, code, packages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.json_files import read_json
from ..files.safetensors_file import opened, read_header, stored_part
from ..files.tensors import empty_tensors, fill, fill_from, of_possible_shapes
from .autoencoder import newer_names
from .family import (
    FAMILIES,
    LATENT_CHANNELS,
    TEXT_FILES,
    VAE_FILE,
    Family,
    check_channels,
    choose_another,
    connect_it,
    other_vae,
)

CONFIG_BYTES = 2**20
LONGEST_LIST, LARGEST_NUMBER = 64, 2**20  # in a configuration
DEPTHS = (  # settings whose product is the number of blocks
    "layers_per_block",
    "transformer_layers_per_block",
    "reverse_transformer_layers_per_block",
    "num_encoder_blocks",
    "num_decoder_blocks",
)
MOST_BLOCKS = 1000  # of a model; Stable Diffusion XL has 60 by this count
STEMS = ("diffusion_pytorch_model", "model")  # of files of weights
SHARD = re.compile(rf"({'|'.join(STEMS)})(\.fp16)?-\d{{5}}-of-\d{{5}}(\.fp16)?\.safetensors")


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration of a diffusers folder; raises ValueError for anything but a JSON object."""
    name = "/".join(path.parts[-3:])
    try:
        values = read_json(path, CONFIG_BYTES)
    except OSError:
        raise ValueError(f"{name} of a diffusers folder cannot be opened; get the folder again.") from None
    except ValueError as problem:
        raise ValueError(f"{name} of a diffusers folder is broken: {problem}. Get the folder again.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} of a diffusers folder holds no JSON object; get the folder again.")
    return values


def check_folder(path: Path, given: Collection[str]) -> Family:
    """Detect the family of a diffusers folder; raises ValueError for any other folder and for broken files in it."""
    if (path / "transformer").is_dir() or (path / "prior").is_dir():
        raise ValueError(f"{path.name} is a model{_pipeline(path)}; {connect_it()}.")
    needed = [part for part in ("unet", "text_encoder", "vae", "scheduler") if part not in given]
    for part in needed:
        if not any((path / part).glob("*.json")):
            raise ValueError(
                f"{path} is an incomplete diffusers folder: {part}/ with its config .json is missing; get it again, or "
                "choose a checkpoint in one file."
            )
    unet = read_config(path / "unet" / "config.json")
    if unet.get("encoder_hid_dim_type") == "text_proj":
        raise ValueError(f"{path.name} is a Kolors model; {choose_another()}.")
    if type(unet.get("cross_attention_dim")) is not int:
        raise ValueError(f"unet/config.json of {path.name} has no cross_attention_dim; get the folder again.")
    if (path / "text_encoder_2").is_dir() or unet.get("addition_embed_type") == "text_time":
        name = "sdxl"
    else:
        name = "sd2" if unet.get("cross_attention_dim") == 1024 else "sd1"
    family = FAMILIES[name]
    if VAE_FILE not in given and read_config(path / "vae" / "config.json").get("latent_channels", 4) != LATENT_CHANNELS:
        raise ValueError(f"The VAE of {path.name} has other than {LATENT_CHANNELS} latent channels. {other_vae()}")
    channels = unet.get("in_channels", LATENT_CHANNELS)
    check_channels(path.name, channels if type(channels) is int else 0, family)
    for part in ("unet", *TEXT_FILES[: len(family.texts)], "vae"):
        if part not in given:
            for file in weight_files(path / part):
                read_header(file)
    return family


def _pipeline(path: Path) -> str:
    """Name the kind of a folder's model, " for diffusers' X"; "" if its index does not tell."""
    index = path / "model_index.json"
    kind = read_config(index).get("_class_name") if index.is_file() else None
    plain = isinstance(kind, str) and re.fullmatch(r"\w{1,60}", kind)
    return f" for diffusers' {kind if plain else 'transformers'}"


def weight_files(folder: Path) -> list[Path]:
    """List the files of a model's weights: one, else that of float16, else the parts of a model in several files.

    Indexes of parts are not read: what they name could lie anywhere. Raises ValueError where there is no file.
    """
    for stem in STEMS:
        for ending in ("", ".fp16"):
            whole = folder / f"{stem}{ending}.safetensors"
            if whole.is_file():
                return [whole]
    names = sorted(path.name for path in folder.glob("*.safetensors") if SHARD.fullmatch(path.name))
    if parts := [name for name in names if ".fp16" not in name] or names:
        return [folder / name for name in parts]
    raise ValueError(
        f"{folder.parent.name} has no .safetensors file in {folder.name}/, and pickles (.bin) are not read; get the "
        "folder again with such a file, or choose a checkpoint in one file."
    )


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a model's weights from the headers of its files."""
    return {name: shape for file in weight_files(folder) for name, shape in read_header(file).shapes.items()}


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Read a model's weights from its files."""
    return dict(_tensors(weight_files(folder)))


def _tensors(paths: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        header = read_header(path)
        with opened(header) as file:
            yield from ((name, file.get_tensor(name)) for name in header.shapes)


def outline_folder(kind: Any, folder: Path) -> nn.Module:
    """Build a diffusers model from its folder's configuration, on the meta device.

    Raises ValueError for impossible sizes, and if weights and configuration differ.
    """
    config, what = read_config(folder / "config.json"), f"{folder.name}/config.json of {folder.parent.name}"
    blocks = math.prod(_largest(config.get(name)) for name in DEPTHS) * len(_list(config.get("down_block_types")))
    if blocks > MOST_BLOCKS or any(map(_is_too_large, config.values())):
        raise ValueError(f"{what} describes a model of impossible sizes; get the folder again.")
    with torch.device("meta"), of_possible_shapes(what, ValueError):
        model = kind.from_config(config)
    return _filled(model, folder, empty_tensors(folder_shapes(folder)))


def folder_autoencoder(path: Path) -> Any:
    """Choose diffusers' class of the autoencoder in a folder."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    tiny = read_config(path / "vae" / "config.json").get("_class_name") == "AutoencoderTiny"
    return AutoencoderTiny if tiny else AutoencoderKL


def load_folder(kind: Any, folder: Path, *, in_file: bool = False) -> nn.Module:
    """Load a diffusers model from its folder; raises ValueError if weights and configuration differ.

    in_file: the weights of linear layers and convolutions stay in their files.
    """
    model = outline_folder(kind, folder)
    if in_file:
        stored = {name: each for path in weight_files(folder) for name, each in stored_part(read_header(path)).items()}
        return _filled(model, folder, stored, fill_from)
    return _filled(model, folder, folder_tensors(folder))


def _filled(model: nn.Module, folder: Path, tensors: dict[str, Any], load: Callable[..., Any] = fill) -> nn.Module:
    names = {name: name for name in model.state_dict()}
    return load(model, names, newer_names(tensors), f"{folder.name}/ of {folder.parent.name}")


def _largest(value: Any) -> int:
    """Find the largest whole number in a value or in its lists, at least 1."""
    numbers = map(_largest, value) if isinstance(value, list) else (value,) if isinstance(value, int) else ()
    return max((1, *numbers))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_too_large(value: Any) -> bool:
    """Tell whether a value holds a number or a list that no configuration needs."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return len(value) > LONGEST_LIST or any(map(_is_too_large, value))
    return isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER
