"""What a person should know of a base model before training on it, told by its headers."""

from __future__ import annotations

import re
from pathlib import Path

from ...config import BaseModelConfig
from ..files.safetensors_file import read_header
from .family import VAE_FILE, detect_family
from .load import check_folder, declared_noise, given_files

# Models that were distilled to draw in a few steps, by the words people name them with.
DISTILLED = {
    "Lightning": re.compile(r"lightning", re.IGNORECASE),
    "Turbo": re.compile(r"turbo", re.IGNORECASE),
    "Hyper": re.compile(r"(?<![a-z])hyper(?![a-z]|[ _-]?(real|detail))", re.IGNORECASE),
    "LCM": re.compile(r"(?<![a-z])lcm(?![a-z])|(?<![A-Z])LCM(?![A-Za-z])"),
    "DMD": re.compile(r"(?<![a-z])dmd2?(?![a-z])", re.IGNORECASE),
}
# keys of the metadata that tell what a file is and from what it was merged
TELLING = (
    "modelspec.title",
    "modelspec.description",
    "modelspec.merged_from",
    "sd_merge_recipe",
    "sd_merge_models",
)
# autoencoders of XL and of the models before, by the words of their files' names: their tensors have the same shapes
XL_VAE = re.compile(r"xl|pony|illustrious|noob", re.IGNORECASE)
EARLIER_VAE = re.compile(
    r"ft-(mse|ema)|840000|560000|kl-f8|sd[-_ ]?v?(1|2)[-_. ]?\d|stable-diffusion-v[12]", re.IGNORECASE
)
KINDS = {"epsilon": "the noise (epsilon)", "v_prediction": "v"}


def remarks(config: BaseModelConfig) -> list[str]:
    """Return sentences about a base model that can be trained but may surprise."""
    return [*_distilled(Path(config.path)), *_overruled(config), *_other_vae(config)]


def _distilled(path: Path) -> list[str]:
    """Say that distillation is lost in training, where file name or metadata speak of it."""
    places = {"its name": path.stem if path.is_file() else path.name}
    if path.is_file():
        metadata = read_header(path).metadata
        places |= {f"{key} in its metadata": metadata[key] for key in TELLING if key in metadata}
    for kind, words in DISTILLED.items():
        for place, text in places.items():
            if words.search(text):
                return [
                    f"{path.name} is a {kind} model by {place}: training undoes its distillation to few steps, so draw "
                    "with ordinary steps and cfg afterwards, or with a LoRA for speed added."
                ]
    return []


def _overruled(config: BaseModelConfig) -> list[str]:
    """Say where the person's choice contradicts what the file says of itself."""
    name = Path(config.path).name
    declared, zero = declared_noise(config)
    sentences = []
    if declared and config.prediction not in ("auto", declared[0]):
        sentences.append(
            f"{name} predicts {KINDS[declared[0]]} by {declared[1]}, and prediction is set to {config.prediction}: "
            "unless the file lies, the run would be wasted; set prediction to auto."
        )
    if zero and config.zero_terminal_snr == "off":
        sentences.append(
            f"{name} says that its noise ends in pure noise, and zero_terminal_snr is off: unless the file lies, the "
            "run would miss its darkest and brightest pictures; set it to auto."
        )
    return sentences


def _other_vae(config: BaseModelConfig) -> list[str]:
    """Say where a separate autoencoder is, by its name or metadata, one of models with other latents."""
    path, given = Path(config.path), given_files(config)
    if VAE_FILE not in given:
        return []
    family = check_folder(path, given) if path.is_dir() else detect_family(read_header(path), given)
    header = read_header(given[VAE_FILE])
    places = (header.path.stem, header.metadata.get("modelspec.architecture", ""))
    words, kind = (EARLIER_VAE, "1 and 2") if family.name == "sdxl" else (XL_VAE, "XL")
    if not any(words.search(text) for text in places):
        return []
    return [
        f"{header.path.name} is an autoencoder of Stable Diffusion {kind} by its name, and {path.name} a "
        f"{family.title} model, whose latents are others: unless the name lies, the run would be wasted; choose "
        "another vae."
    ]
