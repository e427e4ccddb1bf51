"""All settings of a run: one frozen dataclass per node socket. Builders take them; mathematics gets plain values.

Each module holds the nodes of its name. Captions, masks, control pictures and buckets are in `dataset.py`, Noise & Loss
in `objective.py`, Memory in `model.py`, Train LoRA in `run.py`. What a row is says `rows.py`; `forms/` orders inputs.
"""

from .algorithms import ALGORITHMS, instead_of
from .base import Config
from .clips import OPEN_RATE, ClipConfig
from .dataset import (
    MASK_SUFFIX,
    MOST_CONTROLS,
    ONE_EACH,
    STAYING,
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    CaptionSource,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    MaskConfig,
    is_column,
)
from .defaults import OPEN, Defaults, describe_filled, fill, fill_dataset, fill_lora, fill_train, resolution_remarks
from .embedding import EmbeddingConfig
from .model import (
    MODEL_FILES,
    BaseModelConfig,
    ConnectedConfig,
    MemoryConfig,
    Precision,
    PredictionChoice,
    WeightPrecision,
)
from .naming import node, put_beneath, run_again, setting
from .network import DENOISER_ONLY, SPATIAL, BeneathConfig, LoraConfig, Preset
from .objective import MIN_SNR, WEIGHTINGS, ObjectiveConfig
from .optimizer import OptimizerConfig
from .optimizer_table import OPTIMIZERS
from .prompt_lines import PromptLine, parse_prompts
from .rows import for_reader, read_in_a_shell
from .run import RunConfig, TrainConfig
from .sample import SampleConfig, SamplePicture, SamplingDefaults, check_samples
from .saves import MOST_LORAS, ExistingConfig, SavesConfig, fill_name, plain_folder, plain_name
from .scheduler import SchedulerConfig

__all__ = [
    "ALGORITHMS",
    "DENOISER_ONLY",
    "MASK_SUFFIX",
    "MIN_SNR",
    "MODEL_FILES",
    "MOST_CONTROLS",
    "MOST_LORAS",
    "ONE_EACH",
    "OPEN",
    "OPEN_RATE",
    "OPTIMIZERS",
    "SPATIAL",
    "STAYING",
    "WEIGHTINGS",
    "AugmentConfig",
    "BaseModelConfig",
    "BeneathConfig",
    "BucketConfig",
    "CaptionConfig",
    "CaptionSource",
    "ClipConfig",
    "ConceptConfig",
    "Config",
    "ConnectedConfig",
    "ControlConfig",
    "DatasetConfig",
    "Defaults",
    "EmbeddingConfig",
    "ExistingConfig",
    "LoraConfig",
    "MaskConfig",
    "MemoryConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Precision",
    "PredictionChoice",
    "Preset",
    "PromptLine",
    "RunConfig",
    "SampleConfig",
    "SamplePicture",
    "SamplingDefaults",
    "SavesConfig",
    "SchedulerConfig",
    "TrainConfig",
    "WeightPrecision",
    "check_samples",
    "describe_filled",
    "fill",
    "fill_dataset",
    "fill_lora",
    "fill_name",
    "fill_train",
    "for_reader",
    "instead_of",
    "is_column",
    "node",
    "parse_prompts",
    "plain_folder",
    "plain_name",
    "put_beneath",
    "read_in_a_shell",
    "resolution_remarks",
    "run_again",
    "setting",
]
