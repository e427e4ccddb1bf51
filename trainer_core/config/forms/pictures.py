"""The nodes of the base model and the pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..dataset import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    MaskConfig,
)
from ..model import BaseModelConfig, ConnectedConfig, MemoryConfig
from ..rows import Row, arranged, rows_of
from ..run import TrainConfig
from .form import Form, form, linked, own

BASE, CONNECTED = rows_of(BaseModelConfig), rows_of(ConnectedConfig)
CONCEPT, CAPTIONS, CONTROLS = rows_of(ConceptConfig), rows_of(CaptionConfig), rows_of(ControlConfig)


def _connected() -> Iterable[Row]:
    """List the inputs of Use Connected Model."""
    yield linked("model", "MODEL", "The diffusion model, as KSampler would use it.")
    yield linked("clip", "CLIP", "Its text encoder, as CLIP Text Encode would use it.")
    yield linked("vae", "VAE", "Its VAE, as VAE Encode would use it.")
    yield CONNECTED["guidance"]
    yield linked(
        "sample_model",
        "MODEL",
        "Draws the samples during training, with the LoRA on it: a distilled partner of model, or model with a LoRA"
        " of few steps. Set the samples' steps and cfg to suit it. Unlinked: model draws.",
        True,
    )
    yield BASE["prompt_weights"]
    yield own(
        "train_distilled",
        False,
        "Train on a model that was distilled to a few steps (schnell, turbo, lightning). It forgets its few steps "
        "by that; a LoRA of its undistilled base usually works on it, too.",
        advanced=True,
        optional=True,
    )
    yield CONNECTED["edit_text"]


def _concept() -> Iterable[Row]:
    """List the inputs of Concept Dataset: the concept and its captions; new ones come at the end."""
    yield CONCEPT["folder"]
    yield from map(CAPTIONS.__getitem__, ("prefix", "source"))
    yield from map(CONCEPT.__getitem__, ("repeats", "flip"))
    yield from map(
        CAPTIONS.__getitem__, ("shuffle", "keep", "tag_dropout", "dropout", "suffix", "extensions", "missing")
    )
    yield from map(CONCEPT.__getitem__, ("loss_weight", "recursive"))
    yield linked(
        "dataset", "ATELIER_DATASET", "Another Concept Dataset (or Mask Loader) to train together with this one.", True
    )
    yield CONCEPT["role"]
    yield own("enabled", True, "Off: this concept is not used, as if the node were not there.", optional=True)
    yield from map(CONCEPT.__getitem__, ("resolutions", "samples", "folder_repeats"))
    yield from map(
        CAPTIONS.__getitem__, ("file", "lines", "encoding", "wildcards", "separator", "tag_dropout_mode", "protected")
    )
    yield from map(CONCEPT.__getitem__, ("background", "on_problem", "min_side"))
    yield from map(
        CAPTIONS.__getitem__,
        ("variants", "class_prompt", "tag_warmup_steps", "tag_warmup_min", "dropout_every_n_epochs"),
    )
    yield CONCEPT["leave_out"]


def _controls() -> Iterable[Row]:
    """List the inputs of Control Pictures; a folder for each control picture of a picture."""
    yield linked("dataset", "ATELIER_DATASET", "The concepts that get control pictures.")
    first = replace(CONTROLS["folders"], kind=str, default="")
    yield first
    for number, which in ((2, "second"), (3, "third")):
        yield own(
            f"folder_{number}",
            "",
            f"The folder of a {which} control picture of each picture. Empty = none.",
            socketless=True,
            optional=True,
        )
    yield from map(CONTROLS.__getitem__, ("fit", "use"))


def _masks() -> Iterable[Row]:
    """List the inputs of Mask Loader."""
    yield linked("dataset", "ATELIER_DATASET", "The concepts that get masks.")
    yield from rows_of(MaskConfig).values()


def _augment() -> Iterable[Row]:
    """List the inputs of Augmentation."""
    yield linked("dataset", "ATELIER_DATASET", "The concepts that vary.")
    yield from rows_of(AugmentConfig).values()


FORMS: dict[str, Form] = {
    "AtelierLoadBaseModel": Form(
        "Load Base Model",
        arranged(BASE.values()),
        (("BASE_MODEL", "ATELIER_BASE_MODEL"), ("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")),
    ),
    "AtelierConnectModel": form("Use Connected Model", _connected(), "BASE_MODEL"),
    "AtelierConceptDataset": form("Concept Dataset", _concept(), "DATASET"),
    "AtelierMaskLoader": form("Mask Loader", _masks(), "DATASET"),
    "AtelierControlPictures": form("Control Pictures", _controls(), "DATASET"),
    "AtelierAugment": form("Augmentation", _augment(), "DATASET"),
    "AtelierBuckets": form(
        "Buckets", (*rows_of(BucketConfig).values(), rows_of(TrainConfig)["bucket_step"]), "BUCKETS"
    ),
    "AtelierMemory": form("Memory", rows_of(MemoryConfig).values(), "MEMORY"),
}
