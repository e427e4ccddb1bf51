"""What happens in a run, written down as it happens: a CSV table, TensorBoard's event files, or both."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .callbacks import Callbacks, StepReport
from .smooth import RunningMean, window_of

TABLE = "log.csv"
# Columns of every table, and the names of their curves in TensorBoard.
TAGS = {
    "step": "",
    "epoch": "time/epoch",
    "loss": "loss/step",
    "smoothed": "loss/smoothed",
    "validation": "loss/validation",
    "grad_norm": "gradient/norm",
    "noise_scale": "gradient/noise_scale",
    "skipped": "gradient/skipped",
    "seconds": "time/seconds",
    "peak_gb": "memory/peak_gb",
}
# Columns that only this run has begin so: lr_<model>, loss_<concept>.
OF_RUN = {"lr": "lr/", "loss": "concept/"}


def check_log(kind: str, folder: Path | None) -> None:
    """Raise ValueError when the log that is asked for cannot be written."""
    if kind != "none" and folder is None:
        raise ValueError(f"log is {kind}, and no folder for logs was given; give one, or set log to none.")
    if kind in ("tensorboard", "both") and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(f"log is {kind}, which needs the package tensorboard: pip install tensorboard; or choose csv.")


class Log:
    """Writes a row for each step and each validation loss; every row is on the disk before the run goes on."""

    def __init__(self, kind: str, folder: Path, columns: Sequence[str], files: ExitStack) -> None:
        """Begin the files in an empty folder; `files` closes them.

        columns: those of this run, lr_<what names of a model's layers begin with> and loss_<concept>.
        """
        self.folder = folder
        parts = {column: column.split("_", 1) for column in columns}
        self._tags = TAGS | {column: OF_RUN[group] + name for column, (group, name) in parts.items()}
        self._smoothed: RunningMean | None = None
        self._table: csv.DictWriter[str] | None = None
        self._events: Any = None
        if kind in ("csv", "both"):
            self._file = files.enter_context((folder / TABLE).open("w", encoding="utf-8", newline=""))
            self._table = csv.DictWriter(self._file, list(self._tags))
            self._table.writeheader()
        if kind in ("tensorboard", "both"):
            from torch.utils.tensorboard import SummaryWriter  # here: it takes seconds, and few ask for it

            self._events = files.enter_context(SummaryWriter(str(folder)))

    def step(self, report: StepReport) -> None:
        """Write what a step did."""
        if self._smoothed is None:
            self._smoothed = RunningMean(window_of(report.steps))
        values = {
            "epoch": report.epoch,
            "loss": report.loss,
            "smoothed": self._smoothed.add(report.loss),
            "grad_norm": report.grad_norm,
            "noise_scale": report.noise_scale,
            "skipped": int(not report.updated),
            "seconds": report.seconds,
            "peak_gb": None if report.peak_memory is None else report.peak_memory / 1e9,
            **{f"lr_{model}": rate for model, rate in report.learning_rates.items()},
            **{f"loss_{concept}": loss for concept, loss in report.concepts.items()},
        }
        self._write(report.step, values)

    def validation(self, steps: int, loss: float) -> None:
        """Write the loss of the validation pictures, in a row of its own."""
        self._write(steps, {"validation": loss})

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write some columns of a row."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._table is not None:
            self._table.writerow({"step": step, **{name: f"{value:.9g}" for name, value in known.items()}})
            self._file.flush()
        if self._events is not None:
            for name, value in known.items():
                if math.isfinite(value):
                    self._events.add_scalar(self._tags[name], value, step)
            self._events.flush()


@contextmanager
def logged(
    callbacks: Callbacks, kind: str, folder: Path | None, name: str, columns: Sequence[str]
) -> Iterator[tuple[Callbacks, Path | None]]:
    """Return callbacks that also write a log, and its own folder, for the length of a `with` block.

    folder: where logs are; this one's is <name> there, with a number added when that is taken. columns: see Log.
    """
    if kind == "none" or folder is None:
        yield callbacks, None
        return
    with ExitStack() as files:
        log = Log(kind, _new_folder(folder / name), columns, files)

        def step(report: StepReport) -> None:
            log.step(report)
            callbacks.step(report)

        def validation(steps: int, loss: float) -> None:
            log.validation(steps, loss)
            callbacks.validation(steps, loss)

        yield dataclasses.replace(callbacks, step=step, validation=validation), log.folder


def _new_folder(folder: Path) -> Path:
    """Make and return a folder, the first of name, name-2, name-3 … that does not exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        else:
            return candidate
