"""The nodes of the base model and the pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..clips import ClipConfig
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
BUCKETS, SHAPES = tuple(rows_of(BucketConfig).values()), rows_of(BucketConfig)["shapes"]
PICTURES = "Pictures"  # the title of the node that sets how the pictures of a concept are read
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
    yield CONNECTED["noise_range"]
    yield CONNECTED["boundary"]
    yield linked(
        "model_high",
        "MODEL",
        "The high-noise expert of a model of two files, as Wan 2.2 14B; model is then the low-noise one. Both are "
        "trained in one run, and each gets a LoRA file of its own. Unlinked: model is trained alone.",
        True,
    )
    yield CONNECTED["switch_every"]
    yield linked(
        "clip_vision",
        "CLIP_VISION",
        "For Wan 2.1 and HunyuanVideo 1.5 of image to video, from Load CLIP Vision. Training and samples then see a "
        "clip's first and last frame through it, too. Unlinked: through the VAE alone.",
        True,
    )


def _concept() -> Iterable[Row]:
    """List the inputs of Concept Dataset: what most people set."""
    yield CONCEPT["folder"]
    yield from map(CAPTIONS.__getitem__, ("prefix", "source", "file"))
    yield from map(CONCEPT.__getitem__, ("repeats", "role", "leave_out"))
    yield linked("dataset", "ATELIER_DATASET", "Other concepts to train together with this one.", True)
    yield linked("caption_settings", "ATELIER_CAPTIONS", "Optional, from Captions: tags, dropout, files.", True)
    yield linked("picture_settings", "ATELIER_PICTURES", "Optional, from Pictures: mirroring, sizes, weights.", True)
    yield linked("clip_settings", "ATELIER_CLIPS", "Optional, from Clips: which frames of clips are trained.", True)


def _captions() -> Iterable[Row]:
    """List the inputs of Captions: the rows of captions that Concept Dataset has not."""
    yield from (each for each in CAPTIONS.values() if not each.node)


def _pictures() -> Iterable[Row]:
    """List the inputs of Pictures."""
    yield from (each for each in CONCEPT.values() if each.node == PICTURES)


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
    "AtelierCaptions": form("Captions", _captions(), "CAPTIONS"),
    "AtelierPictures": form(PICTURES, _pictures(), "PICTURES"),
    "AtelierClips": form("Clips", rows_of(ClipConfig).values(), "CLIPS"),
    "AtelierMaskLoader": form("Mask Loader", _masks(), "DATASET"),
    "AtelierControlPictures": form("Control Pictures", _controls(), "DATASET"),
    "AtelierAugment": form("Augmentation", _augment(), "DATASET"),
    "AtelierBuckets": form(
        "Buckets",
        (
            *BUCKETS[: BUCKETS.index(SHAPES)],
            rows_of(TrainConfig)["bucket_step"],
            *BUCKETS[BUCKETS.index(SHAPES) :],  # a new row stands at the end
        ),
        "BUCKETS",
    ),
    "AtelierMemory": form("Memory", rows_of(MemoryConfig).values(), "MEMORY"),
}
