"""From the inputs of each node to its configuration: the one mapping, which nodes and readers of workflows call.

Inputs are as ComfyUI passes them: a dynamic combo is a dict of its choice and that option's own inputs. What a node's
socket carries beside a Config is here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple, Protocol

from ..config import (
    MASK_SUFFIX,
    MIN_SNR,
    MODEL_FILES,
    OPEN,
    AugmentConfig,
    BaseModelConfig,
    BeneathConfig,
    BucketConfig,
    CaptionConfig,
    ClipConfig,
    ConceptConfig,
    Config,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    ExistingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
    is_column,
    node,
    parse_prompts,
    put_beneath,
    setting,
)
from ..config.forms.network import NONE
from ..config.forms.run import PARTS
from ..config.optimizer import RATES
from ..config.rows import Row, rows_of

BAKED = "baked"  # the choice of no file
OPEN_OPTIMIZER = OptimizerConfig(learning_rate=OPEN)  # where nothing is linked
OPEN_LORA = LoraConfig(rank=0, alpha=0, preset="auto")
OPEN_CAPTIONS = CaptionConfig(dropout=OPEN)
OPEN_TRAIN = TrainConfig(resolution=0, bucket_step=0)
PART_INPUTS = frozenset(part.title.lower() for part in PARTS.values())
CONTROL_FOLDERS = ("folder", "folder_2", "folder_3")  # inputs of Control Pictures, MOST_CONTROLS
LONGEST_PATH = 1000  # characters
LONG_FORM = re.compile(r"^[\\/]{2}\?[\\/](?=[A-Za-z]:[\\/])")  # as Windows writes a long path: \\?\C:\pictures


class Sizes(NamedTuple):
    """What Buckets sets."""

    buckets: BucketConfig = BucketConfig()
    bucket_step: int = 0


class Outputs(NamedTuple):
    """What Saves & Samples sets."""

    saves: SavesConfig = SavesConfig()
    sample: SampleConfig = SampleConfig(width=0, height=0)
    save_dtype: str = "float16"
    log: str = "csv"


class PicturePart(NamedTuple):
    """What Pictures sets: fields of ConceptConfig, by name."""

    values: Mapping[str, Any]


class TrainPart(NamedTuple):
    """What a node of PARTS sets: fields of TrainConfig, by name."""

    values: Mapping[str, Any]


class Places(Protocol):
    """Finds the files and folders that inputs name; each raises ValueError for what is not there."""

    def checkpoint_path(self, name: str) -> Path:
        """Find a checkpoint or a diffusers folder by its name in the list of checkpoints."""
        ...

    def file_path(self, kind: str, name: str, setting: str) -> Path:
        """Find a file of a kind: "vae", "text_encoders" or "loras"; setting: input and node, for the message."""
        ...

    def find_folder(self, folder: str, node: str) -> Path:
        """Find a folder of pictures; node: for the message."""
        ...

    def tokenizer_path(self) -> Path | None:
        """Find the folder of ComfyUI's own CLIP tokenizer; None without one."""
        ...


# --- the base model and the pictures -----------------------------------------------------------------------


def read_base_model(places: Places, checkpoint: str, **values: Any) -> BaseModelConfig:
    """Read Load Base Model."""
    chosen = {name: values.pop(name) for name in MODEL_FILES if name in values}
    return BaseModelConfig(
        path=str(places.checkpoint_path(checkpoint)),
        **{name: str(file) for name, file in other_files(places, chosen).items()},
        tokenizer=str(places.tokenizer_path() or ""),
        **values,
    )


def other_files(places: Places, chosen: Mapping[str, str]) -> dict[str, Path]:
    """Find the files chosen in place of the checkpoint's own, by their names in BaseModelConfig."""
    return {
        part: places.file_path("vae" if part == "vae" else "text_encoders", name, BaseModelConfig.named(part))
        for part, name in chosen.items()
        if name != BAKED
    }


def read_concept(
    places: Places,
    folder: str,
    dataset: DatasetConfig | None = None,
    caption_settings: CaptionConfig = OPEN_CAPTIONS,
    picture_settings: PicturePart | None = None,
    clip_settings: ClipConfig | None = None,
    **values: Any,
) -> DatasetConfig:
    """Read Concept Dataset: the concepts so far and this one."""
    texts, own = fields_of(CaptionConfig, values), fields_of(ConceptConfig, values)
    if "file" in texts:
        texts["file"] = slashed(plain_path(texts["file"], CaptionConfig.named("file")))
    own |= picture_settings.values if picture_settings else {}
    own["folder"] = str(places.find_folder(folder, ConceptConfig.NODE))
    concept = ConceptConfig(captions=caption_settings.replace(**texts), clips=clip_settings, **own)
    return DatasetConfig(concepts=(*(dataset.concepts if dataset else ()), concept))


def read_captions(**values: Any) -> CaptionConfig:
    """Read Captions."""
    own = fields_of(CaptionConfig, values)
    own["extensions"] = extensions(own["extensions"])
    return OPEN_CAPTIONS.replace(**own)


def read_pictures(**values: Any) -> PicturePart:
    """Read Pictures."""
    own = fields_of(ConceptConfig, values)
    own["resolutions"] = split_resolutions(own["resolutions"])
    ConceptConfig(folder=".", **own)  # checks them
    return PicturePart(own)


def read_clips(**values: Any) -> ClipConfig:
    """Read Clips."""
    return ClipConfig(**fields_of(ClipConfig, values))


def read_masks(places: Places, dataset: DatasetConfig, folder: str, **values: Any) -> DatasetConfig:
    """Read Mask Loader: its masks on every concept that has none yet."""
    from ..data.images import picture_extensions  # imported here, so that ComfyUI starts fast

    own = fields_of(MaskConfig, values)
    # Only files with these endings are fingerprinted, so that an edited mask trains again.
    if wrong := [each for each in own["suffixes"] if Path("a" + each.lower()).suffix not in picture_extensions()]:
        raise ValueError(
            f"The mask suffix is {wrong[0]!r}, which is no picture file; set {setting('masks.suffixes')} "
            f"to one like {MASK_SUFFIX}."
        )
    found = str(places.find_folder(folder, MaskConfig.NODE)) if folder else ""
    masks = MaskConfig(**{**own, "folder": found})
    return DatasetConfig(concepts=tuple(c if c.masks else c.replace(masks=masks) for c in dataset.concepts))


def read_controls(
    places: Places, dataset: DatasetConfig, folder: str, folder_2: str = "", folder_3: str = "", **values: Any
) -> DatasetConfig:
    """Read Control Pictures: its control pictures on every concept that takes them and has none yet."""
    named = [folder, *filter(None, (folder_2, folder_3))]
    found = tuple(
        each.strip() if is_column(each) else str(places.find_folder(each, ControlConfig.NODE)) for each in named
    )
    controls = ControlConfig(folders=found, **values)
    return DatasetConfig(concepts=tuple(concept.with_controls(controls) for concept in dataset.concepts))


def read_augmentation(dataset: DatasetConfig, **values: Any) -> DatasetConfig:
    """Read Augmentation: it on every concept that has none yet; without any variation none is set."""
    augment = AugmentConfig(**values)
    if augment == AugmentConfig(variants=augment.variants):
        return dataset
    return DatasetConfig(concepts=tuple(c if c.augment else c.replace(augment=augment) for c in dataset.concepts))


def read_buckets(bucket_step: int, **values: Any) -> Sizes:
    """Read Buckets."""
    own = fields_of(BucketConfig, values)
    own["resolutions"] = split_resolutions(own["resolutions"])
    return Sizes(BucketConfig(**own), bucket_step)


def extensions(parts: Iterable[str]) -> tuple[str, ...]:
    """Give each file ending its dot."""
    return tuple(part if part.startswith(".") else f".{part}" for part in parts) or (".txt",)


def fields_of(config: type[Config], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Read inputs of a node as fields: a choice with the inputs inside of it, and lists, which are texts there.

    Inputs without a value are left out.
    """
    given: dict[str, Any] = {}
    for name, value in inputs.items():
        given |= value if isinstance(value, Mapping) else {name: value}
    return {
        each.name: _listed(value, each) if each.kind is tuple and isinstance(value, str) else value
        for each in rows_of(config).values()
        if (value := given.get(each.input)) is not None
    }


def _listed(text: str, row: Row) -> tuple[Any, ...]:
    """Split the text of a list: of texts, or of numbers, where 16*9 is nine times 16."""
    if row.item is str:
        return split_list(text)
    from ..networks import parse_numbers  # imported here, so that ComfyUI starts fast

    return parse_numbers(text, row.name, row.item)


def split_list(text: str) -> tuple[str, ...]:
    """Split a list at its commas and line breaks; empty parts are dropped."""
    return tuple(part for part in map(str.strip, re.split("[,\n]", text)) if part)


def split_resolutions(parts: Iterable[str]) -> tuple[str, ...]:
    """Write resolutions plainly; 640 x 384 is understood as 640x384."""
    return tuple("".join(part.lower().split()) for part in parts)


def plain_path(text: str, setting: str) -> str:
    """Strip quotes and blanks around a path that a person typed.

    setting: input and node that hold it, for the message. Raises ValueError for a network address, which is not
    touched, and for what no system takes as a path.
    """
    text = LONG_FORM.sub("", text.strip().strip("\"'").strip())
    if text[:1] in ("/", "\\") and text[1:2] in ("/", "\\"):
        raise ValueError(f"{setting} is a network address; connect it as a drive or a folder, and name that.")
    if len(text) > LONGEST_PATH:
        raise ValueError(f"{setting} has {len(text)} characters; use a path of at most {LONGEST_PATH}.")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{setting} has a character that no path can have; type it again.")
    return text


def slashed(path: str) -> str:
    """Write a path that leads on from a folder with the slashes that every system reads; Windows saves its own."""
    return path if path[:1] in "/~" or PureWindowsPath(path).drive else path.replace("\\", "/")


# --- how it is trained -------------------------------------------------------------------------------------


def read_optimizer(name: Mapping[str, Any], **values: Any) -> OptimizerConfig:
    """Read Optimizer: its own parameters stand beside the learning rates."""
    own = dict(name)
    shared = {key: own.pop(key) for key in ("name", *RATES[:2])}
    return OptimizerConfig(options=own, **shared, **values)


def read_scheduler(**values: Any) -> SchedulerConfig:
    """Read Scheduler; raises ValueError for an invalid curve."""
    from ..optim.schedule import check_curve  # imported here, so that ComfyUI starts fast

    config = SchedulerConfig(**fields_of(SchedulerConfig, values))
    check_curve(config)
    return config


def read_lora(base_model: BaseModelConfig | None = None, **values: Any) -> LoraConfig:
    """Read LoRA Config; its base model is only looked at."""
    return LoraConfig(**fields_of(LoraConfig, values))


def read_existing_lora(
    path: Path | None,
    use: str,
    strength: float,
    lora_config: LoraConfig = OPEN_LORA,
    training_only: bool = False,
) -> LoraConfig:
    """Read Existing LoRA; path: the file that it names, None for none. Raises ValueError for a file that is no LoRA."""
    from ..lora_files.read import outline_lora  # imported here, so that ComfyUI starts fast

    if path is None:
        return lora_config
    outline_lora(path)
    if use == "beneath":
        beneath = BeneathConfig(path=str(path), strength=strength, training_only=training_only)
        return lora_config.replace(beneath=(*lora_config.beneath, beneath))
    if lora_config.start:
        raise ValueError(
            f"{node('existing_lora')} continues {Path(lora_config.start).name} already, and a run continues only one "
            f"LoRA; for {path.name} {put_beneath()}."
        )
    return lora_config.replace(start=str(path))


def read_embedding(lora_config: LoraConfig = OPEN_LORA, **values: Any) -> LoraConfig:
    """Read Embedding: its word after those so far; an empty one changes nothing."""
    fields = fields_of(EmbeddingConfig, values)
    fields |= {name: fields[name].strip() for name in ("token", "init")}
    if not fields["token"]:
        return lora_config
    embedding = EmbeddingConfig(**fields)
    return lora_config.replace(embeddings=(*lora_config.embeddings, embedding))


def read_objective(**values: Any) -> ObjectiveConfig:
    """Read Noise & Loss."""
    settings = fields_of(ObjectiveConfig, values)
    if settings.get("weighting", "min_snr") not in MIN_SNR:
        settings.pop("min_snr_gamma", None)
    return ObjectiveConfig(**settings)


def read_saves(file_name: str, sample_prompts: str, save_dtype: str, log: str, **values: Any) -> Outputs:
    """Read Saves & Samples."""
    prompts = tuple(line.text for line in parse_prompts(sample_prompts, setting("sample.prompts")))
    sample = fields_of(SampleConfig, values) | {"prompts": prompts}
    saves = SavesConfig(**fields_of(SavesConfig, values) | split_name(file_name))
    return Outputs(saves, Outputs().sample.replace(**sample), save_dtype, log)


def split_name(file_name: str) -> dict[str, Any]:
    """Split a path into folder and name, as SavesConfig has them."""
    folder, slash, name = file_name.strip().replace("\\", "/").rpartition("/")
    return {"folder": folder or slash, "file_name": name}


# --- the run -----------------------------------------------------------------------------------------------


def read_plan(sizes: Sizes | None, **values: Any) -> TrainConfig:
    """Build the configuration that the plan of a run follows; a setting of 0 is open."""
    sizes = sizes or Sizes()
    return OPEN_TRAIN.replace(buckets=sizes.buckets, bucket_step=sizes.bucket_step, **values)


def read_existing(on_existing: Mapping[str, Any]) -> ExistingConfig:
    """Build the configuration of on_existing and its fields; old prompts have none."""
    given = {name: value for name, value in on_existing.items() if value is not None}
    chosen = fields_of(ExistingConfig, given)
    if "fork_run" in chosen:
        chosen["fork_run"] = chosen["fork_run"].strip()
    return ExistingConfig(**chosen)


def read_train(
    base_model: BaseModelConfig,
    dataset: DatasetConfig,
    on_existing: Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig = OPEN_OPTIMIZER,
    scheduler: SchedulerConfig | None = None,
    lora_config: LoraConfig = OPEN_LORA,
    objective: ObjectiveConfig | None = None,
    buckets: Sizes | None = None,
    memory: MemoryConfig | None = None,
    saves: Outputs | None = None,
    **values: Any,
) -> RunConfig:
    """Read Train LoRA, but for its name and its outputs: the configuration of the whole run.

    values: fields of TrainConfig, and what nodes of PARTS set.
    """
    outputs, given = saves or Outputs(), {}
    for name, value in values.items():
        given |= value.values if isinstance(value, TrainPart) else {} if name in PART_INPUTS else {name: value}
    return RunConfig(
        base_model=base_model,
        dataset=dataset,
        lora=lora_config,
        optimizer=optimizer,
        scheduler=scheduler or SchedulerConfig(),
        objective=objective or ObjectiveConfig(),
        train=read_plan(buckets, save_dtype=outputs.save_dtype, log=outputs.log, **given),
        memory=memory or MemoryConfig(),
        sample=outputs.sample,
        saves=outputs.saves,
        existing=read_existing(on_existing or {}),
    )


def read_file(places: Places, lora_name: str, **values: Any) -> LoraConfig:
    """Read an Existing LoRA that names a file."""
    path = None if lora_name == NONE else places.file_path("loras", lora_name, setting("existing_lora.lora_name"))
    return read_existing_lora(path, **values)


# By node: places and inputs -> what its socket carries.
READERS: dict[str, Callable[..., Any]] = {
    "AtelierLoadBaseModel": read_base_model,
    "AtelierConceptDataset": read_concept,
    "AtelierCaptions": lambda _, **inputs: read_captions(**inputs),
    "AtelierPictures": lambda _, **inputs: read_pictures(**inputs),
    "AtelierClips": lambda _, **inputs: read_clips(**inputs),
    "AtelierMaskLoader": read_masks,
    "AtelierControlPictures": read_controls,
    "AtelierExistingLora": read_file,
    "AtelierAugment": lambda _, **inputs: read_augmentation(**inputs),
    "AtelierBuckets": lambda _, **inputs: read_buckets(**inputs),
    "AtelierOptimizer": lambda _, **inputs: read_optimizer(**inputs),
    "AtelierScheduler": lambda _, **inputs: read_scheduler(**inputs),
    "AtelierLoraConfig": lambda _, **inputs: read_lora(**inputs),
    "AtelierEmbedding": lambda _, **inputs: read_embedding(**inputs),
    "AtelierObjective": lambda _, **inputs: read_objective(**inputs),
    "AtelierMemory": lambda _, **inputs: MemoryConfig(**inputs),
    "AtelierSaves": lambda _, **inputs: read_saves(**inputs),
}
READERS |= {node: lambda _, **inputs: TrainPart(inputs) for node in PARTS}
