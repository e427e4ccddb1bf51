"""The node API and our socket types. The one module that imports `comfy_api`."""

from collections.abc import Callable

from comfy_api.latest import ComfyExtension, io, ui

from ..trainer_core.workflow.settings import Outputs, Sizes, Validation

CATEGORY = "training/lora"
SUFFIX = " (Atelier)"  # of names in the editor: ComfyUI has nodes of the same names, such as Train LoRA

# Our sockets carry frozen configuration objects, never live models.
BaseModelSocket = io.Custom("ATELIER_BASE_MODEL")  # models.Chosen
DatasetSocket = io.Custom("ATELIER_DATASET")  # DatasetConfig
OptimizerSocket = io.Custom("ATELIER_OPTIMIZER")  # OptimizerConfig
SchedulerSocket = io.Custom("ATELIER_SCHEDULER")  # SchedulerConfig
LoraConfigSocket = io.Custom("ATELIER_LORA_CONFIG")  # LoraConfig
BucketsSocket = io.Custom("ATELIER_BUCKETS")  # Sizes
MemorySocket = io.Custom("ATELIER_MEMORY")  # MemoryConfig
ObjectiveSocket = io.Custom("ATELIER_OBJECTIVE")  # ObjectiveConfig
SavesSocket = io.Custom("ATELIER_SAVES")  # Outputs
ValidationSocket = io.Custom("ATELIER_VALIDATION")  # Validation


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
    "SavesSocket",
    "SchedulerSocket",
    "Sizes",
    "Validation",
    "ValidationSocket",
    "complaint",
    "io",
    "titled",
    "ui",
]
