"""The nodes: each is a schema, an unpacking, one core call and a return."""

from .base_model import AtelierLoadBaseModel
from .bridge import register_assets
from .dataset import AtelierConceptDataset
from .embedding import AtelierEmbedding
from .existing import AtelierExistingLora
from .images import AtelierImageConcept
from .lora_config import AtelierLoraConfig
from .masks import AtelierMaskLoader
from .memory import AtelierMemory
from .objective import AtelierObjective
from .optimizer import AtelierOptimizer
from .preview import AtelierDatasetPreview
from .resize import AtelierResizeLora
from .routes import register_routes
from .sample import AtelierSample
from .saves import AtelierSaves
from .scheduler import AtelierScheduler
from .sockets import ComfyExtension, io
from .tiny import register_tiny_model
from .train import AtelierTrain
from .variation import AtelierAugment, AtelierBuckets

NODES: list[type[io.ComfyNode]] = [
    AtelierLoadBaseModel,
    AtelierConceptDataset,
    AtelierMaskLoader,
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
]


class AtelierExtension(ComfyExtension):
    """What ComfyUI loads."""

    async def on_load(self) -> None:
        """Make the shipped tiny base model known to ComfyUI's loader and its list of checkpoints; add our routes."""
        register_tiny_model()
        register_assets()
        register_routes()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes."""
        return NODES


async def comfy_entrypoint() -> AtelierExtension:
    """Return the extension, as ComfyUI asks for it."""
    return AtelierExtension()
