"""Use Connected Model: train on the MODEL, CLIP and VAE that are wired in."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from ..trainer_core.config import BaseModelConfig, ConnectedConfig
from ..trainer_core.models import Chosen
from .node import Node
from .schema import schema
from .sockets import BaseModelSocket, io, ui


class AtelierConnectModel(Node):
    """Train on any model of pictures that ComfyUI has loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierConnectModel",
            "The LoRA is trained on the MODEL, CLIP and VAE that are linked here, whatever loaded them "
            "and in whatever precision: Flux, Z-Image, Qwen-Image, Wan, Chroma, Stable Diffusion 3 and others. A LoRA "
            "that Load LoRA puts on the MODEL before this node stays beneath the new one.",
            ["flux", "z-image", "qwen", "wan", "chroma", "sd3", "train lora", "base model", "atelier"],
            [BaseModelSocket.Output(display_name="BASE_MODEL", tooltip="The model to train on, for Train LoRA.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        guidance: float = -1.0,
        sample_model: Any = None,
        prompt_weights: bool = False,
        train_distilled: bool = False,
        edit_text: Literal["plus", "single"] = "plus",
        noise_range: Literal["all", "high", "low"] = "all",
        boundary: float = 0.0,
        model_high: Any = None,
        switch_every: int = 0,
        clip_vision: Any = None,
    ) -> io.NodeOutput:
        """Check the models, and describe what was found."""
        from .comfyui.connected.architecture import describe, name_of
        from .comfyui.connected.check import check_connected, check_distilled, check_partner, check_vision
        from .comfyui.connected.experts import check_experts
        from .comfyui.connected.live import LinkedModels
        from .comfyui.connected.model import ConnectedSource

        check_connected(model, clip, vae)
        check_partner(sample_model, model)
        check_vision(clip_vision, model)
        check_distilled(model, confirmed=train_distilled)
        if model_high is not None:
            check_connected(model_high, clip, vae)
            check_distilled(model_high, confirmed=train_distilled)
        check_experts(model_high, model, sample_model)
        # As long as ComfyUI's cache keeps the output.
        live = LinkedModels(model, clip, vae, sample_model, model_high, clip_vision)
        connected = ConnectedConfig(
            guidance=guidance,
            edit_text=edit_text,
            noise_range=noise_range,
            boundary=boundary,
            switch_every=switch_every,
        )
        config = BaseModelConfig(path=name_of(model), connected=connected, prompt_weights=prompt_weights)
        chosen = Chosen(config, partial(ConnectedSource, live=live))
        said = describe(model, connected, clip, sample_model, model_high, clip_vision)
        return io.NodeOutput(chosen, ui=ui.PreviewText("\n".join(said)))
