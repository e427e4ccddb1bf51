"""Load LoRA File: a LoRA of models/loras as a LORA, with its metadata."""

from __future__ import annotations

from ..trainer_core.common.side_by_side import cancelled_at_once
from ..trainer_core.common.wording import count
from ..trainer_core.lora_files.lora import read_lora
from ..trainer_core.lora_files.read import LoraFile
from .comfyui import folders, tools
from .node import Node
from .sockets import CATEGORY, io, titled, ui

WHERE = "lora_name of Load LoRA File"


class AtelierLoadLoraFile(Node):
    """Read a LoRA file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierLoadLoraFile",
            display_name=titled("Load LoRA File"),
            category=CATEGORY,
            description="Reads a LoRA from models/loras for the tools: Resize LoRA, Merge LoRAs, LoRA Blocks, Inspect "
            "LoRA. To draw with it, link it to Load LoRA Model.",
            search_aliases=["open lora", "read lora", "import lora", "safetensors", "atelier"],
            inputs=[
                io.Combo.Input(
                    "lora_name",
                    options=folders.lora_names(),
                    tooltip="A .safetensors file of models/loras, or one that was uploaded. Press R to refresh the "
                    "list.",
                )
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The LoRA, with the metadata of its file."),
                io.String.Output(display_name="NAME", tooltip="The file's name without its ending."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str) -> str:
        """Change when the file was replaced under the same name."""
        return folders.state_of(folders.lora_path(lora_name, WHERE))

    @classmethod
    def execute(cls, lora_name: str) -> io.NodeOutput:
        """Read and check the file."""
        path = folders.lora_path(lora_name, WHERE)
        with tools.cancel_heard():
            lora, file = cancelled_at_once(read_lora)(path)
        return io.NodeOutput(lora, file.name.rpartition(".")[0], ui=ui.PreviewText(describe(file)))


def describe(file: LoraFile) -> str:
    """Describe a LoRA file in a line."""
    kinds = sorted({layer.kind for layer in file.layers.values()})
    return f"{count(file.layers, 'layer')} of {', '.join(kinds)}."
