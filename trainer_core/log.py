"""What happens in a run, written down as it happens: a CSV table, TensorBoard's event files, or both."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def __init__(
        self, kind: str, folder: Path, columns: Sequence[str], files: ExitStack, losses: Sequence[float] = ()
    ) -> None:
        """Begin the files in a folder, or go on in it; `files` closes them.

        columns: those of this run, lr_<what names of a model's layers begin with> and loss_<concept>. losses: of the
        steps that are over; what the files hold of later ones is taken out.
        """
        self.folder, self._losses = folder, losses
        parts = {column: column.split("_", 1) for column in columns}
        self._tags = TAGS | {column: OF_RUN[group] + name for column, (group, name) in parts.items()}
        self._smoothed: RunningMean | None = None
        self._table: Path | None = None
        self._events: Any = None
        if kind in ("csv", "both"):
            self._table, rows = folder / TABLE, _rows(folder / TABLE, len(losses))
            with self._table.open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(self._tags), extrasaction="ignore")
                table.writeheader()
                table.writerows(rows)
        if kind in ("tensorboard", "both"):
            from torch.utils.tensorboard import SummaryWriter  # here: it takes seconds, and few ask for it

            after = len(losses) + 1 if losses else 0  # readers forget what was written of these steps and later ones
            self._events = files.enter_context(SummaryWriter(str(folder), purge_step=after))

    def step(self, report: StepReport) -> None:
        """Write what a step did."""
        if self._smoothed is None:
            self._smoothed = RunningMean(window_of(report.steps))
            for loss in self._losses:
                self._smoothed.add(loss)
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
            with self._table.open("a", encoding="utf-8", newline="") as file:  # nothing waits for a later flush
                row = {"step": step, **{name: f"{value:.9g}" for name, value in known.items()}}
                csv.DictWriter(file, list(self._tags)).writerow(row)
        if self._events is not None:
            for name, value in known.items():
                if math.isfinite(value):
                    self._events.add_scalar(self._tags[name], value, step)
            self._events.flush()


def _rows(path: Path, steps: int) -> list[dict[str, str]]:
    """Return the rows of a table up to a step; none of a new one."""
    if not steps or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and int(row["step"]) <= steps]


@contextmanager
def logged(
    callbacks: Callbacks, kind: str, folder: Path | None, columns: Sequence[str], losses: Sequence[float] = ()
) -> Iterator[Callbacks]:
    """Return callbacks that also write a log into a folder, for the length of a `with` block; see Log.

    A disk that refuses it is told of once, and does not stop the run.
    """
    if kind == "none" or folder is None:
        yield callbacks
        return
    refused = False

    def told(error: OSError) -> None:
        nonlocal refused
        if not refused:
            callbacks.note(f"The log in {folder} cannot be written ({error.strerror}); the run goes on.")
        refused = True

    with ExitStack() as files:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = Log(kind, folder, columns, files, losses)
        except OSError as error:
            told(error)
            yield callbacks
            return

        def write(line: Callable[..., None], *values: Any) -> None:
            try:
                line(*values)
            except OSError as error:
                told(error)

        def step(report: StepReport) -> None:
            write(log.step, report)
            callbacks.step(report)

        def validation(steps: int, loss: float) -> None:
            write(log.validation, steps, loss)
            callbacks.validation(steps, loss)

        yield dataclasses.replace(callbacks, step=step, validation=validation)
