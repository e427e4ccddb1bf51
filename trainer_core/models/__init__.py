"""Base models: the interface for training (`base.py`), model files, and Stable Diffusion behind it.

Another kind of model is another folder beside `sd/`; `source_of` chooses. Models that ComfyUI has loaded are behind the
protocol, too, in `nodes/comfyui/connected/`, which alone knows them and names itself here.
"""

from collections.abc import Callable

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
    encoding,
    session,
)
from .weights import check_weighted
from .words import Words, mentions, word_ids

__all__ = [
    "BaseModel",
    "CaptionLengths",
    "Conditioning",
    "ControlPictures",
    "Host",
    "Inpainting",
    "LatentFormat",
    "Layer",
    "LevelDefaults",
    "NoiseModel",
    "Part",
    "Source",
    "TextEncoder",
    "Words",
    "check_weighted",
    "encoding",
    "mentions",
    "session",
    "source_of",
    "word_ids",
]


connected_source: Callable[[BaseModelConfig], Source] | None = None  # set where ComfyUI is


def source_of(config: BaseModelConfig) -> Source:
    """Build the source of a configuration's base model; nothing is opened yet."""
    if config.connected is not None:
        if connected_source is None:
            raise ValueError(f"{config.path} is a connected model, which needs ComfyUI; start the run there.")
        return connected_source(config)
    from .sd.source import StableDiffusionFiles  # here, so that importing the protocols alone loads nothing

    return StableDiffusionFiles(config)
