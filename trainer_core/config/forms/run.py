"""The nodes of the objective, and of the run itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..objective import ObjectiveConfig
from ..rows import Row, arranged, rows_of
from ..run import TrainConfig
from ..sample import SampleConfig
from ..saves import ExistingConfig, SavesConfig
from .form import Form, form, linked, own

TRAIN, SAVES, SAMPLE = rows_of(TrainConfig), rows_of(SavesConfig), rows_of(SampleConfig)


def _objective() -> Iterable[Row]:
    """Put the two settings of pyramid noise behind a switch."""
    for each in rows_of(ObjectiveConfig).values():
        if each.name == "pyramid_iterations":
            yield own(
                "pyramid_noise",
                "off",
                "Adds noise of coarser and coarser patches, which changes the brightness of whole areas "
                "(multi-resolution noise). off (default), or on for contrast instead of a noise offset.",
                choices=("off", "on"),
                advanced=True,
                optional=True,
            )
            yield replace(each, default=6, low=1)  # usual, once it is on
        else:
            yield each


def _saves() -> Iterable[Row]:
    """Put the samples after the saves, and the file at the end; a new setting gets its place here."""
    yield from map(SAVES.__getitem__, ("save_every", "save_unit", "keep_last", "keep_every", "publish"))
    yield SAMPLE["prompts"]
    yield from map(SAVES.__getitem__, ("sample_every", "sample_unit"))
    yield from map(SAMPLE.__getitem__, ("negative", "width", "height", "steps", "cfg", "seed"))
    # Folder and name in one, so that what cannot be is refused in one sentence.
    yield replace(SAVES["file_name"], default="atelier/{name}")
    yield from (SAVES["overwrite"], TRAIN["save_dtype"], TRAIN["log"], SAVES["sample_at_start"])
    yield from (SAMPLE["sampler"], SAMPLE["scheduler"], SAMPLE["frames"])


BUCKETS = linked("buckets", "ATELIER_BUCKETS", "Optional, from Buckets: more resolutions, fixed sizes, limits.", True)


def _train() -> Iterable[Row]:
    """List the inputs of Train LoRA; new ones come at the end."""
    yield linked(
        "base_model", "ATELIER_BASE_MODEL", "The model to train on, from Load Base Model or Use Connected Model."
    )
    yield linked(
        "dataset", "ATELIER_DATASET", "The pictures, from Concept Dataset, Concept from Images or Mask Loader."
    )
    yield own(
        "name",
        "my_lora",
        "File name of the LoRA, without a folder: letters, digits, space and - _ . ( ). The file is "
        "models/loras/atelier/<name>.safetensors; a name in use gets a number.",
    )
    yield from map(TRAIN.__getitem__, ("steps", "epochs", "batch_size", "resolution", "seed"))
    yield from rows_of(ExistingConfig).values()
    yield linked(
        "optimizer",
        "ATELIER_OPTIMIZER",
        "Optional, from Optimizer. Not linked = AdamW, at the learning rate that suits the model.",
        True,
    )
    yield linked(
        "scheduler",
        "ATELIER_SCHEDULER",
        "Optional, from Scheduler: the learning rate's curve. Not linked = cosine.",
        True,
    )
    yield linked(
        "lora_config",
        "ATELIER_LORA_CONFIG",
        "Optional, from LoRA Config: algorithm, size and layers. Not linked = a LoRA of the rank that suits the "
        "model, in attention and the layers between.",
        True,
    )
    yield linked(
        "objective",
        "ATELIER_OBJECTIVE",
        "Optional, from Noise & Loss: noise, timesteps, loss and weighting. Not linked = as the model's family is "
        "trained.",
        True,
    )
    yield BUCKETS
    yield linked(
        "memory",
        "ATELIER_MEMORY",
        "Optional, from Memory: fixes how to trade speed for memory. Not linked = the fastest that fits.",
        True,
    )
    yield linked(
        "saves",
        "ATELIER_SAVES",
        "Optional, from Saves & Samples: sample pictures, how often the run is saved, and where the LoRA goes. Not "
        "linked = saved every 5 minutes, as models/loras/atelier/<name>.safetensors, without samples.",
        True,
    )
    yield linked(
        "validation",
        "ATELIER_VALIDATION",
        "Optional, from Validation: how often the validation loss is measured, and early stopping.",
        True,
    )
    yield linked(
        "model",
        "MODEL",
        "Optional: the model that carries the LoRA in the output MODEL, also a relative of the base model or one with "
        "other LoRAs. Not linked = the base model, with the LoRAs beneath. It does not affect training.",
        True,
    )
    yield linked(
        "clip",
        "CLIP",
        "Optional: the text encoder that carries the LoRA in the output CLIP. Not linked = the base model's, with the "
        "LoRAs beneath.",
        True,
    )
    yield TRAIN["accumulate"]
    yield own(
        "strength",
        1.0,
        "How strongly the outputs MODEL and CLIP apply the LoRA, -10 to 10; the file is not affected. To try "
        "several without training again, link LORA to Load LoRA Model.",
        span=(-10, 10, 0.05),
        round=0.001,
        advanced=True,
        optional=True,
    )


def _preview() -> Iterable[Row]:
    """List the inputs of Dataset Preview: what decides the plan of a run, and the sheet."""
    yield linked("dataset", "ATELIER_DATASET", "The dataset to show.")
    yield from map(TRAIN.__getitem__, ("batch_size", "resolution", "seed"))
    yield own(
        "epoch",
        0,
        "Which epoch to show: its captions, crops and mirroring; 0 = the first.",
        span=(0, TRAIN["epochs"].high),
    )
    yield own("columns", 4, "Pictures side by side on the sheet.", span=(1, 16))
    yield own("limit", 24, "The most pictures on the sheet.", span=(1, 500))
    yield linked(
        "base_model",
        "ATELIER_BASE_MODEL",
        "The model of Train LoRA, for its resolution and caption length. Not linked: set resolution.",
        True,
    )
    yield BUCKETS
    yield TRAIN["accumulate"]
    yield linked(
        "validation",
        "ATELIER_VALIDATION",
        "Optional, from Validation: shows which pictures its validation_share holds out.",
        True,
    )
    yield linked(
        "clip_vision",
        "CLIP_VISION",
        "Optional, of Load CLIP Vision, with clip_of_vision: measures how alike each caption is to its picture. The "
        "report names the worst first.",
        True,
    )
    yield linked("clip_of_vision", "CLIP", "For clip_vision: the text encoder of the same CLIP, of Load CLIP.", True)


def _part(title: str) -> Form:
    """Make a node of the fields of TrainConfig whose rows name it."""
    return form(title, [each for each in TRAIN.values() if each.node == title], title.upper())


# Nodes that set nothing but fields of TrainConfig. Train LoRA has an input for each, named as the node.
PARTS: dict[str, Form] = {"AtelierValidation": _part("Validation")}

FORMS: dict[str, Form] = {
    **PARTS,
    "AtelierObjective": form("Noise & Loss", _objective(), "OBJECTIVE"),
    "AtelierSaves": form("Saves & Samples", _saves(), "SAVES"),
    "AtelierTrain": Form(
        "Train LoRA",
        arranged(_train()),
        (
            *(("MODEL", "MODEL"), ("CLIP", "CLIP"), ("LORA", "LORA_MODEL"), ("LOSS_MAP", "LOSS_MAP")),
            *(("SAMPLES", "IMAGE"), ("LORA_PATH", "STRING"), ("LOSS_PLOT", "IMAGE"), ("MODEL_HIGH", "MODEL")),
        ),
    ),
    "AtelierDatasetPreview": Form(
        "Dataset Preview", arranged(_preview()), (("SHEET", "IMAGE"), ("REPORT", "STRING"), ("MANIFEST", "STRING"))
    ),
}
