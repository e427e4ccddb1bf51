"""Load Base Model: choose the model that a LoRA is trained on."""

from __future__ import annotations

from typing import Any

from ..trainer_core.models import Chosen
from ..trainer_core.models.sd import check_base_model, detect_noise, remarks
from ..trainer_core.workflow.settings import BAKED, other_files, read_base_model
from .comfyui import folders, models
from .node import Node
from .schema import schema
from .sockets import BaseModelSocket, io, ui


class AtelierLoadBaseModel(Node):
    """Choose the base model once, for training and for ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierLoadBaseModel",
            "The model that the LoRA is trained on. BASE_MODEL goes to Train LoRA, which loads its own "
            "copy; ComfyUI loads MODEL, CLIP and VAE as usual.",
            ["checkpoint", "train lora", "finetune", "dreambooth", "sd15", "sdxl", "pony", "atelier"],
            [
                BaseModelSocket.Output(display_name="BASE_MODEL", tooltip="The model to train on, for Train LoRA."),
                io.Model.Output(display_name="MODEL", tooltip="The diffusion model, loaded by ComfyUI."),
                io.Clip.Output(display_name="CLIP", tooltip="The text encoder, with clip_skip applied."),
                io.Vae.Output(display_name="VAE", tooltip="The VAE, for Sample and VAE Decode."),
            ],
            lists={
                "checkpoint": folders.checkpoint_names(),
                "vae": [BAKED, *folders.file_names("vae")],
                "text_encoder": (texts := [BAKED, *folders.file_names("text_encoders")]),
                "text_encoder_2": texts,
            },
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        checkpoint: str = "",
        vae: str = BAKED,
        text_encoder: str = BAKED,
        text_encoder_2: str = BAKED,
        **_: object,
    ) -> str:
        """Change when a file was replaced under the same name."""
        chosen = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
        files = [folders.checkpoint_path(checkpoint), *other_files(folders, chosen).values()]
        return " ".join(map(folders.state_of, files))

    @classmethod
    def execute(
        cls,
        **inputs: Any,
    ) -> io.NodeOutput:
        """Check the file, then load it through ComfyUI."""
        config = read_base_model(folders, **inputs)
        check_base_model(config)
        loaded = models.load_models(config, *detect_noise(config))
        sentences = remarks(config)
        return io.NodeOutput(Chosen(config), *loaded, ui=ui.PreviewText("\n".join(sentences)) if sentences else None)
