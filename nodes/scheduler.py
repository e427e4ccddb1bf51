"""The learning rate's shape."""

from __future__ import annotations

from ..trainer_core.config import SchedulerConfig
from .sockets import CATEGORY, SchedulerSocket, io


class AtelierScheduler(io.ComfyNode):
    """The learning rate's shape over the run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierScheduler",
            display_name="Scheduler",
            category=CATEGORY,
            description="How the learning rate changes from the first step to the last.",
            search_aliases=["learning rate schedule", "cosine", "warmup", "train lora", "atelier"],
            inputs=[
                io.Combo.Input(
                    "name",
                    options=["constant", "linear", "cosine"],
                    default="cosine",
                    tooltip="constant: the same throughout. linear: a straight line down. cosine: slow, fast, slow "
                    "down; a good choice for most runs.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps in which the learning rate rises from 0 before the shape begins. 0 = none.",
                ),
                io.Float.Input(
                    "min_lr_ratio",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-6,
                    tooltip="Where linear and cosine end, as a share of the learning rate, 0 to 1.",
                    advanced=True,
                ),
            ],
            outputs=[SchedulerSocket.Output(display_name="SCHEDULER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(SchedulerConfig(**values))
