"""Resize LoRA: make a LoRA smaller, by a rank, by sd-scripts' rules or by resize_lora's recipes."""

from __future__ import annotations

from typing import Any

import torch

from ..trainer_core.lora_files.lora import remade
from ..trainer_core.lora_files.recipes import parse_recipes
from ..trainer_core.lora_files.resize import RankRule, describe_ranks, resize, resize_by_recipes
from .comfyui import models, tools
from .node import Node
from .sockets import CATEGORY, complaint, io, titled, ui

SHARE = (
    "Keeps singular values until they reach this share, and one more: of their sum with sv_cumulative, of the "
    "Frobenius norm with sv_fro."
)


def limits() -> list[io.Input]:
    """Build the inputs that bound the ranks of a rule."""
    return [
        io.Int.Input("most", default=0, min=0, max=4096, tooltip="The highest rank that a layer may keep. 0 = any."),
        io.Int.Input(
            "most_conv", default=0, min=0, max=4096, tooltip="The same for convolutions. 0 = as other layers."
        ),
    ]


def amount(name: str, default: float, low: float, high: float, tooltip: str) -> io.Input:
    """Build the input of a rule's number."""
    return io.Float.Input(name, default=default, min=low, max=high, step=0.01, round=0.0001, tooltip=tooltip)


def rules() -> list[io.DynamicCombo.Option]:
    """Build the options of rules for ranks: a rank, and sd-scripts' three."""
    return [
        io.DynamicCombo.Option(
            "rank",
            [
                io.Int.Input(
                    "rank",
                    default=8,
                    min=1,
                    max=4096,
                    tooltip="The new rank; layers of a lower rank stay as they are. Range 1 to 4096.",
                ),
                io.Int.Input(
                    "conv_rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="The new rank of convolutions. 0 = as other layers.",
                ),
            ],
        ),
        io.DynamicCombo.Option(
            "sv_ratio",
            [
                amount(
                    "ratio",
                    10.0,
                    1.0,
                    1e6,
                    "Keeps singular values above the largest one divided by this, and one more.",
                ),
                *limits(),
            ],
        ),
        io.DynamicCombo.Option(
            "sv_cumulative",
            [
                amount(
                    "share",
                    0.8,
                    0.0001,
                    1.0,
                    SHARE,
                ),
                *limits(),
            ],
        ),
        io.DynamicCombo.Option(
            "sv_fro",
            [
                amount(
                    "share",
                    0.9,
                    0.0001,
                    1.0,
                    SHARE,
                ),
                *limits(),
            ],
        ),
    ]


class AtelierResizeLora(Node):
    """Approximate a LoRA at lower ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierResizeLora",
            display_name=titled("Resize LoRA"),
            category=CATEGORY,
            description="Makes a LoRA smaller: the best approximation of every layer at a lower rank. Link the result "
            "to Save LoRA File, or use it with Load LoRA Model.",
            search_aliases=["shrink lora", "lora rank", "svd", "compress lora", "resize_lora", "prune lora", "atelier"],
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA to make smaller, of Load LoRA File or Train LoRA."),
                io.DynamicCombo.Input(
                    "mode",
                    tooltip="How the new ranks are chosen. rank: the same for all layers. sv_ratio, sv_cumulative, "
                    "sv_fro: for each layer by its singular values, as sd-scripts. recipe: by scores, as resize_lora.",
                    options=[
                        *rules(),
                        io.DynamicCombo.Option(
                            "recipe",
                            [
                                io.String.Input(
                                    "recipe",
                                    default="fro_ckpt=1,thr=-3.5",
                                    multiline=True,
                                    tooltip="References with weights (spn_lora, fro_lora, spn_ckpt, fro_ckpt, "
                                    "subspace, params), then thr= or size= in MiB, and rescale= if wanted. Several "
                                    "recipes, one a line, give several LoRAs.",
                                )
                            ],
                        ),
                    ],
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The MODEL that the LoRA is for. Needed by recipes with ckpt or subspace, and by DoRA.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Its CLIP, where the LoRA changes text encoders as well."),
            ],
            outputs=[
                io.LoraModel.Output(
                    display_name="LORA",
                    tooltip="The smaller LoRA; the one linked in is unchanged. Several recipes give one each.",
                    is_output_list=True,
                ),
                io.String.Output(
                    display_name="REPORT",
                    tooltip="Each layer's rank before and after, and how much of its effect is kept.",
                    is_output_list=True,
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, mode: Any = None) -> bool | str:
        """Check the recipe."""
        text = mode.get("recipe") if isinstance(mode, dict) and mode.get("mode") == "recipe" else None
        return complaint(text, parse_recipes)

    @classmethod
    def execute(
        cls, lora: dict[str, torch.Tensor], mode: dict[str, Any], model: Any = None, clip: Any = None
    ) -> io.NodeOutput:
        """Lower the ranks, and report what is kept of each layer."""
        given = tools.layers_in(lora, "The LoRA linked to Resize LoRA")
        if model is not None:
            models.check_fits(given, model, clip, "Resize LoRA")
        weight = None if model is None else models.weight_reader(model, clip)
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            if mode["mode"] == "recipe":
                size = min(tensor.element_size() for tensor in lora.values() if tensor.ndim > 1)
                made = resize_by_recipes(
                    given, parse_recipes(mode["recipe"]), weight, progress, bytes_each=max(2, size)
                )
            else:
                made = [resize(given, rule_of(mode), weight, progress)]
        about = {key: value for key, value in mode.items() if key not in ("mode", "recipe")}
        results = [
            remade(
                lora,
                each.layers,
                "resize",
                {"mode": mode["mode"], **about, **({"recipe": each.recipe} if each.recipe else {})},
            )
            for each in made
        ]
        reports = [describe_ranks(each) for each in made]
        head = "\n".join(
            report.partition("\n")[0] if not each.recipe else " ".join(report.split("\n")[:2])
            for each, report in zip(made, reports, strict=True)
        )
        return io.NodeOutput(results, reports, ui=ui.PreviewText(head))


def rule_of(mode: dict[str, Any], tool: str = "resize") -> RankRule:
    """Read the rule that the inputs of a mode set."""
    if mode["mode"] == "rank":
        return RankRule(rank=mode["rank"], conv_rank=mode["conv_rank"], tool=tool)
    value = mode["ratio"] if mode["mode"] == "sv_ratio" else mode["share"]
    return RankRule(mode=mode["mode"], value=value, rank=mode["most"], conv_rank=mode["most_conv"], tool=tool)
