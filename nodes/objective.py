"""What is learned at which noise level."""

from __future__ import annotations

from ..trainer_core.config import ObjectiveConfig
from .sockets import CATEGORY, ObjectiveSocket, io


class AtelierObjective(io.ComfyNode):
    """What is learned at which noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierObjective",
            display_name="Noise & Loss",
            category=CATEGORY,
            description="Optional: how errors weigh at each noise level. Without this node every timestep weighs the "
            "same and noise is plain.",
            search_aliases=["min snr", "noise offset", "timestep", "loss", "train lora", "atelier"],
            inputs=[
                io.Float.Input(
                    "min_snr_gamma",
                    default=5.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Weighs down nearly clean pictures, whose loss drowns the rest (Min-SNR). 5 is usual, "
                    "0 = every timestep weighs the same.",
                ),
                io.Float.Input(
                    "noise_offset",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Shifts the brightness of the noise, so that very dark and very bright pictures can be "
                    "learned. 0.03 to 0.1 is usual, 0 = off.",
                ),
                io.Int.Input(
                    "min_timestep",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="The least noise that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
                io.Int.Input(
                    "max_timestep",
                    default=999,
                    min=0,
                    max=999,
                    tooltip="The most noise that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
            ],
            outputs=[ObjectiveSocket.Output(display_name="OBJECTIVE", tooltip="For Train LoRA's input objective.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(ObjectiveConfig(**values))
