"""Resize LoRA: approximate a LoRA at a lower rank."""

from __future__ import annotations

import torch

from ..trainer_core.common.wording import count
from ..trainer_core.lora_files.resize import lower_rank
from .comfyui import models
from .node import Node
from .sockets import CATEGORY, io, titled, ui


class AtelierResizeLora(Node):
    """Approximate a LoRA at a lower rank."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierResizeLora",
            display_name=titled("Resize LoRA"),
            category=CATEGORY,
            description="Makes a LoRA smaller: the best approximation of every layer at a lower rank. Save the "
            "result with Save LoRA Weights, or use it with Load LoRA Model.",
            search_aliases=["shrink lora", "lora rank", "svd", "compress lora", "atelier"],
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA to make smaller, for example from Train LoRA."),
                io.Int.Input(
                    "rank",
                    default=8,
                    min=1,
                    max=4096,
                    tooltip="The new rank; layers of a lower rank stay as they are. Range 1 to 4096.",
                ),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The smaller LoRA; the one linked in is unchanged."),
                io.String.Output(display_name="REPORT", tooltip="How much of the LoRA's effect the smaller one keeps."),
            ],
        )

    @classmethod
    def execute(cls, lora: dict[str, torch.Tensor], rank: int) -> io.NodeOutput:
        """Lower the rank, and report the share of the effect that is kept."""
        with torch.inference_mode(False):
            resized, layers = lower_rank({key: models.own(tensor) for key, tensor in lora.items()}, rank)
        ranks = sorted({layer.old_rank for layer in layers})
        worst = min(layers, key=lambda layer: layer.kept)
        kept = sum(layer.kept for layer in layers) / len(layers)
        before, after = (sum(t.numel() * t.element_size() for t in d.values()) for d in (lora, resized))
        report = (
            f"{count(layers, 'layer')} from rank {' and '.join(map(str, ranks))} to at most {rank}, "
            f"{before / 1e6:.1f} MB to {after / 1e6:.1f} MB.\n"
            f"Kept {kept:.1%} of the effect on average, least {worst.kept:.1%} ({worst.name})."
        )
        return io.NodeOutput(resized, report, ui=ui.PreviewText(report))
