"""Memory: trade speed for memory."""

from __future__ import annotations

from ..trainer_core.config import MemoryConfig
from .node import Node
from .sockets import CATEGORY, MemorySocket, io, titled


class AtelierMemory(Node):
    """Fix memory settings that are automatic otherwise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierMemory",
            display_name=titled("Memory"),
            category=CATEGORY,
            description="Optional: trades time for memory. Train LoRA estimates what a run needs and picks the fastest "
            "settings that fit; here you can fix each of them. The trained weights stay the same but for rounding.",
            search_aliases=[
                "vram",
                "gradient checkpointing",
                "offload",
                "torch compile",
                "xformers",
                "low memory",
                "atelier",
            ],
            inputs=[
                io.Combo.Input(
                    "checkpointing",
                    options=["auto", "0", "1", "2", "3", "4", "full"],
                    default="auto",
                    tooltip="Gradient checkpointing: how much is computed twice instead of kept. 0 = nothing: "
                    "fastest. full = every block: least memory, about a third slower. The levels between save most "
                    "for the least time first.",
                ),
                io.Combo.Input(
                    "offload_weights",
                    options=["auto", "none", "half", "all"],
                    default="auto",
                    tooltip="How many of the base model's frozen weights wait in RAM and move to the GPU ahead of "
                    "their use. No effect on the CPU.",
                ),
                io.Combo.Input(
                    "offload_activations",
                    options=["auto", "off", "on"],
                    default="auto",
                    tooltip="on: activations wait in RAM until the backward pass. Slow; for the largest pictures only.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "attention",
                    options=["auto", "flash", "efficient", "cudnn", "math", "xformers"],
                    default="auto",
                    tooltip="Which attention kernel a GPU uses: one of torch's, or that of the package xformers where "
                    "it is installed. auto: flash where it runs, else efficient, which is xformers' own in torch. A "
                    "kernel of torch that cannot run on your card ends the run with torch's own message.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "channels_last",
                    options=["auto", "off", "on"],
                    default="auto",
                    tooltip="Memory format of convolutions. auto: on for 16-bit numbers on a GPU.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "compile",
                    default=False,
                    tooltip="torch.compile of the model's blocks: a minute or more at the start, faster steps after. "
                    "Needs a C++ compiler, on GPUs Triton; where it fails the run continues without it, and the "
                    "report says so.",
                ),
                io.Combo.Input(
                    "encodings",
                    options=["disk", "RAM", "none"],
                    default="disk",
                    optional=True,
                    tooltip="Where encoded pictures and captions are kept. disk: in the pack's cache, where the next "
                    "run finds them. RAM: nothing is written, and every run encodes them anew; for small disks. none: "
                    "nothing is kept, and each step encodes what it trains; slower, with the same numbers.",
                    advanced=True,
                ),
            ],
            outputs=[MemorySocket.Output(display_name="MEMORY", tooltip="For Train LoRA's input memory.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(MemoryConfig(**values))
