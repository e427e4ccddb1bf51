"""Base models: the interface for training (`base.py`), model files, and Stable Diffusion behind it.

Another kind of model is another folder beside `sd/`; `source_of` chooses.
"""

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
    """Build the source of a configuration's base model; nothing is opened yet."""
    from .sd.source import StableDiffusionFiles  # here, so that importing the protocols alone loads nothing

    return StableDiffusionFiles(config)
