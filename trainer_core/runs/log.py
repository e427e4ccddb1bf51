"""Log every step of a run: as a CSV table, as TensorBoard event files with its samples, or both."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..common.callbacks import Callbacks, StepReport
from ..common.files import written_whole
from ..common.leftovers import sweep
from ..common.sample_names import tag_of
from ..common.smooth import RunningMean, window_of
from ..config import setting

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
# Prefixes of the columns that depend on the run: lr_<group of the optimizer>, loss_<concept>, validation_<noise level>.
OF_RUN = {"lr": "lr/", "loss": "concept/", "validation": "validation/level_"}


def check_log(kind: str, folder: Path | None) -> None:
    """Raise ValueError if a log of this kind cannot be written."""
    if kind != "none" and folder is None:
        raise ValueError(f"log is {kind}, but there is no folder for logs; set {setting('train.log')} to none.")
    if kind in ("tensorboard", "both"):
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"log is {kind}, which needs the package tensorboard; install it with ComfyUI's Python, or choose csv."
            ) from error


class Log:
    """Writes a row for each step and each validation loss, on the disk before the next step; also pictures."""

    def __init__(
        self, kind: str, folder: Path, columns: Sequence[str], files: ExitStack, losses: Sequence[float] = ()
    ) -> None:
        """Create or reopen the files in a folder; `files` closes them.

        columns: those of this run, see OF_RUN. losses: of the steps finished so far; rows of later steps are removed.
        """
        self.folder, self._losses = folder, losses
        parts = {column: column.split("_", 1) for column in columns}
        self._tags = TAGS | {column: OF_RUN[group] + name for column, (group, name) in parts.items()}
        self._smoothed: RunningMean | None = None
        self._table: Path | None = None
        self._events: Any = None
        if kind in ("csv", "both"):
            self._table, rows = folder / TABLE, _rows(folder / TABLE, len(losses))
            with written_whole(self._table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, list(self._tags), extrasaction="ignore")
                table.writeheader()
                table.writerows(rows)
        if kind in ("tensorboard", "both"):
            from torch.utils.tensorboard import SummaryWriter  # imported here: it takes seconds, and few use it

            after = len(losses) + 1 if losses else 0  # TensorBoard drops earlier events from this step on
            self._events = files.enter_context(SummaryWriter(str(folder), purge_step=after))

    def step(self, report: StepReport) -> None:
        """Write the row of a step."""
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
            **{f"lr_{group}": rate for group, rate in report.learning_rates.items()},
            **{f"loss_{concept}": loss for concept, loss in report.concepts.items()},
        }
        self._write(report.step, values)

    def validation(self, steps: int, loss: float) -> None:
        """Write the loss of the validation pictures, in a row of its own."""
        self._write(steps, {"validation": loss})

    def validation_levels(self, steps: int, losses: Mapping[int, float]) -> None:
        """Write the losses of the validation pictures at single noise levels, in a row of their own."""
        self._write(steps, {f"validation_{level}": loss for level, loss in losses.items()})

    def samples(self, step: int, paths: Sequence[Path]) -> None:
        """Show what was drawn after a step, each prompt under a name of its own, of clips the first frame.

        Only in TensorBoard.
        """
        import numpy as np  # imported here, so that lists of runs need no image library
        from PIL import Image

        for path in paths:
            with Image.open(path) as picture:
                pixels = np.array(picture.convert("RGB"))
            self._events.add_image(f"samples/{tag_of(path.name)}", pixels, step, dataformats="HWC")
        self._events.flush()

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the given columns of a row."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._table is not None:
            with self._table.open(
                "a", encoding="utf-8", newline=""
            ) as file:  # closed at once, so that no row waits in a buffer
                row = {"step": step, **{name: f"{value:.9g}" for name, value in known.items()}}
                csv.DictWriter(file, list(self._tags)).writerow(row)
        if self._events is not None:
            for name, value in known.items():
                if math.isfinite(value):
                    self._events.add_scalar(self._tags[name], value, step)
            self._events.flush()


def _rows(path: Path, steps: int) -> list[dict[str, str]]:
    """Read the rows of a table up to step `steps`; none if the file is new, and none after damage."""
    if not steps or not path.is_file():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file, suppress(csv.Error):
        for row in csv.DictReader(file):
            step = row.get("step") or ""
            if step.isdecimal() and len(step) < 20 and int(step) <= steps:
                rows.append(row)
    return rows


@contextmanager
def logged(callbacks: Callbacks, kind: str, folder: Path | None, columns: Sequence[str]) -> Iterator[Callbacks]:
    """Yield callbacks that also write a log into a folder, from the first step, validation loss or picture on; see Log.

    columns may be filled in until then.

    A disk error does not stop the run; one note reports it.
    """
    if kind == "none" or folder is None:
        yield callbacks
        return
    earlier: list[float] = []  # losses of the steps before a resumed run's first one
    logs: list[Log] = []
    refused = False

    def write(event: str, *values: Any) -> None:
        nonlocal refused
        try:
            if not logs and not refused:
                folder.mkdir(parents=True, exist_ok=True)
                sweep([folder])
                logs.append(Log(kind, folder, columns, files, tuple(earlier)))
            for log in logs:
                getattr(log, event)(*values)
        except OSError as error:
            if not refused:
                callbacks.note(f"The log in {folder} cannot be written ({error.strerror}); training continues.")
            refused = True

    def step(report: StepReport) -> None:
        write("step", report)
        callbacks.step(report)

    def validation(steps: int, loss: float) -> None:
        write("validation", steps, loss)
        callbacks.validation(steps, loss)

    def validation_levels(steps: int, losses: Mapping[int, float]) -> None:
        write("validation_levels", steps, losses)
        callbacks.validation_levels(steps, losses)

    def samples(step: int, paths: Sequence[Path]) -> None:
        if kind != "csv":  # a table has no pictures
            write("samples", step, paths)
        callbacks.samples(step, paths)

    def resumed(losses: Sequence[float], *history: Any) -> None:
        earlier[:] = losses
        callbacks.resumed(losses, *history)

    with ExitStack() as files:
        own = {"validation_levels": validation_levels, "samples": samples, "resumed": resumed}
        yield dataclasses.replace(callbacks, step=step, validation=validation, **own)
