"""Settings of the whole run, and its length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Config, check_choices, check_open, check_range
from .dataset import BucketConfig, DatasetConfig
from .model import BaseModelConfig, MemoryConfig
from .network import LoraConfig
from .objective import ObjectiveConfig
from .optimizer import OptimizerConfig
from .sample import SampleConfig
from .saves import ExistingConfig, SavesConfig
from .scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Config):
    """Length, size and memory of the run."""

    SECTION: ClassVar = "train"
    NODE: ClassVar = "Train LoRA"

    steps: int = 1000  # optimizer steps; used when epochs is 0
    epochs: int = 0  # visits of the whole dataset; 0 = use steps
    batch_size: int = 1
    accumulate: int = 1  # micro-batches per optimizer step
    resolution: int = 512  # pixels: buckets hold about resolution x resolution; 0 = as suits the model
    bucket_step: int = 64  # pixels; bucket sides are multiples of it; 0 = as suits the model
    buckets: BucketConfig = field(default_factory=BucketConfig)
    seed: int = 0
    validate_every: int = 0  # steps between validation losses; 0 = at the start and the end only
    validation_levels: int = 0  # noise levels whose validation losses are measured one by one, 0..20; 0 = none
    validation_share: float = 0.0  # of the training pictures, held out for validation, 0..0.9; 0 = none
    save_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    keep_best: bool = False  # use the weights of the lowest validation loss; save the last ones beside them
    early_stop_patience: int = 0  # validations without improvement until the run ends with the best weights; 0 = never
    early_stop_min_improvement: float = 0.0  # share by which the validation loss must fall to count, 0..0.9
    log: Literal["none", "csv", "tensorboard", "both"] = "none"  # format of the log of all steps

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "steps", 1)
        check_range(self, "epochs", 0)
        check_range(self, "batch_size", 1)
        check_range(self, "accumulate", 1)
        check_open(self, "resolution", 0, 64, 8192)
        check_open(self, "bucket_step", 0, 8, 512)
        check_range(self, "seed", 0, 2**64 - 1)
        check_range(self, "validate_every", 0)
        check_range(self, "validation_levels", 0, 20)
        check_range(self, "validation_share", 0, 0.9)
        check_range(self, "early_stop_patience", 0)
        check_range(self, "early_stop_min_improvement", 0, 0.9)
        if self.bucket_step % 8 or 0 < self.resolution < self.bucket_step:
            raise ValueError(
                f"bucket_step is {self.bucket_step}; set bucket_step of Buckets to a multiple of 8, at most the "
                f"resolution {self.resolution}."
            )
        if (control := self.keeps_by) and not self.validate_every:
            raise ValueError(
                f"{control} needs validation losses during the run; set validate_every of Validation to a number of "
                "steps, for example 50."
            )

    @property
    def keeps_by(self) -> str:
        """Name the setting that keeps the best weights, with its value; "" if the last weights are kept."""
        if self.early_stop_patience:
            return f"early_stop_patience {self.early_stop_patience}"
        return "keep_best" if self.keep_best else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Config):
    """All settings of a run: those that decide the trained weights, and those of saves, samples and memory."""

    base_model: BaseModelConfig
    dataset: DatasetConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    saves: SavesConfig = field(default_factory=SavesConfig)
    existing: ExistingConfig = field(default_factory=ExistingConfig)
