"""The node API and our socket types. The one module that imports `comfy_api`."""

from collections.abc import Callable

from comfy_api.latest import ComfyExtension, io, ui

CATEGORY = "training/lora"

# Our sockets carry frozen configuration objects, never live models.
BaseModelSocket = io.Custom("ATELIER_BASE_MODEL")  # BaseModelConfig
DatasetSocket = io.Custom("ATELIER_DATASET")  # DatasetConfig
OptimizerSocket = io.Custom("ATELIER_OPTIMIZER")  # OptimizerConfig
SchedulerSocket = io.Custom("ATELIER_SCHEDULER")  # SchedulerConfig
LoraConfigSocket = io.Custom("ATELIER_LORA_CONFIG")  # LoraConfig
BucketsSocket = io.Custom("ATELIER_BUCKETS")  # BucketConfig
MemorySocket = io.Custom("ATELIER_MEMORY")  # MemoryConfig
ObjectiveSocket = io.Custom("ATELIER_OBJECTIVE")  # ObjectiveConfig
SavesSocket = io.Custom("ATELIER_SAVES")  # SavesConfig


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
    "BaseModelSocket",
    "BucketsSocket",
    "ComfyExtension",
    "DatasetSocket",
    "LoraConfigSocket",
    "MemorySocket",
    "ObjectiveSocket",
    "OptimizerSocket",
    "SavesSocket",
    "SchedulerSocket",
    "complaint",
    "io",
    "ui",
]
