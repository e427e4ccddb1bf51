"""The network that is trained."""

from __future__ import annotations

from ..trainer_core.config import LoraConfig
from .sockets import CATEGORY, LoraConfigSocket, io


class AtelierLoraConfig(io.ComfyNode):
    """The network that is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierLoraConfig",
            display_name="LoRA Config",
            category=CATEGORY,
            description="How large the LoRA is and which layers of the model it changes.",
            search_aliases=["rank", "network dim", "alpha", "lora network", "train lora", "kohya", "atelier"],
            inputs=[
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip="Size of the LoRA in each layer (network dim). 8 to 32 suits a character or a style; the "
                    "file grows with it. Range 1 to 4096.",
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
                    options=["attn-only", "attn-mlp", "full"],
                    default="attn-mlp",
                    tooltip="Which layers are trained. attn-only: attention. attn-mlp: attention and the layers "
                    "between (what most LoRAs train). full: all of these and the convolutions; best for styles.",
                ),
                io.Int.Input(
                    "conv_rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Rank of the 3x3 convolutions with the preset full; 0 = the same as rank.",
                    advanced=True,
                ),
                io.Float.Input(
                    "conv_alpha",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Alpha of the 3x3 convolutions with the preset full; 0 = the same as alpha.",
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
            ],
            outputs=[LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(LoraConfig(**values))
