"""Base models: what training may know of one (`base.py`), model files, and Stable Diffusion."""

from ..config import BaseModelConfig
from .base import BaseModel, CaptionLengths, Conditioning, LatentFormat, Layer, NoiseModel, Part, Source, TextEncoder
from .words import Words, mentions, word_ids

__all__ = [
    "BaseModel",
    "CaptionLengths",
    "Conditioning",
    "LatentFormat",
    "Layer",
    "NoiseModel",
    "Part",
    "Source",
    "TextEncoder",
    "Words",
    "mentions",
    "source_of",
    "word_ids",
]


def source_of(config: BaseModelConfig) -> Source:
    """Return where the base model of a configuration comes from; nothing is opened yet."""
    from .sd.source import StableDiffusionFiles  # here, so that whoever only names the protocol loads nothing

    return StableDiffusionFiles(config)
