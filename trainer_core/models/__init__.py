"""Base models: the interface for training (`base.py`), model files, and Stable Diffusion behind it.

A new architecture is a row of `architectures.py`, whether ComfyUI or this folder loads it. Another kind of model is
another folder beside `sd/`; `source_of` chooses. Models that ComfyUI has loaded are behind the
same interface in `nodes/comfyui/connected/`, and reach a run as a `Chosen` that opens them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..config import BaseModelConfig
from .base import (
    BaseModel,
    CaptionLengths,
    Conditioning,
    ControlPictures,
    Host,
    Inpainting,
    LatentFormat,
    Layer,
    LevelDefaults,
    NoiseModel,
    Part,
    Source,
    TextEncoder,
    differentiable,
    encoding,
    session,
)
from .weights import check_weighted
from .words import Words, mentions, word_ids

__all__ = [
    "BaseModel",
    "CaptionLengths",
    "Chosen",
    "Conditioning",
    "ControlPictures",
    "Host",
    "Inpainting",
    "LatentFormat",
    "Layer",
    "LevelDefaults",
    "NoiseModel",
    "Open",
    "Part",
    "Source",
    "TextEncoder",
    "Words",
    "check_weighted",
    "differentiable",
    "encoding",
    "mentions",
    "session",
    "source_of",
    "word_ids",
]


def source_of(config: BaseModelConfig) -> Source:
    """Build the source of a base model's files; nothing is opened yet. Raises ValueError for a connected model."""
    if config.connected is not None:
        raise ValueError(f"{config.path} is a connected model, which needs ComfyUI; start the run there.")
    from .sd.source import StableDiffusionFiles  # here, so that importing the protocols alone loads nothing

    return StableDiffusionFiles(config)


Open = Callable[[BaseModelConfig], Source]  # builds the source of a base model


@dataclass(frozen=True, eq=False)
class Chosen:
    """A base model as a person has chosen it: its settings, and what builds its source, which may hold live models."""

    config: BaseModelConfig
    open: Open = source_of

    def source(self) -> Source:
        """Build its source anew."""
        return self.open(self.config)
