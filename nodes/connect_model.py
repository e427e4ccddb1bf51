"""Use Connected Model: train on the MODEL, CLIP and VAE that are wired in."""

from __future__ import annotations

from typing import Any, Literal

from ..trainer_core.config import BaseModelConfig, ConnectedConfig
from .base_model import prompt_weights_input
from .node import Node
from .sockets import CATEGORY, BaseModelSocket, io, titled, ui


class AtelierConnectModel(Node):
    """Train on any model of pictures that ComfyUI has loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierConnectModel",
            display_name=titled("Use Connected Model"),
            category=CATEGORY,
            description="The LoRA is trained on the MODEL, CLIP and VAE that are linked here, whatever loaded them "
            "and in whatever precision: Flux, Z-Image, Qwen-Image, Wan, Chroma, Stable Diffusion 3 and others. A LoRA "
            "that Load LoRA puts on the MODEL before this node stays beneath the new one.",
            search_aliases=["flux", "z-image", "qwen", "wan", "chroma", "sd3", "train lora", "base model", "atelier"],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model, as KSampler would use it."),
                io.Clip.Input("clip", tooltip="Its text encoder, as CLIP Text Encode would use it."),
                io.Vae.Input("vae", tooltip="Its VAE, as VAE Encode would use it."),
                io.Float.Input(
                    "guidance",
                    default=-1.0,
                    min=-1.0,
                    max=100.0,
                    step=0.1,
                    optional=True,
                    tooltip="Distilled guidance that training gives the model, for models that take one "
                    "(Flux.1 dev: 1). -1: as the model's family is trained.",
                    advanced=True,
                ),
                io.Model.Input(
                    "sample_model",
                    optional=True,
                    tooltip="Draws the samples during training, with the LoRA on it: a distilled partner of model, or "
                    "model with a LoRA of few steps. Set the samples' steps and cfg to suit it. Unlinked: model draws.",
                ),
                prompt_weights_input(),
                io.Boolean.Input(
                    "train_distilled",
                    default=False,
                    optional=True,
                    tooltip="Train on a model that was distilled to a few steps (schnell, turbo, lightning). It "
                    "forgets its few steps by that; a LoRA of its undistilled base usually works on it, too.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "edit_text",
                    options=["plus", "single"],
                    default="plus",
                    optional=True,
                    tooltip="For Qwen-Image-Edit with Control Pictures: how its text encoder sees them. plus: as "
                    "TextEncodeQwenImageEditPlus, for the models 2509 and 2511. single: as TextEncodeQwenImageEdit, "
                    "for the first model, with one control picture.",
                    advanced=True,
                ),
            ],
            outputs=[
                BaseModelSocket.Output(display_name="BASE_MODEL", tooltip="The model to train on, for Train LoRA.")
            ],
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
    ) -> io.NodeOutput:
        """Check the models, and describe what was found."""
        from .comfyui.connected.check import check_connected, check_distilled, check_partner
        from .comfyui.connected.family import describe, name_of
        from .comfyui.connected.live import Live, key_of

        check_connected(model, clip, vae)
        check_partner(sample_model, model)
        check_distilled(model, confirmed=train_distilled)
        key = key_of(Live(model, clip, vae, sample_model))
        connected = ConnectedConfig(key=key, guidance=guidance, edit_text=edit_text)
        config = BaseModelConfig(path=name_of(model), connected=connected, prompt_weights=prompt_weights)
        return io.NodeOutput(config, ui=ui.PreviewText("\n".join(describe(model, guidance, clip, sample_model))))
