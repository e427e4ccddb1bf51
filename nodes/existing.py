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
from .schema import schema
from .sockets import LoraConfigSocket, io, ui


class AtelierExistingLora(Node):
    """Choose a LoRA that the training builds on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierExistingLora",
            "Optional, between LoRA Config and Train LoRA: continue training an existing LoRA, or train a new one on "
            "top of it. Chain several to put more than one beneath.",
            ["continue lora", "resume lora", "merge lora", "base lora", "train lora", "kohya", "atelier"],
            [LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
            lists={"lora_name": [NONE, *folders.file_names("loras")]},
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
        training_only: bool = False,
    ) -> io.NodeOutput:
        """Check that the file is a LoRA, and add it to the configuration."""
        if lora is None and lora_name == NONE:
            return io.NodeOutput(lora_config, ui=ui.PreviewText("No LoRA is chosen, so this node changes nothing."))
        path = folders.file_path("loras", lora_name, "lora_name of Existing LoRA") if lora is None else keep(lora)
        return io.NodeOutput(read_existing_lora(path, use, strength, lora_config, training_only))


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
