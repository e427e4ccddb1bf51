"""What is given up for memory or speed."""

from __future__ import annotations

from ..trainer_core.config import MemoryConfig
from .sockets import CATEGORY, MemorySocket, io


class AtelierMemory(io.ComfyNode):
    """Memory settings, when the automatic ones are not what a person wants."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierMemory",
            display_name="Memory",
            category=CATEGORY,
            description="Optional: trades time for memory. Train LoRA estimates what a run needs and picks the fastest "
            "settings that fit by itself; here each can be fixed. What is learned stays the same.",
            search_aliases=["vram", "gradient checkpointing", "offload", "torch compile", "low memory", "atelier"],
            inputs=[
                io.Combo.Input(
                    "checkpointing",
                    options=["auto", "0", "1", "2", "3", "4", "full"],
                    default="auto",
                    tooltip="How much is computed a second time instead of kept (gradient checkpointing). 0 = nothing: "
                    "fastest. full = every block: least memory, about a third slower. The levels between begin with "
                    "what saves most for least time.",
                ),
                io.Combo.Input(
                    "offload_weights",
                    options=["auto", "none", "half", "all"],
                    default="auto",
                    tooltip="How many of the base model's frozen weights wait in RAM and are brought to the GPU ahead "
                    "of their use. Without effect on the CPU, where they are in RAM anyway.",
                ),
                io.Combo.Input(
                    "offload_activations",
                    options=["auto", "off", "on"],
                    default="auto",
                    tooltip="on: what the backward pass needs waits in RAM. Slow, and for the largest pictures only.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "attention",
                    options=["auto", "flash", "efficient", "cudnn", "math"],
                    default="auto",
                    tooltip="Which of torch's attention kernels a GPU uses. auto: flash where it runs, else efficient. "
                    "A kernel that cannot run on your card ends the run with torch's own message.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "channels_last",
                    options=["auto", "off", "on"],
                    default="auto",
                    tooltip="Memory order of convolutions. auto: on for 16-bit numbers on a GPU.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "compile",
                    default=False,
                    tooltip="torch.compile of the model's blocks: a minute or more at the start, faster steps after. "
                    "Needs a C++ compiler, on GPUs Triton; where it does not work the run goes on without, and says "
                    "so.",
                ),
            ],
            outputs=[MemorySocket.Output(display_name="MEMORY", tooltip="For Train LoRA's input memory.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(MemoryConfig(**values))
