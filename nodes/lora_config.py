"""LoRA Config: algorithm, size and layers of the network."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import BaseModelConfig
from ..trainer_core.workflow.settings import read_lora
from .comfyui import models
from .node import Node, described
from .sockets import CATEGORY, BaseModelSocket, LoraConfigSocket, io, titled, ui

BLOCKS = {
    "block_ranks": "Rank of each block of the UNet, in the order of kohya's block_dims: 25 numbers for Stable "
    "Diffusion 1 and 2, 23 for XL, one for each block of other models, separated by commas; 16*9 means nine times "
    "16. 0 = the block is not trained. Empty = rank everywhere.",
    "block_alphas": "Alpha of each block, as many numbers as block_ranks; 0 = the block's rank. Empty = alpha "
    "everywhere.",
    "conv_block_ranks": "Rank of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = those of "
    "the block are not trained. Empty = conv_rank, or the rank of the block.",
    "conv_block_alphas": "Alpha of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = their "
    "rank. Empty = conv_alpha, or the alpha of the block.",
    "block_weights": "Multiplies the learning rate of each block, 0 or more: as many numbers as block_ranks, or the "
    "17 (XL: 12) of block-weight extensions, where the first is for the text encoders and for blocks without "
    "attention. 0 = not trained. Empty = 1 everywhere.",
}
PATTERNS = {
    "include": "Layers to train besides the preset's: patterns separated by commas or one per line. * stands for any "
    "letters, ? for one. A pattern must match a whole name in diffusers' or LoRA files' form: mid_block.*, "
    "*attn2.to_k, lora_te1_*_fc1; linked models have ComfyUI's names. A pattern that matches no layer is an error. "
    "Empty = none.",
    "exclude": "Layers not to train; patterns as for include. Each must match a layer that would be trained "
    "otherwise. Empty = none.",
}


def options() -> list[io.DynamicCombo.Option]:
    """List the algorithms with their own inputs; the first is the default."""
    dora = io.Boolean.Input(
        "dora",
        default=False,
        optional=True,
        tooltip="DoRA: trains direction and magnitude of the weights apart, along the input axis, as ComfyUI applies "
        "it. Closer to full training at the same rank; slower. Off by default.",
    )
    tucker = io.Boolean.Input(
        "tucker",
        default=False,
        optional=True,
        tooltip="Splits 3x3 convolutions into three factors (Tucker), for a smaller file. Only with a preset that "
        "trains them. Off by default.",
        advanced=True,
    )
    rs_lora = io.Boolean.Input(
        "rs_lora",
        default=False,
        optional=True,
        tooltip="rsLoRA: scale alpha / sqrt(rank) instead of alpha / rank, so that high ranks (64 and more) do not "
        "train too slowly. The file's alpha makes every program apply it. Off by default.",
        advanced=True,
    )
    shared = [
        rs_lora,
        _share("rank_dropout", "Chance that each rank is dropped, drawn for each picture."),
        io.Boolean.Input(
            "rank_dropout_scale",
            default=True,
            optional=True,
            tooltip="With rank_dropout: scales the remaining ranks up to make up for the dropped ones. On by default.",
            advanced=True,
        ),
        io.Boolean.Input(
            "use_scalar",
            default=False,
            optional=True,
            tooltip="Multiplies each layer by a trained number that begins at 0; it is merged into the weights when "
            "saved. Off by default.",
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
            tooltip="Max norm: after each step a larger change of a layer is scaled down to this norm, against "
            "overfitting; 1 is usual, 0 = no limit. 0 to 1000.",
            advanced=True,
        ),
    ]
    bake = io.Boolean.Input(
        "bake",
        default=False,
        optional=True,
        tooltip="Saves the nearest plain LoRA, for programs that do not know this algorithm. Less exact. Off by "
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
        tooltip="The largest rotation; 0 = no limit. 0 to 1000.",
        advanced=True,
    )
    lokr = [
        io.Int.Input(
            "factor",
            default=-1,
            min=-1,
            max=1024,
            optional=True,
            tooltip="How the sides of a weight are split: a larger factor, up to the square root of the side, makes "
            "a smaller file. -1 = as square as possible, the smallest. -1 to 1024.",
        ),
        io.Boolean.Input(
            "decompose_both",
            default=False,
            optional=True,
            tooltip="Decomposes the small factor to the rank, too, where the rank is smaller. Off by default.",
            advanced=True,
        ),
        io.Boolean.Input(
            "full_matrix",
            default=False,
            optional=True,
            tooltip="Trains both factors whole: rank and alpha have no effect, and the file is larger. Off by default.",
            advanced=True,
        ),
    ]
    start = io.Combo.Input(
        "init",
        options=["default", "orthogonal", "pissa"],
        default="default",
        optional=True,
        tooltip="Initial weights. default: random, without effect on the model. orthogonal: the same with orthogonal "
        "rows. pissa: the main directions of the model's own weights, which trains faster; the start takes longer.",
        advanced=True,
    )
    dropout = _share("dropout", "Dropout: chance that a value between down and up is set to 0 in training.")
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
    """Build the input of a probability."""
    return io.Float.Input(
        name,
        default=0.0,
        min=0.0,
        max=0.99,
        step=0.05,
        round=1e-4,
        optional=True,
        tooltip=f"{tooltip} Against overfitting; 0.1 to 0.3 is usual, 0 = never. 0 to 0.99.",
        advanced=True,
    )


class AtelierLoraConfig(Node):
    """Choose algorithm, size and layers of the network."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierLoraConfig",
            display_name=titled("LoRA Config"),
            category=CATEGORY,
            description="Algorithm, size and layers of the LoRA. With a linked base model the node shows layers, "
            "parameters, file size and blocks.",
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
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Rank of each layer (network dim). 8 to 32 suits a character or a style; the file grows "
                    "with it. LoHa needs only its square root. 0: as suits the model, 16 for Stable Diffusion.",
                ),
                io.Float.Input(
                    "alpha",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="The LoRA is scaled by alpha / rank. Equal to the rank = full strength; lower acts like "
                    "a lower learning rate. 0 = the rank.",
                ),
                io.Combo.Input(
                    "preset",
                    options=[
                        "auto",
                        "attn-only",
                        "attn-mlp",
                        "full",
                        "full-lin",
                        "unet-transformer-only",
                        "unet-convblock-only",
                    ],
                    default="auto",
                    tooltip="Which layers are trained. auto: attn-mlp, and full for the toy model. attn-only: "
                    "attention. attn-mlp: attention and the layers between (what most LoRAs train). full: all "
                    "of these and the convolutions; best for styles. full-lin: full without 3x3 convolutions. "
                    "unet-transformer-only: attn-mlp, never the text encoders. unet-convblock-only: the "
                    "layers outside attention, never the text encoders. The last two are for UNets.",
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
                    tooltip="Precision of the LoRA's own weights while training. bfloat16 halves their memory; "
                    "stochastic rounding keeps small steps. float32 is exact.",
                    advanced=True,
                ),
                io.DynamicCombo.Input(
                    "algorithm",
                    options=options(),
                    optional=True,
                    tooltip="lora: two thin factors, right for most. loha: two products, more expressive for its "
                    "size. lokr: a Kronecker product, the smallest files. glora: also changes the inputs of layers. "
                    "ia3: one number per channel of keys, values and MLP. oft, boft: rotations, which keep the "
                    "model's character. full: the whole difference of each weight, very large.",
                ),
                _share("module_dropout", "Chance that a layer's change is dropped, drawn for each picture."),
                io.Boolean.Input(
                    "train_norm",
                    default=False,
                    optional=True,
                    tooltip="Also trains the UNet's norm layers among those of the preset. Off by default.",
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
                    tooltip="Optional, from Load Base Model or Use Connected Model: shows layers, parameters, file "
                    "size and blocks on this node. Training does not depend on it.",
                ),
                io.Combo.Input(
                    "names",
                    options=["comfy", "peft"],
                    default="comfy",
                    optional=True,
                    tooltip="Names of the layers in the file. comfy: kohya's, as sd-scripts and musubi write. peft: "
                    "lora_A and lora_B, as ai-toolkit and diffusers write, for plain LoRA only. ComfyUI reads both.",
                    advanced=True,
                ),
                io.Int.Input(
                    "timestep_rank",
                    default=0,
                    min=0,
                    max=4096,
                    optional=True,
                    tooltip="T-LoRA, against overfitting on few pictures: noisy timesteps, which decide the "
                    "composition, train only this many ranks, clean ones nearly all. Half of the rank is usual; 0 "
                    "(default) = off. In training only: ComfyUI applies every rank at every timestep. For the "
                    "algorithm lora.",
                    advanced=True,
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
        base_model: BaseModelConfig | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        """Build the configuration, and show its network on the base model."""
        asked = (cls.hidden.prompt or {}).get(cls.hidden.unique_id, {}).get("inputs", {}).get("algorithm", "lora")
        if algorithm is None and asked != "lora":  # ComfyUI leaves out what is linked or no option
            raise ValueError(
                f"algorithm of LoRA Config is {described(asked)}; set it to one of "
                f"{', '.join(o.key for o in options())}, without a link."
            )
        config = read_lora(algorithm, **values)
        if base_model is None:
            return io.NodeOutput(config, models.NOTHING, models.NOTHING)
        from ..trainer_core.preflight.network import describe_network, outline_size  # here, so that ComfyUI starts fast
        from .network_picture import draw_network
        from .preview import to_image

        size = outline_size(base_model, config)
        report = "\n\n".join([describe_network(size), TEXT_NOTE]) if len(size.models) > 1 else describe_network(size)
        picture = to_image(draw_network(size, f"{config.algorithm}, {config.preset}"))
        shown = {**ui.PreviewImage(picture, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(config, report, picture, ui=shown)


TEXT_NOTE = "Text encoders are trained and saved if Optimizer sets a learning rate for them."
