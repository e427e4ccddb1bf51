"""Frozen configuration, one dataclass per socket. Configs stop at builders; mathematics gets plain values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Prediction = Literal["auto", "epsilon", "v_prediction"]
CaptionSource = Literal["text_file", "file_name", "folder_name", "none"]
Preset = Literal["attn-only", "attn-mlp", "full"]

ConfigT = TypeVar("ConfigT", bound="Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Base of every configuration: strict reading, plain writing, a stable digest."""

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts, lists and scalars that `from_dict` and JSON understand."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
        """Build from nested plain values; an unknown key raises ValueError and is named."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{cls.__name__} does not know {unknown}; it knows {sorted(known)}.")
        hints = _hints(cls)
        return cls(**{name: _read(hints[name], value) for name, value in values.items()})

    def canonical_json(self) -> str:
        """Return the one JSON text of this configuration (sorted keys, no spaces)."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def replace(self: ConfigT, **changes: Any) -> ConfigT:
        """Return a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


def _read(hint: Any, value: Any) -> Any:
    """Turn plain JSON values back into the annotated type: nested configs and tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(_read(args[0], item) for item in value)
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value)
    return value


@functools.cache
def _hints(cls: type[Config]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _check_choices(config: Config) -> None:
    """Refuse a value outside its Literal, naming field, value and choices; store whole floats as floats.

    4 and 4.0 are the same setting and must have the same digest.
    """
    for name, hint in _hints(type(config)).items():
        if hint is float:
            object.__setattr__(config, name, float(getattr(config, name)))
        if typing.get_origin(hint) is Literal and getattr(config, name) not in typing.get_args(hint):
            raise ValueError(f"{name} is {getattr(config, name)!r}; choose one of {list(typing.get_args(hint))}.")


def _check_range(config: Config, name: str, low: float, high: float = float("inf")) -> None:
    """Refuse a number outside [low, high] (NaN included)."""
    value = getattr(config, name)
    if not low <= value <= high:
        limit = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value}; it must be {limit}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelConfig(Config):
    """Which base model, and how its frozen part is read."""

    path: str  # a .safetensors file in the original layout, or a diffusers folder
    tokenizer: str = ""  # folder with vocab.json and merges.txt; "" looks beside the model and in COMFYUI_PATH
    prediction: Prediction = "auto"
    clip_skip: int = 1  # 1 = last layer, 2 = the one before (ComfyUI's stop_at_clip_layer -2)
    precision: Precision = "auto"  # frozen weights and activations; LoRA weights and loss stay float32

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "clip_skip", 1, 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskConfig(Config):
    """Where masks are and how they weigh; white (1) is trained, black (0) is not."""

    source: Literal["file", "alpha"] = "file"
    suffix: str = "-masklabel.png"  # for source "file": <picture name without extension><suffix>
    folder: str = ""  # for source "file": masks lie here instead of beside the pictures
    invert: bool = False
    missing: Literal["error", "ones"] = "error"
    unmasked_weight: float = 0.1  # floor of the mask, 0..1
    unmasked_probability: float = 0.1  # share of visits trained without the mask, 0..1
    normalize_masked_area: bool = False  # divide the loss by the mean of the mask

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "unmasked_weight", 0, 1)
        _check_range(self, "unmasked_probability", 0, 1)
        if self.source == "file" and not self.suffix:
            raise ValueError("The mask suffix is empty; give one, for example -masklabel.png.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig(Config):
    """One folder of pictures and how it is captioned, repeated and varied."""

    folder: str
    recursive: bool = True
    repeats: int = 1  # visits of each picture per epoch, >= 1
    loss_weight: float = 1.0  # multiplies the loss of these pictures, >= 0
    caption_source: CaptionSource = "text_file"
    caption_extension: str = ".txt"
    missing_caption: Literal["error", "empty"] = "error"
    caption_prefix: str = ""  # put before every caption, after any shuffling (the trigger word)
    caption_suffix: str = ""
    shuffle_tags: bool = False  # comma-separated tags in a new order at each visit
    keep_tags: int = 0  # the first tags that stay where they are
    tag_dropout: float = 0.0  # chance to leave out each other tag, 0..1
    caption_dropout: float = 0.0  # chance of an empty caption, 0..1
    flip: bool = False  # mirror left-right at half of the visits
    masks: MaskConfig | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "repeats", 1)
        _check_range(self, "loss_weight", 0)
        _check_range(self, "keep_tags", 0)
        _check_range(self, "tag_dropout", 0, 1)
        _check_range(self, "caption_dropout", 0, 1)
        if not self.caption_extension.startswith("."):
            raise ValueError(f"caption_extension is {self.caption_extension!r}; it must start with a dot, as .txt.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(Config):
    """The concepts that are trained together."""

    concepts: tuple[ConceptConfig, ...]

    def __post_init__(self) -> None:
        if not self.concepts:
            raise ValueError("The dataset holds no concept; add a Concept Dataset.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """How weights move."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    learning_rate: float = 1e-4  # of the UNet's network
    text_encoder_learning_rate: float = 0.0  # 0 leaves the text encoder as it is
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # 0 = no clipping

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "learning_rate", 0, 100)
        _check_range(self, "text_encoder_learning_rate", 0, 100)
        _check_range(self, "weight_decay", 0)
        _check_range(self, "beta1", 0, 0.999999)
        _check_range(self, "beta2", 0, 0.999999)
        _check_range(self, "eps", 0)
        _check_range(self, "max_grad_norm", 0)
        if self.learning_rate == 0 and self.text_encoder_learning_rate == 0:
            raise ValueError("Both learning rates are 0, nothing would be trained; set learning_rate above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(Config):
    """The learning rate's shape over the run."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0  # optimizer steps
    min_lr_ratio: float = 0.0  # floor as a share of the learning rate, 0..1

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "warmup_steps", 0)
        _check_range(self, "min_lr_ratio", 0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Config):
    """The network that is attached and trained."""

    rank: int = 16
    alpha: float = 16.0  # scale = alpha / rank; a constant, never trained
    preset: Preset = "attn-mlp"
    conv_rank: int = 0  # rank of 3x3 convolutions (preset full); 0 = rank
    conv_alpha: float = 0.0  # 0 = alpha

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "rank", 1, 4096)
        _check_range(self, "conv_rank", 0, 4096)
        _check_range(self, "conv_alpha", 0)
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; it must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Config):
    """What is predicted and how errors weigh."""

    min_snr_gamma: float = 0.0  # 0 = every timestep weighs the same; 5 is usual
    noise_offset: float = 0.0  # 0.03..0.1 lets very dark and very bright pictures be learned
    min_timestep: int = 0  # 0..999
    max_timestep: int = 999

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "min_snr_gamma", 0)
        _check_range(self, "noise_offset", 0)
        _check_range(self, "min_timestep", 0, 999)
        _check_range(self, "max_timestep", 0, 999)
        if self.min_timestep > self.max_timestep:
            raise ValueError(f"min_timestep {self.min_timestep} is above max_timestep {self.max_timestep}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Config):
    """Length, size and memory of the run."""

    steps: int = 1000  # optimizer steps; used when epochs is 0
    epochs: int = 0  # visits of the whole dataset; 0 = use steps
    batch_size: int = 1
    accumulate: int = 1  # micro-batches per optimizer step
    resolution: int = 512  # pixels: buckets hold about resolution x resolution
    bucket_step: int = 64  # pixels; bucket sides are multiples of it
    seed: int = 0
    gradient_checkpointing: bool = False
    latent_sampling: Literal["sample", "mean"] = "sample"
    save_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "steps", 1)
        _check_range(self, "epochs", 0)
        _check_range(self, "batch_size", 1)
        _check_range(self, "accumulate", 1)
        _check_range(self, "resolution", 64, 8192)
        _check_range(self, "bucket_step", 8, 512)
        _check_range(self, "seed", 0, 2**64 - 1)
        if self.bucket_step % 8 or self.resolution < self.bucket_step:
            raise ValueError(
                f"bucket_step is {self.bucket_step}; it must be a multiple of 8 no larger than the resolution "
                f"{self.resolution}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Config):
    """The pictures made from the training copy at the end of the run."""

    prompts: tuple[str, ...] = ()
    negative: str = ""
    steps: int = 20
    cfg: float = 7.0
    seed: int = 0
    width: int = 512  # pixels, multiples of 8
    height: int = 512

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "steps", 1, 1000)
        _check_range(self, "cfg", 0, 100)
        for side in ("width", "height"):
            _check_range(self, side, 16, 8192)
            if getattr(self, side) % 8:
                raise ValueError(f"sample {side} is {getattr(self, side)}; it must be a multiple of 8.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Config):
    """A whole run: everything that decides the trained weights."""

    base_model: BaseModelConfig
    dataset: DatasetConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
