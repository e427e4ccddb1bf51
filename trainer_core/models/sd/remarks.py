"""Warnings about a base model, from its headers, shown before the run."""

from __future__ import annotations

import re
from pathlib import Path

from ...config import BaseModelConfig, setting
from ..files.safetensors_file import read_header
from .family import VAE_FILE, detect_family, other_vae
from .folder import check_folder
from .load import declared_noise, given_files

# Kinds of models distilled to few steps, and their names in file names and metadata.
DISTILLED = {
    "Lightning": re.compile(r"lightning", re.IGNORECASE),
    "Turbo": re.compile(r"turbo", re.IGNORECASE),
    "Hyper": re.compile(r"(?<![a-z])hyper(?![a-z]|[ _-]?(real|detail))", re.IGNORECASE),
    "LCM": re.compile(r"(?<![a-z])lcm(?![a-z])|(?<![A-Z])LCM(?![A-Za-z])"),
    "DMD": re.compile(r"(?<![a-z])dmd2?(?![a-z])", re.IGNORECASE),
}
# metadata that describe a file and the models it was merged from
METADATA_KEYS = (
    "modelspec.title",
    "modelspec.description",
    "modelspec.merged_from",
    "sd_merge_recipe",
    "sd_merge_models",
)
# autoencoders of XL and of earlier models by file name, since their tensors have the same shapes
XL_VAE = re.compile(r"xl|pony|illustrious|noob", re.IGNORECASE)
EARLIER_VAE = re.compile(
    r"ft-(mse|ema)|840000|560000|kl-f8|sd[-_ ]?v?(1|2)[-_. ]?\d|stable-diffusion-v[12]", re.IGNORECASE
)
KINDS = {"epsilon": "the noise (epsilon)", "v_prediction": "v"}


def remarks(config: BaseModelConfig) -> list[str]:
    """List warnings about a base model that can be trained."""
    return [*_distilled(Path(config.path)), *_overruled(config), *_other_vae(config)]


def _distilled(path: Path) -> list[str]:
    """Warn that training undoes distillation, if file name or metadata mention it."""
    texts = {"its name": path.stem if path.is_file() else path.name}
    if path.is_file():
        metadata = read_header(path).metadata
        texts |= {f"{key} in its metadata": metadata[key] for key in METADATA_KEYS if key in metadata}
    for kind, words in DISTILLED.items():
        for source, text in texts.items():
            if words.search(text):
                return [
                    f"{path.name} is a {kind} model by {source}: training undoes its distillation to few steps. Draw "
                    "with ordinary steps and cfg afterwards, or add a LoRA for speed."
                ]
    return []


def _overruled(config: BaseModelConfig) -> list[str]:
    """Warn of settings that contradict the file's own declarations."""
    name = Path(config.path).name
    declared, zero = declared_noise(config)
    sentences = []
    if declared and config.prediction not in ("auto", declared[0]):
        sentences.append(
            f"{name} predicts {KINDS[declared[0]]} by {declared[1]}, but prediction is set to {config.prediction}: "
            f"unless the file is wrong, the run would be wasted. Set {setting('base_model.prediction')} to auto."
        )
    if zero and config.zero_terminal_snr == "off":
        sentences.append(
            f"{name} declares zero terminal SNR, but zero_terminal_snr is off: unless the file is wrong, the LoRA "
            f"would miss very dark and very bright pictures. Set {setting('base_model.zero_terminal_snr')} to auto."
        )
    return sentences


def _other_vae(config: BaseModelConfig) -> list[str]:
    """Warn of a separate autoencoder that is, by name or metadata, made for other latents."""
    path, given = Path(config.path), given_files(config)
    if VAE_FILE not in given:
        return []
    family = check_folder(path, given) if path.is_dir() else detect_family(read_header(path), given)
    header = read_header(given[VAE_FILE])
    texts = (header.path.stem, header.metadata.get("modelspec.architecture", ""))
    words, kind = (EARLIER_VAE, "1 and 2") if family.name == "sdxl" else (XL_VAE, "XL")
    if not any(words.search(text) for text in texts):
        return []
    return [
        f"{header.path.name} is an autoencoder of Stable Diffusion {kind} by its name, and {path.name} a "
        f"{family.title} model, whose latents are others: unless the name is wrong, the run would be wasted. "
        f"{other_vae()}"
    ]
