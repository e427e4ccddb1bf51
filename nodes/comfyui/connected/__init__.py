"""Any MODEL, CLIP and VAE that ComfyUI has loaded, behind the core's model protocol.

live: which models a configuration means · check: refusals · model: the protocol · denoiser: raw predictions · text
and vae: what is encoded through CLIP and VAE · noise: levels and kind of prediction, read from the MODEL's sampling ·
family: a row of data for each architecture · layers: what can be trained · names: in LoRA files · gradients: what is
in their way, and is put back · tried: what an architecture in no list does with them · frozen: weights in any
precision, of which nothing is kept · identity: hashes of models without files · sampling: samples by ComfyUI's own
sampler
"""

from ....trainer_core import models
from ....trainer_core.config import BaseModelConfig
from ....trainer_core.models import Source


def register_connected_models() -> None:
    """Tell the core how a configuration of connected models finds them."""
    models.connected_source = _source


def _source(config: BaseModelConfig) -> Source:
    from .live import live_of  # here, so that ComfyUI starts fast
    from .model import ConnectedSource

    return ConnectedSource(config, live_of(config))
