"""The nodes: each is a schema, an unpacking, one core call and a return.

The inputs of a node that sets a run are rows of `trainer_core/config/`, in the order of `config/forms/`. A new one has
its rows in `config/run.py`, its form and Train LoRA's input in `config/forms/run.py`, and a module here. Settings that
are a class of their own also need `config/__init__.py`, `sockets.py`, and `settings.py` and `write.py` of `workflow/`.
"""

from .average import AtelierAverageSaves
from .base_model import AtelierLoadBaseModel
from .captions import AtelierCaptions
from .clips import AtelierClips
from .comfyui import failures, shown
from .comfyui.folders import accept_other_slashes, register_assets
from .comfyui.tiny import register_tiny_model
from .compare import AtelierCompareLoras
from .connect_model import AtelierConnectModel
from .controls import AtelierControlPictures
from .convert import AtelierConvertLora
from .dataset import AtelierConceptDataset
from .dataset_routes import register_dataset_routes
from .drawn import AtelierDrawnPictures
from .embedding import AtelierEmbedding
from .existing import AtelierExistingLora
from .extract import AtelierExtractLora
from .images import AtelierImageConcept
from .importing import register_import
from .inspect_lora import AtelierInspectLora
from .instruction import AtelierCaptionInstruction
from .load_lora import AtelierLoadLoraFile
from .lora_blocks import AtelierLoraBlocks
from .lora_config import AtelierLoraConfig
from .masks import AtelierMaskLoader
from .memory import AtelierMemory
from .merge import AtelierMergeLoras
from .objective import AtelierObjective
from .optimizer import AtelierOptimizer
from .outward_routes import register_outward_routes
from .picture_routes import register_picture_routes
from .pictures import AtelierPictures
from .preview import AtelierDatasetPreview
from .queue_routes import register_queue_routes
from .resize import AtelierResizeLora
from .routes import register_routes
from .run_routes import register_run_routes
from .sample import AtelierSample
from .save_lora import AtelierSaveLoraFile
from .saves import AtelierSaves
from .scheduler import AtelierScheduler
from .sockets import ComfyExtension, io
from .sweep import AtelierSweep, AtelierSweepResults
from .train import AtelierTrain
from .validation import AtelierValidation
from .variation import AtelierAugment, AtelierBuckets
from .writing import INNER, AtelierDatasetPictures, AtelierWriteCaptions, AtelierWriteMasks

NODES: list[type[io.ComfyNode]] = [
    AtelierLoadBaseModel,
    AtelierConnectModel,
    AtelierConceptDataset,
    AtelierCaptions,
    AtelierPictures,
    AtelierMaskLoader,
    AtelierControlPictures,
    AtelierOptimizer,
    AtelierScheduler,
    AtelierLoraConfig,
    AtelierObjective,
    AtelierTrain,
    AtelierSample,
    AtelierResizeLora,
    AtelierDatasetPreview,
    AtelierImageConcept,
    AtelierAugment,
    AtelierBuckets,
    AtelierMemory,
    AtelierExistingLora,
    AtelierEmbedding,
    AtelierSaves,
    AtelierValidation,
    AtelierLoadLoraFile,
    AtelierSaveLoraFile,
    AtelierInspectLora,
    AtelierMergeLoras,
    AtelierLoraBlocks,
    AtelierAverageSaves,
    AtelierConvertLora,
    AtelierExtractLora,
    AtelierCompareLoras,
    AtelierSweep,
    AtelierSweepResults,
    AtelierDrawnPictures,
    AtelierDatasetPictures,
    AtelierWriteCaptions,
    AtelierWriteMasks,
    AtelierCaptionInstruction,
    AtelierClips,
]


class AtelierExtension(ComfyExtension):
    """The extension that ComfyUI loads."""

    async def on_load(self) -> None:
        """Register the tiny base model and our routes with ComfyUI."""
        register_tiny_model()
        register_assets()
        register_routes(NODES)
        register_run_routes()
        register_picture_routes()
        register_dataset_routes()
        register_outward_routes()
        register_queue_routes()
        register_import()
        accept_other_slashes()
        failures.follow_prompts()
        shown.follow_prompts()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """List the node classes."""
        return [*NODES, *INNER]
