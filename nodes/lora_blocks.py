"""LoRA Blocks: keep, scale or drop parts of a LoRA, and see it on MODEL at once."""

from __future__ import annotations

from typing import Any

import torch

from ..trainer_core.common.wording import count
from ..trainer_core.lora_files.blocks import block_of, blocks_of, parse_rules, scale_blocks
from ..trainer_core.lora_files.lora import remade
from .comfyui import models, tools
from .node import Node
from .sockets import CATEGORY, complaint, io, titled, ui


class AtelierLoraBlocks(Node):
    """Scale the blocks of a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierLoraBlocks",
            display_name=titled("LoRA Blocks"),
            category=CATEGORY,
            description="Keeps, scales or drops parts of a LoRA by blocks, layers or patterns of names. With MODEL "
            "linked, the rest is applied to it at once.",
            search_aliases=["block weight", "lbw", "lora layers", "filter lora", "chop", "atelier"],
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA, of Load LoRA File or any node with a LORA output."),
                io.String.Input(
                    "rules",
                    default="",
                    multiline=True,
                    placeholder="te*=0\ndouble_blocks.3=0.5",
                    tooltip="A rule a line, pattern=factor: 0 drops, 1 keeps. A pattern is a block (see the report) or "
                    "a layer's name; * stands for any letters. The last rule that fits decides.",
                ),
                io.Float.Input(
                    "rest",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    tooltip="Factor of all layers that no rule names, -10 to 10.",
                ),
                io.Model.Input("model", optional=True, tooltip="Optional: the MODEL to put the result on."),
                io.Clip.Input("clip", optional=True, tooltip="Optional: the CLIP to put the result on."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    tooltip="Strength on MODEL and CLIP, -10 to 10. The LORA output does not change with it.",
                ),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="What is left of the LoRA."),
                io.Model.Output(display_name="MODEL", tooltip="MODEL with it; nothing if none is linked."),
                io.Clip.Output(display_name="CLIP", tooltip="CLIP with it; nothing if none is linked."),
                io.String.Output(display_name="REPORT", tooltip="Each block, its number of layers and their factors."),
            ],
        )

    @classmethod
    def validate_inputs(cls, rules: str = "") -> bool | str:
        """Check the rules."""
        return complaint(rules, parse_rules)

    @classmethod
    def execute(
        cls,
        lora: dict[str, torch.Tensor],
        rules: str,
        rest: float,
        strength: float,
        model: Any = None,
        clip: Any = None,
    ) -> io.NodeOutput:
        """Scale the layers, and apply them."""
        given = tools.layers_in(lora, "The LoRA linked to LoRA Blocks")
        kept, factors = scale_blocks(given, parse_rules(rules), rest=rest)
        made = remade(lora, kept.layers.values(), "blocks", {"rules": rules, "rest": rest})
        patched = models.apply_lora(model, clip, made, strength) if model or clip else (None, None)
        outputs = (
            each if given is not None else models.NOTHING for each, given in zip(patched, (model, clip), strict=True)
        )
        report = describe(given, factors)
        shown = {**ui.PreviewText(report).as_dict(), "blocks": blocks_of(given)}  # the page makes a slider of each
        return io.NodeOutput(made, *outputs, report, ui=shown)


def describe(lora: Any, factors: dict[str, float]) -> str:
    """List each block with its layers and factors."""
    lines = [f"{count(sum(map(bool, factors.values())), 'layer')} of {len(factors)} are kept."]
    for block in blocks_of(lora):
        own = [factor for source, factor in factors.items() if block_of(source) == block]
        lines.append(f"{block}: {count(own, 'layer')} x {', '.join(f'{factor:g}' for factor in sorted(set(own)))}")
    return "\n".join(lines)
