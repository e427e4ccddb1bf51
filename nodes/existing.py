"""Existing LoRA: continue a LoRA, or train a new one on top of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from ..trainer_core.common.files import written_whole
from ..trainer_core.config import LoraConfig
from ..trainer_core.workflow.settings import NONE, OPEN_LORA, read_existing_lora
from .comfyui import folders, kept
from .node import Node
from .sockets import CATEGORY, LoraConfigSocket, io, titled, ui


class AtelierExistingLora(Node):
    """Choose a LoRA that the training builds on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierExistingLora",
            display_name=titled("Existing LoRA"),
            category=CATEGORY,
            description="Optional, between LoRA Config and Train LoRA: continue training an existing LoRA, or train "
            "a new one on top of it. Chain several to put more than one beneath.",
            search_aliases=[
                "continue lora",
                "resume lora",
                "merge lora",
                "base lora",
                "train lora",
                "kohya",
                "atelier",
            ],
            inputs=[
                LoraConfigSocket.Input(
                    "lora_config",
                    optional=True,
                    tooltip="From LoRA Config, or another Existing LoRA. Not linked = as suits the model.",
                ),
                io.Combo.Input(
                    "lora_name",
                    options=[NONE, *folders.file_names("loras")],
                    default=NONE,
                    socketless=True,
                    tooltip="A .safetensors file of models/loras: of kohya, musubi, ai-toolkit, diffusers, OneTrainer, "
                    "LyCORIS or this pack. none: this node changes nothing. Ignored if lora is linked.",
                ),
                io.Combo.Input(
                    "use",
                    options=["continue", "beneath"],
                    default="continue",
                    tooltip="continue: train this LoRA further; its layers, ranks and alphas replace those of LoRA "
                    "Config. beneath: add it to the base model while a new LoRA is trained, which does not repeat "
                    "what this one does.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    tooltip="With beneath: how strongly the LoRA is added, -10 to 10. Use the same strength when you "
                    "sample. A continued LoRA always starts as it is.",
                ),
                io.LoraModel.Input(
                    "lora",
                    optional=True,
                    tooltip="Optional: a LoRA of the graph, from Train LoRA, Resize LoRA or a loader. Replaces "
                    "lora_name.",
                ),
            ],
            outputs=[LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str = NONE, **_: object) -> str:
        """Change when the file was replaced under the same name."""
        if lora_name == NONE:
            return ""
        return folders.state_of(folders.file_path("loras", lora_name, "lora_name of Existing LoRA"))

    @classmethod
    def execute(
        cls,
        lora_name: str,
        use: str,
        strength: float,
        lora_config: LoraConfig = OPEN_LORA,
        lora: Mapping[str, torch.Tensor] | None = None,
    ) -> io.NodeOutput:
        """Check that the file is a LoRA, and add it to the configuration."""
        if lora is None and lora_name == NONE:
            return io.NodeOutput(lora_config, ui=ui.PreviewText("No LoRA is chosen, so this node changes nothing."))
        path = folders.file_path("loras", lora_name, "lora_name of Existing LoRA") if lora is None else keep(lora)
        return io.NodeOutput(read_existing_lora(path, use, strength, lora_config))


def keep(lora: Mapping[str, torch.Tensor]) -> Path:
    """Write a LoRA of the graph to a file named by its content; what the limit leaves no room for is deleted."""
    if not lora:
        raise ValueError("The LoRA linked to Existing LoRA holds no tensors; link one of Train LoRA or of a loader.")
    folder = folders.loras_folder()
    folder.mkdir(parents=True, exist_ok=True)
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(lora.items())})
    path = folder / f"{hashlib.sha256(data).hexdigest()[:32]}.safetensors"
    if not path.is_file():
        with written_whole(path) as temporary:
            temporary.write_bytes(data)
    kept.mark_used([path])
    kept.make_room()
    return path
