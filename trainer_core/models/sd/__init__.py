"""Stable Diffusion 1, 2 and XL."""

from .conditions import Conditions
from .family import Family
from .load import check_base_model, detect_noise, load_base_model
from .model import StableDiffusion
from .outline import outline_base_model
from .remarks import remarks
from .source import StableDiffusionFiles
from .text import ClipLengths, find_tokenizer, load_tokenizer

__all__ = [
    "ClipLengths",
    "Conditions",
    "Family",
    "StableDiffusion",
    "StableDiffusionFiles",
    "check_base_model",
    "detect_noise",
    "find_tokenizer",
    "load_base_model",
    "load_tokenizer",
    "outline_base_model",
    "remarks",
]
