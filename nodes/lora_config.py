"""The network that is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..trainer_core.config import BaseModelConfig, LoraConfig
from . import bridge
from .sockets import CATEGORY, BaseModelSocket, LoraConfigSocket, io, ui

RANKS = ("block_ranks", "conv_block_ranks")  # whole numbers; the others may be fractions
BLOCKS = {
    "block_ranks": "Rank of each block of the UNet, in the order of kohya's block_dims: 25 numbers for Stable "
    "Diffusion 1 and 2, 23 for XL, with commas between them; 16*9 stands for nine times 16. 0 = the block is not "
    "trained. Empty = rank everywhere.",
    "block_alphas": "Alpha of each block, as many numbers as block_ranks; 0 = as the block's rank. Empty = alpha "
    "everywhere.",
    "conv_block_ranks": "Rank of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = those of the "
    "block are not trained. Empty = conv_rank, or as the block's other layers.",
    "conv_block_alphas": "Alpha of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = as their "
    "rank. Empty = conv_alpha, or as the block's other layers.",
    "block_weights": "Multiplies the learning rate of each block, 0 or more: as many numbers as block_ranks, or the 17 "
    "(XL: 12) of block-weight extensions, where the first is for the text encoders and for blocks without attention. "
    "0 = not trained. Empty = 1 everywhere.",
}
PATTERNS = {
    "include": "Layers to train besides the preset's: patterns with commas between them or one per line. * stands for "
    "any letters, ? for one. A pattern is compared with whole names, as diffusers or LoRA files write them: "
    "mid_block.*, *attn2.to_k, lora_te1_*_fc1. One that matches nothing is an error. Empty = none.",
    "exclude": "Layers to leave out; patterns as for include. Each must match a layer that would be trained otherwise. "
    "Empty = none.",
}


def options() -> list[io.DynamicCombo.Option]:
    """Return the algorithms with the inputs that act on them; the first is the default."""
    dora = io.Boolean.Input(
        "dora",
        default=False,
        optional=True,
        tooltip="DoRA: direction and magnitude of the weights are trained apart, along the input axis, as ComfyUI "
        "applies it. Learns closer to full training at the same rank; slower. Off by default.",
    )
    tucker = io.Boolean.Input(
        "tucker",
        default=False,
        optional=True,
        tooltip="3x3 convolutions as three factors (Tucker), which makes a small file. Only with a preset that trains "
        "them. Off by default.",
        advanced=True,
    )
    rs_lora = io.Boolean.Input(
        "rs_lora",
        default=False,
        optional=True,
        tooltip="Scale alpha / sqrt(rank) instead of alpha / rank, so that high ranks (64 and more) do not learn too "
        "slowly. The file's alpha says so to every program. Off by default.",
        advanced=True,
    )
    shared = [
        rs_lora,
        _share("rank_dropout", "Chance that one of the ranks is left out, for each picture anew."),
        io.Boolean.Input(
            "rank_dropout_scale",
            default=True,
            optional=True,
            tooltip="With rank_dropout: the ranks that stay act as much stronger as others are left out. On by "
            "default.",
            advanced=True,
        ),
        io.Boolean.Input(
            "use_scalar",
            default=False,
            optional=True,
            tooltip="A trained number multiplies each layer and begins with 0; multiplied in when saved. Off by "
            "default.",
            advanced=True,
        ),
        io.Float.Input(
            "scale_weight_norms",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            round=1e-4,
            optional=True,
            tooltip="After each step a layer's change is scaled down to this norm if it is larger, against "
            "overtraining; 1 is usual, 0 = no limit. 0 to 1000.",
            advanced=True,
        ),
    ]
    bake = io.Boolean.Input(
        "bake",
        default=False,
        optional=True,
        tooltip="Save a plain LoRA that comes nearest, for programs that do not know this kind. Less exact. Off by "
        "default.",
        advanced=True,
    )
    constraint = io.Float.Input(
        "constraint",
        default=0.0,
        min=0.0,
        max=1000.0,
        step=0.001,
        round=1e-6,
        optional=True,
        tooltip="How far the rotation may go; 0 = as far as it likes. 0 to 1000.",
        advanced=True,
    )
    lokr = [
        io.Int.Input(
            "factor",
            default=-1,
            min=-1,
            max=1024,
            optional=True,
            tooltip="How the sides of a weight are split: a larger factor, up to the square root of the side, makes a "
            "smaller file. -1 = as square as possible, the smallest. -1 to 1024.",
        ),
        io.Boolean.Input(
            "decompose_both",
            default=False,
            optional=True,
            tooltip="The small factor has the rank, too, where that is smaller. Off by default.",
            advanced=True,
        ),
        io.Boolean.Input(
            "full_matrix",
            default=False,
            optional=True,
            tooltip="Both factors whole: rank and alpha do not count, and the file is larger. Off by default.",
            advanced=True,
        ),
    ]
    start = io.Combo.Input(
        "init",
        options=["default", "orthogonal", "pissa"],
        default="default",
        optional=True,
        tooltip="What the LoRA begins with. default: random, without effect. orthogonal: the same with rows at right "
        "angles. pissa: the main directions of the model's own weights, which learns faster; the start takes longer.",
        advanced=True,
    )
    dropout = _share("dropout", "Chance that a number between down and up is left out in training.")
    fields: dict[str, list[io.Input]] = {
        "lora": [dora, tucker, start, dropout, *shared, bake],
        "loha": [dora, tucker, *shared, bake],
        "lokr": [*lokr, dora, tucker, *shared, bake],
        "glora": [],
        "ia3": [bake],
        "oft": [constraint, bake],
        "boft": [constraint, bake],
        "full": [],
    }
    return [io.DynamicCombo.Option(key, inputs) for key, inputs in fields.items()]


def _share(name: str, tooltip: str) -> io.Input:
    """Return an input for a chance."""
    return io.Float.Input(
        name,
        default=0.0,
        min=0.0,
        max=0.99,
        step=0.05,
        round=1e-4,
        optional=True,
        tooltip=f"{tooltip} Against overtraining; 0.1 to 0.3 is usual, 0 = never. 0 to 0.99.",
        advanced=True,
    )


class AtelierLoraConfig(io.ComfyNode):
    """The network that is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierLoraConfig",
            display_name="LoRA Config",
            category=CATEGORY,
            description="What kind of LoRA, how large it is and which layers of the model it changes. With a base "
            "model linked the node shows layers, parameters, file size and blocks.",
            search_aliases=[
                *(
                    "rank",
                    "network dim",
                    "alpha",
                    "lora network",
                    "train lora",
                    "kohya",
                    "lycoris",
                    "locon",
                    "loha",
                    "lokr",
                ),
                *("dora", "oft", "boft", "ia3", "glora", "full finetune", "block weights", "atelier"),
            ],
            inputs=[
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip="Size of the LoRA in each layer (network dim). 8 to 32 suits a character or a style; the "
                    "file grows with it. LoHa reaches as much with its root. Range 1 to 4096.",
                ),
                io.Float.Input(
                    "alpha",
                    default=16.0,
                    min=0.001,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="The LoRA acts with alpha / rank. Equal to the rank = full strength; lower works like a "
                    "lower learning rate. Above 0.",
                ),
                io.Combo.Input(
                    "preset",
                    options=[
                        "attn-only",
                        "attn-mlp",
                        "full",
                        "full-lin",
                        "unet-transformer-only",
                        "unet-convblock-only",
                    ],
                    default="attn-mlp",
                    tooltip="Which layers are trained. attn-only: attention. attn-mlp: attention and the layers "
                    "between (what most LoRAs train). full: all of these and the convolutions; best for styles. "
                    "full-lin: full without 3x3 convolutions. unet-transformer-only: attn-mlp, never the text "
                    "encoders. unet-convblock-only: what lies outside attention, never the text encoders.",
                ),
                io.Int.Input(
                    "conv_rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Rank of the 3x3 convolutions with the presets full and unet-convblock-only; 0 = the same "
                    "as rank.",
                    advanced=True,
                ),
                io.Float.Input(
                    "conv_alpha",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Alpha of the 3x3 convolutions with the presets full and unet-convblock-only; 0 = the same "
                    "as alpha.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "dtype",
                    options=["float32", "bfloat16"],
                    default="float32",
                    optional=True,
                    tooltip="Precision of the LoRA's own weights while they are trained. bfloat16 halves their memory; "
                    "each step is rounded at random, so that small steps are not lost. float32 is exact.",
                    advanced=True,
                ),
                io.DynamicCombo.Input(
                    "algorithm",
                    options=options(),
                    optional=True,
                    tooltip="lora: two thin factors, right for most. loha: two products, more expressive for its size. "
                    "lokr: a Kronecker product, the smallest files. glora: also turns what goes in. ia3: one number "
                    "per channel of keys, values and MLP. oft, boft: rotations, which keep the model's character. "
                    "full: the whole difference of each weight, very large.",
                ),
                _share("module_dropout", "Chance that a layer's change is left out, for each picture anew."),
                io.Boolean.Input(
                    "train_norm",
                    default=False,
                    optional=True,
                    tooltip="Also train the UNet's norm layers among those that the preset trains. Off by default.",
                    advanced=True,
                ),
                *(
                    io.String.Input(name, default="", multiline=True, optional=True, tooltip=tooltip, advanced=True)
                    for name, tooltip in PATTERNS.items()
                ),
                *(
                    io.String.Input(name, default="", optional=True, tooltip=tooltip, advanced=True)
                    for name, tooltip in BLOCKS.items()
                ),
                BaseModelSocket.Input(
                    "base_model",
                    optional=True,
                    tooltip="Optional, from Load Base Model: shows layers, parameters, file size and blocks on this "
                    "node. Training does not depend on it.",
                ),
            ],
            outputs=[
                LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA."),
                io.String.Output(
                    display_name="REPORT",
                    tooltip="Layers, parameters and file size. Without a base model, nodes linked here are skipped.",
                ),
                io.Image.Output(
                    display_name="PICTURE",
                    tooltip="Each block's rank and parameters. Without a base model, nodes linked here are skipped.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        algorithm: dict[str, Any] | None = None,
        include: str = "",
        exclude: str = "",
        base_model: BaseModelConfig | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        """Return the configuration, and show what it makes of the base model."""
        asked = (cls.hidden.prompt or {}).get(cls.hidden.unique_id, {}).get("inputs", {}).get("algorithm", "lora")
        if algorithm is None and asked != "lora":  # ComfyUI leaves out what is linked or no option
            raise ValueError(
                f"algorithm is {asked!r}; choose one of {', '.join(o.key for o in options())}, without a link."
            )
        chosen = {name: value for name, value in (algorithm or {}).items() if value is not None}
        config = LoraConfig(
            include=patterns(include), exclude=patterns(exclude), **chosen, **{**values, **block_numbers(values)}
        )
        if base_model is None:
            return io.NodeOutput(config, bridge.NOTHING, bridge.NOTHING)
        from ..trainer_core.network_report import describe_network, outline_size  # here, so that ComfyUI starts fast
        from .network_picture import draw_network
        from .preview import to_image

        size = outline_size(base_model, config)
        report = "\n\n".join([describe_network(size), TEXT_NOTE]) if len(size.models) > 1 else describe_network(size)
        picture = to_image(draw_network(size, f"{config.algorithm}, {config.preset}"))
        shown = {**ui.PreviewImage(picture, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(config, report, picture, ui=shown)


TEXT_NOTE = "Text encoders are trained, and saved, where Optimizer gives them a learning rate."


def patterns(text: str) -> tuple[str, ...]:
    """Return the patterns of a text with commas or line breaks between them."""
    return tuple(part.strip() for part in re.split(r"[,\n]", text) if part.strip())


def block_numbers(values: dict[str, Any]) -> dict[str, Sequence[float]]:
    """Return the numbers of each list of blocks that an execution was given as text."""
    from ..trainer_core.networks import parse_numbers

    return {
        name: parse_numbers(values[name], name, int if name in RANKS else float) for name in BLOCKS if name in values
    }
