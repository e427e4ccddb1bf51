"""Settings of the whole run, and its length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Config
from .dataset import BucketConfig, DatasetConfig
from .embedding import EmbeddingConfig
from .model import BaseModelConfig, MemoryConfig
from .network import LoraConfig
from .objective import ObjectiveConfig
from .optimizer import OptimizerConfig
from .rows import aside, row
from .sample import SampleConfig
from .saves import ExistingConfig, SavesConfig
from .scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Config):
    """Length, size and memory of the run."""

    SECTION: ClassVar = "train"
    NODE: ClassVar = "Train LoRA"

    steps: int = row(
        1000, "Length of the run in optimizer steps; used when epochs is 0.", span=(1, 1_000_000), decides="result"
    )
    epochs: int = row(0, "Length of the run in epochs. 0 = use steps.", span=(0, 100_000), decides="result")
    batch_size: int = row(1, "Pictures per batch. More is smoother and needs more memory.", span=(1, 4096))
    resolution: int = row(
        512,
        "Pixels, 64 or more: each picture is scaled to about resolution x resolution, in the shape nearest to its "
        "own. 0: as suits the model, 512 for Stable Diffusion 1, 1024 for XL.",
        span=(64, 8192, 8),
        unit="pixels",
        open=0,
    )
    seed: int = row(
        0,
        "The seed of everything random in the run, 0 to 2^64 - 1. Another seed is another run.",
        span=(0, 2**64 - 1),
        controlled=True,
    )
    accumulate: int = row(
        1,
        "Gradient accumulation: batches per optimizer step. Works like a larger batch_size without its memory.",
        span=(1, 4096),
        advanced=True,
        optional=True,
    )
    buckets: BucketConfig = field(default_factory=BucketConfig)
    bucket_step: int = row(
        64,
        "Pixels: the sides of all sizes are multiples of it, itself a multiple of 8. A smaller value cuts off less "
        "of each picture and makes more sizes. 0: as suits the model, mostly 64.",
        span=(8, 512, 8),
        unit="pixels",
        advanced=True,
        open=0,
        node="Buckets",
    )
    validate_every: int = row(
        0,
        "Steps between two measurements of the validation loss, with a concept of the role validation. 0 = at the "
        "start and the end only.",
        span=(0, 1_000_000),
        node="Validation",
    )
    early_stop_patience: int = row(
        0,
        "Early stopping: ends the run after this many measurements in a row without a lower validation loss, and "
        "keeps the best LoRA. 3 to 5 suit most. Needs validate_every. 0 = off.",
        span=(0, 1000),
        node="Validation",
    )
    early_stop_min_improvement: float = row(
        0.0,
        "For early_stop_patience and plateau_patience: the share by which the validation loss must fall, 0 to 0.9: "
        "0.01 = one per cent below the lowest so far. 0 = any fall counts.",
        span=(0, 0.9, 0.001),
        advanced=True,
        node="Validation",
    )
    keep_best: bool = row(
        False,
        "On: the LoRA is the one of the lowest validation loss instead of the last; the last one is saved beside it"
        " as <name>-last. Needs validate_every. early_stop_patience turns it on.",
        node="Validation",
    )
    validation_levels: int = row(
        0,
        "Measures the validation loss at so many noise levels one by one, each a curve of the log and of the run's "
        "graph: little noise shows detail, much noise composition. 8 is usual. 0 (default) = only their mean, which"
        " stays the same. Takes a pass for each picture and level.",
        span=(0, 20),
        advanced=True,
        optional=True,
        decides="nothing",
        node="Validation",
    )
    validation_share: float = row(
        0.0,
        "Share of the training pictures that is held out for validation, 0 to 0.9, of every concept alike. The seed"
        " and the pictures' content choose which; the report names them. 0 = none.",
        span=(0, 0.9, 0.05),
        round=0.001,
        optional=True,
        node="Validation",
    )
    plateau_patience: int = row(
        0,
        "Learning rate by plateau: it falls after this many measurements in a row without a lower validation loss. 2 "
        "to 4 suit most. Needs validate_every, and turns keep_best on. 0 (default) = off.",
        span=(0, 1000),
        optional=True,
        node="Validation",
    )
    plateau_factor: float = row(
        0.5,
        "For plateau_patience: what the learning rate is multiplied by at each fall, 0.01 to 0.99.",
        span=(0.01, 0.99, 0.05),
        round=0.001,
        advanced=True,
        optional=True,
        node="Validation",
    )
    plateau_roll_back: bool = row(
        True,
        "For plateau_patience: at each fall the weights go back to those of the lowest validation loss. Off: they "
        "stay.",
        advanced=True,
        optional=True,
        node="Validation",
    )
    save_dtype: Literal["float16", "bfloat16", "float32"] = row(
        "float16",
        "Precision of the file. float16 is what other programs expect; float32 is twice as large.",
        advanced=True,
        decides="result",
        node="Saves & Samples",
    )
    log: Literal["none", "csv", "tensorboard", "both"] = row(
        "none",
        "Logs losses, learning rates, gradient norm, time and memory of every step in output/atelier/logs. csv: a "
        "table for any spreadsheet. tensorboard: event files for TensorBoard, whose package must be installed; it "
        "shows the samples, too. both, or none.",
        advanced=True,
        open="csv",
        decides="nothing",
        node="Saves & Samples",
    )

    def check(self) -> None:
        """Raise ValueError for sides that no size has, and for a stop without measurements."""
        if self.bucket_step % 8 or 0 < self.resolution < self.bucket_step:
            raise ValueError(
                f"bucket_step is {self.bucket_step}; set {self.named('bucket_step')} to a multiple of 8, at most the "
                f"resolution {self.resolution}."
            )
        if (control := self.keeps_by) and not self.validate_every:
            raise ValueError(
                f"{control} needs validation losses during the run; set {self.named('validate_every')} to a number of "
                "steps, for example 50."
            )

    @property
    def keeps_by(self) -> str:
        """Name the setting that keeps the best weights, with its value; "" if the last weights are kept."""
        if self.early_stop_patience:
            return f"early_stop_patience {self.early_stop_patience}"
        if self.plateau_patience:
            return f"plateau_patience {self.plateau_patience}"
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
    sample: SampleConfig = aside(default_factory=SampleConfig)
    saves: SavesConfig = aside(default_factory=SavesConfig)
    existing: ExistingConfig = aside(default_factory=ExistingConfig)

    def check(self) -> None:
        """Raise ValueError for a run that trains nothing."""
        if not any(self.optimizer.part_rates) and not self.lora.embeddings:
            raise ValueError(
                "All learning rates are 0 and no word is trained, so nothing is trained; set "
                f"{self.optimizer.named('learning_rate')} above 0, or name a word in {EmbeddingConfig.named('token')}."
            )
