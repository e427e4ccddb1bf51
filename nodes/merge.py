"""Merge LoRAs: several LoRAs as one."""

from __future__ import annotations

from typing import Any

import torch

from ..trainer_core.common.wording import count
from ..trainer_core.lora_files.combine import METHODS, RANKED, Method, Summand, merge_loras
from ..trainer_core.lora_files.lora import metadata_of, remade
from .comfyui import models, tools
from .node import Node
from .sockets import CATEGORY, io, titled, ui

MOST = 4  # LoRAs of a node; nodes can be chained


class AtelierMergeLoras(Node):
    """Merge LoRAs into one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        slots: list[io.Input] = []
        for number in range(1, MOST + 1):
            slots += [
                io.LoraModel.Input(
                    f"lora_{number}",
                    optional=number > 2,
                    tooltip="A LoRA. Link LoRA Blocks before it to weigh its blocks.",
                ),
                io.Float.Input(
                    f"strength_{number}",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    tooltip="How strongly this LoRA is merged, -10 to 10. The result is for strength 1.",
                ),
            ]
        return io.Schema(
            node_id="AtelierMergeLoras",
            display_name=titled("Merge LoRAs"),
            category=CATEGORY,
            description="Makes one LoRA of several for the same model. To merge a LoRA into a checkpoint, use "
            "ComfyUI's own Load LoRA and Save Checkpoint.",
            search_aliases=["combine lora", "add lora", "ties", "dare", "svd merge", "lora soup", "atelier"],
            inputs=[
                *slots,
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default="sum",
                    tooltip="sum: exact, the ranks add up. svd: nearest to it at a rank. ties: the largest changes, "
                    "where most agree on the sign. dare: changes drawn at random. orthogonal: later LoRAs leave alone "
                    "what earlier ones use.",
                ),
                io.Int.Input(
                    "rank",
                    default=32,
                    min=1,
                    max=4096,
                    tooltip="Rank of the result, 1 to 4096. For svd, ties and dare.",
                ),
                io.Float.Input(
                    "density",
                    default=0.5,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="The share of each LoRA's numbers that is kept, above 0 to 1. For ties and dare.",
                ),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**31 - 1, tooltip="Seed of what dare draws.", advanced=True
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Optional: the MODEL they are for. It knows that layers of other programs' names "
                    "are the same.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Its CLIP, the same for text encoders."),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The merged LoRA, with the metadata of the first."),
                io.String.Output(display_name="REPORT", tooltip="How many layers are shared, and how much is kept."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, method: Method, rank: int, density: float, seed: int, model: Any = None, clip: Any = None, **slots: Any
    ) -> io.NodeOutput:
        """Merge the linked LoRAs."""
        given: dict[int, dict[str, torch.Tensor]] = {
            number: lora for number in range(1, MOST + 1) if (lora := slots.get(f"lora_{number}")) is not None
        }
        with tools.tool_at_work(cls.hidden.unique_id):
            summands = [
                Summand(tools.layers_in(lora, named(lora, number)), slots[f"strength_{number}"])
                for number, lora in given.items()
            ]
            made = merge_loras(
                summands, method, rank=rank, density=density, seed=seed, same=models.same_layers(model, clip)
            )
        settings: dict[str, Any] = {
            "method": method,
            "loras": [summand.lora.name for summand in summands],
            "strengths": [summand.strength for summand in summands],
            **({"rank": rank} if method in RANKED else {}),
            **({"density": density} if method in RANKED and method != "svd" else {}),
            **({"seed": seed} if method.startswith("dare") else {}),
        }
        report = f"{count(made.layers, 'layer')}, {made.shared} of them changed by several LoRAs. Kept "
        f"{made.kept:.1%} of the merged change."
        return io.NodeOutput(remade(given[1], made.layers, "merge", settings), report, ui=ui.PreviewText(report))


def named(lora: dict[str, torch.Tensor], number: int) -> str:
    """Name a LoRA for messages and metadata: by its title, else by its input."""
    return metadata_of(lora).get("modelspec.title", "")[:100] or f"lora_{number}"
