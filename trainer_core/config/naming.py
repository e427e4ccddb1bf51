"""The name of any setting in a message, by its place in a run's settings."""

from __future__ import annotations

from .base import Config
from .dataset import AugmentConfig, BucketConfig, CaptionConfig, ConceptConfig, ControlConfig, MaskConfig
from .embedding import EmbeddingConfig
from .model import BaseModelConfig, ConnectedConfig, MemoryConfig
from .network import BeneathConfig, LoraConfig
from .objective import ObjectiveConfig
from .optimizer import OptimizerConfig
from .run import TrainConfig
from .sample import SampleConfig
from .saves import ExistingConfig, SavesConfig
from .scheduler import SchedulerConfig

SECTIONS: dict[str, type[Config]] = {  # by the last part of their place, which no two share
    each.SECTION.rpartition(".")[2]: each
    for each in (
        *(BaseModelConfig, ConnectedConfig, MemoryConfig),
        *(ConceptConfig, CaptionConfig, MaskConfig, ControlConfig, AugmentConfig),
        *(LoraConfig, BeneathConfig, EmbeddingConfig, OptimizerConfig, SchedulerConfig, ObjectiveConfig),
        *(TrainConfig, BucketConfig, SampleConfig, SavesConfig, ExistingConfig),
    )
}


def setting(place: str) -> str:
    """Name a setting for who reads: "lora.rank" is "rank of LoRA Config" in the page, "lora.rank" in a shell."""
    section, _, name = place.partition(".")
    return SECTIONS[section].named(name)
