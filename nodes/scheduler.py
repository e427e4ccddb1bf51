"""Scheduler: the learning rate's curve over the run."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import SchedulerConfig
from ..trainer_core.workflow.settings import read_scheduler
from .node import Node
from .sockets import CATEGORY, SchedulerSocket, io, titled


def options() -> list[io.DynamicCombo.Option]:
    """List the shapes with their own inputs; the first is the default."""
    cycles = io.Int.Input(
        "cycles",
        default=2,
        min=1,
        max=100,
        tooltip="How often the rate starts from its peak, 1 to 100. 2 = one restart.",
    )
    d = io.Float.Input(
        "d",
        default=0.9,
        min=0.0,
        max=0.999,
        step=0.01,
        round=1e-6,
        tooltip="How long the rate stays high, 0 to 0.999. 0 is a straight line, 0.5 as in the paper, 0.9 usual "
        "for LoRAs.",
    )
    fields: dict[str, list[io.Input]] = {
        "cosine": [],
        "constant": [],
        "linear": [],
        "rex": [d],
        "rex_restarts": [
            cycles,
            io.Float.Input(
                "gamma",
                default=0.9,
                min=0.0,
                max=1.0,
                step=0.01,
                round=1e-6,
                tooltip="Each cycle's peak as a share of the one before, 0 to 1. 1 = all start as high as the first.",
            ),
            d,
            io.Float.Input(
                "cycle_multiplier",
                default=1.0,
                min=0.1,
                max=10.0,
                step=0.1,
                round=1e-6,
                tooltip="Each cycle's length as a multiple of the one before, 0.1 to 10. 1 = all are equally long.",
            ),
        ],
        "cosine_with_restarts": [cycles],
        "cosine_soft_restarts": [cycles],
        "polynomial": [
            io.Float.Input(
                "power",
                default=2.0,
                min=0.01,
                max=100.0,
                step=0.1,
                round=1e-6,
                tooltip="How steeply the rate falls at first, 0.01 to 100. 1 is a straight line, 2 a parabola; "
                "below 1 it stays high and falls at the end.",
            )
        ],
        "inverse_sqrt": [
            io.Int.Input(
                "timescale",
                default=100,
                min=1,
                max=1_000_000,
                tooltip="Steps that set the pace: after 3 times this many the rate has halved. 1 to 1000000.",
            )
        ],
        "warmup_stable_decay": [
            io.Float.Input(
                "decay_share",
                default=0.2,
                min=0.001,
                max=1.0,
                step=0.01,
                round=1e-6,
                tooltip="The last share of the curve, in which the rate falls, 0.001 to 1. 0.1 to 0.2 is usual.",
            ),
            io.Combo.Input(
                "decay_shape",
                options=["linear", "cosine", "1-sqrt"],
                default="linear",
                tooltip="How the rate falls: a straight line, half a cosine, or fast and then ever slower (1-sqrt).",
            ),
        ],
        "one_cycle": [
            io.Float.Input(
                "rise_share",
                default=0.3,
                min=0.001,
                max=0.999,
                step=0.01,
                round=1e-6,
                tooltip="The first share of the curve, in which the rate rises, 0.001 to 0.999. 0.3 is usual.",
            ),
            io.Float.Input(
                "start",
                default=0.04,
                min=0.0,
                max=1.0,
                step=0.01,
                round=1e-6,
                tooltip="The first factor on the learning rate, 0 to 1. The curve ends at min_lr_ratio.",
            ),
        ],
        "expression": [
            io.String.Input(
                "expression",
                default="0.5 * (1 + cos(pi * t))",
                tooltip="A formula of the factor on the learning rate, 0 or more. It may use t (0 at the first step "
                "after the warm-up, 1 at the end), step and total (steps after the warm-up, from 0), + - * / // % **, "
                "comparisons, a if b else c, sin cos tan exp log sqrt min max abs floor ceil, pi and e.",
            )
        ],
        "points": [
            io.String.Input(
                "points",
                default="0:0, 0.1:1, 0.6:1, 1:0",
                multiline=True,
                tooltip="A curve of points: position:factor, separated by commas. Positions lie between 0 (first "
                "step after the warm-up) and 1 (the end), factors are 0 or more; straight lines join them. "
                "The same position twice makes a jump.",
            )
        ],
    }
    return [io.DynamicCombo.Option(key, inputs) for key, inputs in fields.items()]


class AtelierScheduler(Node):
    """Choose the learning rate's curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierScheduler",
            display_name=titled("Scheduler"),
            category=CATEGORY,
            description="How the learning rate changes from the first step to the last; drawn on the node.",
            search_aliases=["learning rate schedule", "cosine", "rex", "restarts", "warmup", "train lora", "atelier"],
            inputs=[
                io.DynamicCombo.Input(
                    "name",
                    options=options(),
                    tooltip="cosine: slow, fast, slow down; a good choice for most runs. constant: the same "
                    "throughout. linear: a straight line down. rex: high for long, then fast down. "
                    "rex_restarts and cosine_with_restarts start again from a peak, cosine_soft_restarts "
                    "swings back up. polynomial, inverse_sqrt: steep at first. warmup_stable_decay: full "
                    "until the last part. one_cycle: up, then down. expression, points: your own curve.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="How long the learning rate rises from near 0, in steps or percent (warmup_unit). 0 = "
                    "no warm-up; 5 to 10 percent of the run helps with high learning rates.",
                ),
                io.Float.Input(
                    "min_lr_ratio",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-6,
                    tooltip="The floor, as a share of the learning rate, 0 to 1: the curve runs between it and the "
                    "full rate. 0 = a falling curve ends at 0.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "warmup_unit",
                    options=["steps", "percent"],
                    default="steps",
                    optional=True,
                    tooltip="The unit of warmup_steps: steps, or percent of the whole curve (then up to 99).",
                    advanced=True,
                ),
                io.Int.Input(
                    "planned_steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip="The steps that the curve is made for. 0 = the steps of this run; where a finished run "
                    "is made longer, its curve stays, and the added steps keep its last rate. For a new curve over "
                    "all steps, set this to the new number of steps: the rate then rises to that curve. More steps "
                    "than the run has train only the first part of a longer curve.",
                    advanced=True,
                ),
            ],
            outputs=[SchedulerSocket.Output(display_name="SCHEDULER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, name: dict[str, Any] | None = None, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(build_scheduler(name, values))


def build_scheduler(name: dict[str, Any] | None, values: dict[str, Any]) -> SchedulerConfig:
    """Build and check the configuration of the node's inputs; raises ValueError for an invalid curve."""
    if name is None:  # how ComfyUI passes an option that it does not know
        raise ValueError(f"name of Scheduler is unknown; set it to one of {[option.key for option in options()]}.")
    return read_scheduler(name, **values)
