"""Convert LoRA: a LoRA as another program names and writes it."""

from __future__ import annotations

from typing import Any

import torch

from ..trainer_core.lora_files.convert import convert
from ..trainer_core.lora_files.lora import remade
from ..trainer_core.lora_files.names import PROGRAMS
from .comfyui import models, tools
from .node import Node
from .sockets import CATEGORY, io, titled, ui


class AtelierConvertLora(Node):
    """Write a LoRA as another program does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierConvertLora",
            display_name=titled("Convert LoRA"),
            category=CATEGORY,
            description="Gives a LoRA the names and the form that another program reads. Fused layers are cut or "
            "joined exactly. Link the result to Save LoRA File.",
            search_aliases=["kohya", "diffusers", "peft", "ai-toolkit", "onetrainer", "rename lora", "atelier"],
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA, of any program that ComfyUI reads."),
                io.Model.Input("model", tooltip="The MODEL that the LoRA is for; it knows the names of its layers."),
                io.Combo.Input(
                    "program",
                    options=list(PROGRAMS),
                    default="kohya",
                    tooltip="Who shall read it. kohya: sd-scripts, musubi and most others. diffusers: also peft. "
                    "comfyui: as its Save LoRA Weights.",
                ),
                io.Int.Input(
                    "plain_rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Makes plain LoRA of this rank of LoHa, LoKr, OFT, DoRA, GLoRA and full differences; the "
                    "report says the error. 0 = keep their kind.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Its CLIP, where the LoRA changes text encoders as well."),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The converted LoRA."),
                io.String.Output(
                    display_name="REPORT", tooltip="What was done, and what ComfyUI itself does not read."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, lora: dict[str, torch.Tensor], model: Any, program: Any, plain_rank: int, clip: Any = None
    ) -> io.NodeOutput:
        """Rename the layers, and make plain LoRA of other kinds where that is asked for."""
        from .comfyui.connected.names import names_of  # here, so that ComfyUI starts fast

        given = tools.layers_in(lora, "The LoRA linked to Convert LoRA")
        known = models.lora_keys(model, clip)
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            made = convert(
                given,
                names_of(model, clip),
                program,
                rank=plain_rank,
                weight=models.weight_reader(model, clip),
                known=known.__contains__,
                progress=progress,
            )
        settings = {"program": program, "plain_rank": plain_rank}
        report = made.describe(program)
        return io.NodeOutput(
            remade(lora, made.layers, "convert", settings, made.tensors), report, ui=ui.PreviewText(report)
        )
