"""The node API and our socket types. The one module that imports `comfy_api`."""

from collections.abc import Callable

from comfy_api.latest import ComfyExtension, io, ui

from ..trainer_core.config import (
    CaptionConfig,
    ClipConfig,
    DatasetConfig,
    LoraConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from ..trainer_core.config.forms.run import PARTS
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.settings import Outputs, PicturePart, Sizes, TrainPart

CATEGORY = "training/lora"
SUFFIX = " (Atelier)"  # of names in the editor: ComfyUI has nodes of the same names, such as Train LoRA

BaseModelSocket = io.Custom("ATELIER_BASE_MODEL")
DatasetSocket = io.Custom("ATELIER_DATASET")
OptimizerSocket = io.Custom("ATELIER_OPTIMIZER")
SchedulerSocket = io.Custom("ATELIER_SCHEDULER")
LoraConfigSocket = io.Custom("ATELIER_LORA_CONFIG")
BucketsSocket = io.Custom("ATELIER_BUCKETS")
MemorySocket = io.Custom("ATELIER_MEMORY")
ObjectiveSocket = io.Custom("ATELIER_OBJECTIVE")
SavesSocket = io.Custom("ATELIER_SAVES")

# What our sockets carry, and the node that one links. Only a linked MODEL's Chosen holds live models.
CONTENTS: dict[str, tuple[type, str]] = {
    "ATELIER_BASE_MODEL": (Chosen, "Load Base Model"),
    "ATELIER_DATASET": (DatasetConfig, "Concept Dataset"),
    "ATELIER_CAPTIONS": (CaptionConfig, "Captions"),
    "ATELIER_PICTURES": (PicturePart, "Pictures"),
    "ATELIER_CLIPS": (ClipConfig, "Clips"),
    "ATELIER_OPTIMIZER": (OptimizerConfig, "Optimizer"),
    "ATELIER_SCHEDULER": (SchedulerConfig, "Scheduler"),
    "ATELIER_LORA_CONFIG": (LoraConfig, "LoRA Config"),
    "ATELIER_BUCKETS": (Sizes, "Buckets"),
    "ATELIER_MEMORY": (MemoryConfig, "Memory"),
    "ATELIER_OBJECTIVE": (ObjectiveConfig, "Noise & Loss"),
    "ATELIER_SAVES": (Outputs, "Saves & Samples"),
    **{kind: (TrainPart, part.title) for part in PARTS.values() for _, kind in part.outputs},
}


def titled(name: str) -> str:
    """Write a node's name as the editor shows it; messages and pages leave the suffix out."""
    return name + SUFFIX


def complaint(text: object, check: Callable[[str], object]) -> bool | str:
    """Check a text for validate_inputs: True, or the sentence of the ValueError that `check` raises.

    Anything else passes: a linked text is not known yet (None), and ComfyUI itself refuses all that is no text.
    """
    try:
        if isinstance(text, str):
            check(text)
    except ValueError as error:
        return str(error)
    return True


__all__ = [
    "CATEGORY",
    "CONTENTS",
    "SUFFIX",
    "BaseModelSocket",
    "BucketsSocket",
    "ComfyExtension",
    "DatasetSocket",
    "LoraConfigSocket",
    "MemorySocket",
    "ObjectiveSocket",
    "OptimizerSocket",
    "Outputs",
    "PicturePart",
    "SavesSocket",
    "SchedulerSocket",
    "Sizes",
    "TrainPart",
    "complaint",
    "io",
    "titled",
    "ui",
]
