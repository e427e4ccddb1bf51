"""Sweep: one setting over a list of values, each a run of its own; Sweep Results: one table and one plot of them."""

from __future__ import annotations

import csv
import io as text_io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..trainer_core.common.wording import count, table_cell
from ..trainer_core.lora_files.lora import metadata_of
from ..trainer_core.runs.catalogue import describe_in_detail
from .comfyui import folders
from .node import Node
from .preview import to_image
from .sockets import CATEGORY, complaint, io, titled, ui
from .sweep_picture import LossCurve, draw_sweep

MOST = 100  # values
LONGEST = 200  # characters of a value


class AtelierSweep(Node):
    """Give several values, one after another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSweep",
            display_name=titled("Sweep"),
            category=CATEGORY,
            description="Tries one setting with several values. Link VALUE to a setting, such as learning_rate of "
            "Optimizer: everything behind it runs once for each value, and Train LoRA makes a run of each.",
            search_aliases=["grid search", "hyperparameter", "learning rate finder", "values", "for each", "atelier"],
            inputs=[
                io.String.Input(
                    "values",
                    default="1e-4, 2e-4, 5e-4",
                    multiline=True,
                    tooltip="The values, with commas or lines between them: numbers, or names of a list, such as "
                    "cosine. At most 100.",
                )
            ],
            outputs=[
                io.AnyType.Output(
                    display_name="VALUE", tooltip="For a setting of any node, one value a run.", is_output_list=True
                ),
                io.String.Output(display_name="TEXT", tooltip="For values of Sweep Results.", is_output_list=True),
            ],
        )

    @classmethod
    def validate_inputs(cls, values: str | None = None) -> bool | str:
        """Check the list."""
        return complaint(values, parse_values)

    @classmethod
    def execute(cls, values: str) -> io.NodeOutput:
        """Read the list."""
        found = parse_values(values)
        return io.NodeOutput([number(each) for each in found], found)


def parse_values(text: str) -> list[str]:
    """Read values by commas or lines, each once; raises ValueError for none and for too many."""
    found = list(dict.fromkeys(each.strip() for each in text.replace("\n", ",").split(",") if each.strip()))
    if not found:
        raise ValueError("values of Sweep is empty; write values with commas between them, such as 1e-4, 2e-4.")
    if len(found) > MOST or max(map(len, found)) > LONGEST:
        raise ValueError(f"values of Sweep is too long; write at most {MOST} values of {LONGEST} characters.")
    return found


def number(text: str) -> int | float | str:
    """Read a value as a whole number, a number, or a name."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


class Outcome(NamedTuple):
    """What became of one value."""

    value: str
    run: str  # the run's folder, "" if it is gone
    step: int
    loss: float | None  # the mean that stands for a run
    loss_words: str  # the same with its name
    validation: float | None  # the lowest, else None
    curve: LossCurve  # of the loss


class AtelierSweepResults(Node):
    """Gather the runs of a sweep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSweepResults",
            display_name=titled("Sweep Results"),
            category=CATEGORY,
            description="Gathers the runs of a Sweep: one table, one plot, and the LoRA of the best value.",
            search_aliases=["grid search", "compare runs", "learning rate", "plot", "table", "atelier"],
            is_output_node=True,
            is_input_list=True,
            inputs=[
                io.LoraModel.Input("lora", tooltip="LORA of Train LoRA, which ran once for each value."),
                io.String.Input("values", force_input=True, tooltip="TEXT of Sweep."),
            ],
            outputs=[
                io.Image.Output(display_name="PLOT", tooltip="The loss of each run."),
                io.String.Output(display_name="TABLE", tooltip="A line for each value, as CSV."),
                io.LoraModel.Output(
                    display_name="LORA",
                    tooltip="That of the lowest validation loss; without validation that of the lowest loss.",
                ),
                io.String.Output(display_name="VALUE", tooltip="Its value."),
            ],
        )

    @classmethod
    def execute(cls, lora: list[dict[str, torch.Tensor]], values: list[str]) -> io.NodeOutput:
        """Read the runs' logs."""
        if len(lora) != len(values):
            raise ValueError(
                f"Sweep Results got {count(lora, 'LoRA')} and {count(values, 'value')}; link LORA of the Train LoRA "
                "whose setting the same Sweep gives."
            )
        outcomes = [outcome(value, metadata_of(each)) for value, each in zip(values, lora, strict=True)]
        best = best_of(outcomes)
        plot = to_image(draw_sweep([(each.value, each.curve) for each in outcomes], best))
        report = "\n".join(described(each, marked=number == best) for number, each in enumerate(outcomes))
        chosen = best if best is not None else len(outcomes) - 1
        shown = {**ui.PreviewImage(plot, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(plot, table(outcomes), lora[chosen], outcomes[chosen].value, ui=shown)


def outcome(value: str, about: Mapping[str, str]) -> Outcome:
    """Read what became of a value from the run that its LoRA names."""
    run = folders.run_of_key(about.get("atelier.run", ""))
    found = describe_in_detail(folders.runs_folder() / run) if run else {}
    curves = found.get("curves") or {}
    losses = [(step, loss) for step, loss in curves.get("loss", []) if loss is not None]
    validation = [loss for _, loss in curves.get("validation", []) if loss is not None]
    return Outcome(
        value,
        run,
        found.get("step") or 0,
        found.get("loss"),
        found.get("loss_words", ""),
        min(validation, default=None),
        losses,
    )


def best_of(outcomes: Sequence[Outcome]) -> int | None:
    """Find the lowest validation loss, if all were validated, else the lowest loss; None where nothing is known."""
    for field in ("validation", "loss"):
        found = [getattr(each, field) for each in outcomes]
        if all(each is not None and math.isfinite(each) for each in found):
            return min(range(len(found)), key=found.__getitem__)
    return None


def described(each: Outcome, *, marked: bool) -> str:
    """Say what became of a value."""
    if not each.run:
        return f"{each.value}: its run is not in output/atelier/runs any more"
    parts = [each.loss_words or "no loss"]
    parts += [f"validation {each.validation:.4f}"] if each.validation is not None else []
    return f"{each.value}: {', '.join(parts)} after step {each.step}{', the best' if marked else ''}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Write a line for each value as CSV."""
    written = text_io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(["value", "loss", "validation", "steps", "run"])
    for each in outcomes:
        numbers = ["" if value is None else f"{value:.6f}" for value in (each.loss, each.validation)]
        lines.writerow(map(table_cell, [each.value, *numbers, each.step, each.run]))
    return written.getvalue()
