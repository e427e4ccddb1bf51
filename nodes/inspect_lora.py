"""Inspect LoRA: what a LoRA is, drawn and in words."""

from __future__ import annotations

from typing import Any

import torch

from ..trainer_core.lora_files.inspect import describe_lora, inspect_lora
from ..trainer_core.lora_files.lora import metadata_of
from .comfyui import models, tools
from .lora_picture import draw_lora
from .node import Node
from .preview import to_image
from .sockets import CATEGORY, io, titled, ui


class AtelierInspectLora(Node):
    """Tell what a LoRA is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierInspectLora",
            display_name=titled("Inspect LoRA"),
            category=CATEGORY,
            description="Tells what a LoRA is: what it was trained on and by what, its layers, ranks, norms and "
            "singular values, and whether it fits the linked MODEL.",
            search_aliases=["lora info", "lora metadata", "lora rank", "singular values", "analyse lora", "atelier"],
            is_output_node=True,
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA, of Load LoRA File or any node with a LORA output."),
                io.Model.Input(
                    "model", optional=True, tooltip="Optional: a MODEL. The report names layers that it would not load."
                ),
                io.Clip.Input("clip", optional=True, tooltip="Optional: its CLIP, the same for text encoders."),
            ],
            outputs=[
                io.String.Output(display_name="REPORT", tooltip="All that is known of the LoRA."),
                io.Image.Output(display_name="PLOT", tooltip="A bar for each block, and the singular values."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, lora: dict[str, torch.Tensor], model: Any = None, clip: Any = None) -> io.NodeOutput:
        """Measure and draw the LoRA."""
        name = metadata_of(lora).get("modelspec.title", "")[:100] or "The LoRA linked to Inspect LoRA"
        given = tools.layers_in(lora, name)
        misfits = None if model is None and clip is None else models.misfits(given, model, clip)
        weight = None if model is None or misfits else models.weight_reader(model, clip)
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            found = inspect_lora(given, weight, progress)
        report = describe_lora(found, name, misfits)
        picture = to_image(draw_lora(found, name))
        return io.NodeOutput(
            report, picture, ui={**ui.PreviewImage(picture, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        )
