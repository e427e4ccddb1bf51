"""Frozen configuration, one dataclass per socket. Configs stop at builders; mathematics gets plain values."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from PIL import ImageColor

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "float32", "bfloat16", "float16", "float8", "int8", "nf4"]
Prediction = Literal["auto", "epsilon", "v_prediction"]
CaptionSource = Literal["text_file", "one_file", "table", "file_name", "folder_name", "none"]
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
        return hashlib.sha256(self.canonical_json().encode("utf-8", "surrogatepass")).hexdigest()

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
    vae: str = ""  # a .safetensors file of an autoencoder to use instead of the model's own
    text_encoder: str = ""  # a .safetensors file of a text encoder to use instead of the model's (first) one
    text_encoder_2: str = ""  # the same for the second one, in models that have two
    tokenizer: str = ""  # folder with vocab.json and merges.txt; "" looks beside the model and in COMFYUI_PATH
    prediction: Prediction = "auto"
    clip_skip: int = 1  # 1 = last layer, 2 = the one before (ComfyUI's stop_at_clip_layer -2)
    precision: Precision = "auto"  # of activations, and of frozen weights left at auto; the loss is always float32
    unet_weights: Weights = "auto"  # how frozen weights are kept; auto = in `precision`, in which all are computed
    text_weights: Weights = "auto"
    vae_precision: Precision = "auto"  # of the autoencoder while pictures are encoded; auto = float32
    zero_terminal_snr: Literal["auto", "on", "off"] = "auto"  # noise ends in pure noise; auto = as the file says

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "clip_skip", 1, 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskConfig(Config):
    """Where masks are and how they weigh; white (1) is trained, black (0) is not."""

    source: Literal["file", "alpha"] = "file"
    suffixes: tuple[str, ...] = ("-masklabel.png",)  # a mask is <picture name without extension><suffix>, first found
    folder: str = ""  # for source "file": masks lie here instead of beside the pictures
    invert: bool = False
    threshold: float = 0.0  # 0 keeps grey levels; else values of at least this become 1, others 0
    missing: Literal["error", "ones", "leave_out"] = "error"
    unmasked_weight: float = 0.1  # floor of the mask, 0..1
    unmasked_probability: float = 0.1  # share of visits trained without the mask, 0..1
    normalize_masked_area: bool = False  # divide the loss by the mean of the mask
    prior_weight: float = 0.0  # holds what the mask leaves out to what the base model predicts there, >= 0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "threshold", 0, 1)
        _check_range(self, "unmasked_weight", 0, 1)
        _check_range(self, "unmasked_probability", 0, 1)
        _check_range(self, "prior_weight", 0, 1000)
        if self.source == "file" and not (self.suffixes and all(self.suffixes)):
            raise ValueError("The mask suffix is empty; give one, for example -masklabel.png.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionConfig(Config):
    """Where captions come from, and how the caption of each visit is composed."""

    source: CaptionSource = "text_file"
    extensions: tuple[str, ...] = (".txt",)  # of files beside the pictures; tried in this order
    file: str = ""  # of sources one_file and table: absolute, or inside the concept's folder; "" finds the table
    encoding: str = "auto"  # of text files: auto is UTF-8 or what the byte order mark says, else a codec's name
    lines: Literal["draw", "first", "join"] = "draw"  # a text of several lines: one at each visit, the first, all
    missing: Literal["error", "empty"] = "error"
    prefix: str = ""  # put before every caption, after any shuffling (the trigger word)
    suffix: str = ""
    separator: str = ","  # between tags
    shuffle: bool = False  # tags in a new order at each visit
    keep: int = 0  # the first tags that stay where they are; a caption with ||| says it itself
    tag_dropout: float = 0.0  # chance to leave out each other tag, 0..1
    tag_dropout_mode: Literal["uniform", "weighted"] = "uniform"  # weighted: later tags are left out more often
    protected: tuple[str, ...] = ()  # tags that are never left out
    dropout: float = 0.0  # chance of an empty caption, 0..1
    wildcards: bool = False  # {a|b} draws one at each visit; {{ and }} are braces

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "keep", 0)
        _check_range(self, "tag_dropout", 0, 1)
        _check_range(self, "dropout", 0, 1)
        for extension in self.extensions or ("",):
            if not re.fullmatch(r"\.[^/\\]+", extension):
                raise ValueError(f"caption_extension is {extension!r}; it must start with a dot, as .txt.")
        if not self.separator.strip():
            raise ValueError("The tag separator is empty; give the character between tags, usually a comma.")
        if self.source == "one_file" and not self.file.strip():
            raise ValueError("caption_source is one_file and caption_file is empty; give the file of all captions.")
        if self.encoding != "auto":
            try:
                codecs.lookup(self.encoding)
            except (LookupError, ValueError) as error:
                raise ValueError(
                    f"caption_encoding is {self.encoding!r}, which is no known encoding; give auto, or for example "
                    "cp1252, shift_jis, gb18030."
                ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig(Config):
    """How pictures vary from visit to visit. Each picture has `variants` versions, taken in turn and cached."""

    variants: int = 4
    crop_jitter: float = 0.0  # how far the crop may leave the centre: 0 = not, 1 = up to the picture's edge
    zoom: float = 0.0  # enlarges by up to this share before the crop, 0..1
    rotation: float = 0.0  # turns by up to this many degrees either way, 0..45; corners are cut off, not filled
    brightness: float = 0.0  # each multiplies by 1 - x to 1 + x, 0..1
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # shifts by up to this share of a turn of the colour circle, 0..0.5

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "variants", 1, 1000)
        for name in ("crop_jitter", "zoom", "brightness", "contrast", "saturation"):
            _check_range(self, name, 0, 1)
        _check_range(self, "rotation", 0, 45)
        _check_range(self, "hue", 0, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig(Config):
    """One folder of pictures: what it is for, how often it is visited, how it is captioned and varied."""

    folder: str
    recursive: bool = True
    role: Literal["train", "regularisation", "validation"] = "train"
    repeats: float = 1.0  # visits of each picture per epoch, > 0; 0.5 visits each in every other epoch
    samples: int = 0  # visits of the whole concept per epoch; 0 = as repeats say
    folder_repeats: bool = True  # sub-folders named as 10_cat repeat 10 times more, as sd-scripts reads them
    loss_weight: float = 1.0  # multiplies the loss of these pictures, >= 0
    resolutions: tuple[str, ...] = ()  # "512": about that area, "640x384": that size; () = the run's
    flip: bool = False  # mirror left-right at half of the visits; not where the caption says left or right
    background: str = "white"  # what transparent pictures are laid on: a colour name or #rrggbb
    min_side: int = 16  # pixels; a picture with a shorter side is a problem
    on_problem: Literal["stop", "leave_out"] = "stop"  # a picture that cannot be used stops the run, or is listed
    captions: CaptionConfig = field(default_factory=CaptionConfig)
    augment: AugmentConfig | None = None
    masks: MaskConfig | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "repeats", 0.001, 1e6)
        _check_range(self, "samples", 0)
        _check_range(self, "loss_weight", 0)
        _check_range(self, "min_side", 1)
        _check_resolutions(self.resolutions)
        try:
            ImageColor.getrgb(self.background)
        except ValueError as error:
            raise ValueError(
                f"background is {self.background!r}; give a colour's name or #rrggbb, for example white or #808080."
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(Config):
    """The concepts that are trained together."""

    concepts: tuple[ConceptConfig, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig(Config):
    """At which sizes pictures are trained, beyond one resolution and step."""

    resolutions: tuple[str, ...] = ()  # "512": buckets of about that area, "640x384": that size; () = the run's one
    resolution_mode: Literal["draw", "all"] = "draw"  # draw: each visit takes one in turn; all: each visit once in each
    min_side: int = 0  # pixels; buckets with a shorter side are not used, 0 = all
    max_side: int = 0  # pixels; buckets with a longer side are not used, 0 = all
    no_upscale: bool = False  # a picture smaller than the resolution is trained at its own size
    small_buckets: Literal["keep", "merge"] = "keep"  # merge: too few pictures for a batch go to the nearest bucket
    mix_concepts: bool = True  # a batch may hold pictures of several concepts

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "min_side", 0)
        _check_range(self, "max_side", 0)
        _check_resolutions(self.resolutions)
        if 0 < self.max_side < self.min_side:
            raise ValueError(f"max_side {self.max_side} is below min_side {self.min_side}; exchange them.")


def _check_resolutions(resolutions: tuple[str, ...]) -> None:
    """Refuse anything but "512" and "640x384" with sides of 64 to 8192 pixels, multiples of 8."""
    for resolution in resolutions:
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", resolution)
        sides = [int(side) for side in match.groups() if side] if match else []
        if not sides or not all(64 <= side <= 8192 and side % 8 == 0 for side in sides):
            raise ValueError(
                f"The resolution {resolution!r} is not understood; give numbers as 512 or sizes as 640x384, multiples "
                "of 8 between 64 and 8192, with commas between."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """How weights move."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    learning_rate: float = 1e-4  # of the UNet's network
    text_encoder_learning_rate: float = 0.0  # 0 leaves the (first) text encoder as it is
    text_encoder_2_learning_rate: float = 0.0  # of the second one, in models that have two
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # 0 = no clipping
    text_encoder_stop: int = 0  # the (first) text encoder stays as it is from then on; 0 = trains to the end
    text_encoder_2_stop: int = 0
    stop_unit: Literal["steps", "epochs"] = "steps"  # of the two above

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "learning_rate", 0, 100)
        _check_range(self, "text_encoder_learning_rate", 0, 100)
        _check_range(self, "text_encoder_2_learning_rate", 0, 100)
        _check_range(self, "weight_decay", 0)
        _check_range(self, "beta1", 0, 0.999999)
        _check_range(self, "beta2", 0, 0.999999)
        _check_range(self, "eps", 0)
        _check_range(self, "max_grad_norm", 0)
        _check_range(self, "text_encoder_stop", 0)
        _check_range(self, "text_encoder_2_stop", 0)
        if not self.learning_rate and not self.text_encoder_learning_rate and not self.text_encoder_2_learning_rate:
            raise ValueError("All learning rates are 0, nothing would be trained; set learning_rate above 0.")


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
class BeneathConfig(Config):
    """A LoRA that is added to the base model's weights before another one is trained on it."""

    path: str  # a .safetensors file
    strength: float = 1.0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "strength", -10, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Config):
    """The network that is attached and trained."""

    rank: int = 16
    alpha: float = 16.0  # scale = alpha / rank; a constant, never trained
    preset: Preset = "attn-mlp"
    conv_rank: int = 0  # rank of 3x3 convolutions (preset full); 0 = rank
    conv_alpha: float = 0.0  # 0 = alpha
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights; bfloat16 is rounded stochastically
    start: str = ""  # a LoRA file to continue: layers, ranks and alphas are the file's
    beneath: tuple[BeneathConfig, ...] = ()

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
    buckets: BucketConfig = field(default_factory=BucketConfig)
    seed: int = 0
    latent_sampling: Literal["sample", "mean"] = "sample"
    validate_every: int = 0  # steps between validation losses; 0 = at the start and the end only
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
        _check_range(self, "validate_every", 0)
        if self.bucket_step % 8 or self.resolution < self.bucket_step:
            raise ValueError(
                f"bucket_step is {self.bucket_step}; it must be a multiple of 8 no larger than the resolution "
                f"{self.resolution}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Config):
    """What is given up for memory or speed; what is learned stays the same but for rounding. auto fits the device."""

    checkpointing: Literal["auto", "0", "1", "2", "3", "4", "full"] = "auto"  # how much is computed twice
    offload_weights: Literal["auto", "none", "half", "all"] = "auto"  # frozen UNet weights kept in RAM, streamed
    offload_activations: Literal["auto", "off", "on"] = "auto"  # what the backward pass needs waits in RAM
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"  # kernel of scaled dot product attention
    channels_last: Literal["auto", "off", "on"] = "auto"  # memory order of convolutions
    compile: bool = False  # torch.compile of the UNet's repeated blocks

    def __post_init__(self) -> None:
        _check_choices(self)


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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
