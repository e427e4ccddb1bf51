"""Frozen configuration, one dataclass per socket. Configs stop at builders; mathematics gets plain values."""

from .base import Config
from .dataset import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    CaptionSource,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
)
from .embedding import EmbeddingConfig
from .model import BaseModelConfig, MemoryConfig, Precision, Prediction, Weights
from .network import BeneathConfig, LoraConfig, Preset
from .objective import ObjectiveConfig
from .optimizer import OptimizerConfig
from .run import RunConfig, SampleConfig, TrainConfig
from .scheduler import SchedulerConfig

__all__ = [
    "AugmentConfig",
    "BaseModelConfig",
    "BeneathConfig",
    "BucketConfig",
    "CaptionConfig",
    "CaptionSource",
    "ConceptConfig",
    "Config",
    "DatasetConfig",
    "EmbeddingConfig",
    "LoraConfig",
    "MaskConfig",
    "MemoryConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Precision",
    "Prediction",
    "Preset",
    "RunConfig",
    "SampleConfig",
    "SchedulerConfig",
    "TrainConfig",
    "Weights",
]
