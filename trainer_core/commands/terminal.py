"""Show a run in a shell: one live line on a terminal, plain lines elsewhere, or an event in JSON per line."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ..common.callbacks import Callbacks, StepReport
from ..common.json_files import finite
from ..common.remaining import Remaining
from ..common.smooth import MEAN_OF, say_loss
from ..common.wording import count, printable
from ..runs.folder import RunFolder, open_run

PARTS = 100  # of a run: plain output has a line for each
INTERVAL = 0.1  # seconds between two changes of the live line
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Screen:
    """Writes what happens to a stream: as text for people, or as JSON for programs."""

    def __init__(self, stream: TextIO, *, as_json: bool, silent: bool = False) -> None:
        """Write to a stream; silent: nothing, in a process that does not lead."""
        self._stream, self._json, self.silent = stream, as_json, silent
        self._live = not as_json and stream.isatty()
        self._shown = False  # a live line stands below the text
        self._changed = -math.inf  # when the live line changed last

    def tell(self, event: str, said: str = "", /, **values: Any) -> None:
        """Tell of an event: a text for people, values for programs."""
        if self._json:
            self._write(json.dumps({"event": event, **finite(values)}) + "\n")
        elif said:
            self._write(self._cleared() + "".join(f"{printable(line)}\n" for line in said.splitlines()))

    def status(self, event: str, said: str, /, *, milestone: bool, **values: Any) -> None:
        """Tell of progress: on a terminal a text replaces the one before; plain output has the milestones only."""
        if not self._live:
            if self._json or milestone:
                self.tell(event, said, **values)
        elif milestone or time.monotonic() - self._changed >= INTERVAL:
            self._changed = time.monotonic()
            self._write(self._cleared() + printable(said)[: _width()])
            self._shown = True

    def _cleared(self) -> str:
        # Spaces, as Windows' older consoles print escape codes as text.
        cleared, self._shown = f"\r{' ' * _width()}\r" if self._shown else "", False
        return cleared

    def _write(self, text: str) -> None:
        if not self.silent:
            self._stream.write(text)
            self._stream.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns - 1


class TerminalProgress:
    """Shows one run, and writes its notes into its log, where the page finds them."""

    def __init__(self, screen: Screen, wanted: Mapping[str, str] | None = None) -> None:
        """Show a run on a screen; wanted: sha256 of the model files that its description names, by role."""
        self.screen = screen
        self._wanted = wanted or {}
        self.began = False  # the run has a folder, and trains
        self._log: RunFolder | None = None
        self._notes: list[str] = []  # before there is a log
        self._losses: deque[float] = deque(maxlen=MEAN_OF)
        self._remaining = Remaining()
        self._started = False

    def callbacks(self, stop: Stop) -> Callbacks:
        """Build the core's callbacks."""
        return Callbacks(
            phase=self._phase,
            run=self._begin,
            step=self._step,
            validation=self._validated,
            note=self.note,
            check=stop.check,
            resumed=self._resumed,
            samples=self._samples,
        )

    def note(self, text: str) -> None:
        """Show a note, and write it into the run's log."""
        self.screen.tell("note", text, text=text)
        self._notes.append(text)
        self._record("note", text=text)

    def _record(self, event: str, **values: Any) -> None:
        if self._log is not None:
            with suppress(OSError):  # the core itself tells of a disk that refuses
                self._log.log(event, **values)

    def _phase(self, phase: str, done: int, total: int) -> None:
        text = f"{phase} {done} of {total}" if total > 1 else phase
        self.screen.status("phase", text, milestone=done in (0, total), phase=phase, done=done, total=total)

    def _begin(self, path: Path, trained: bool) -> None:
        self.screen.tell("run", folder=str(path), trained=trained)
        self.began = trained
        if trained:
            self._log = open_run(path)
            self._record("begun")
            for text in self._notes:
                self._record("note", text=text)
            for role, digest in self._log.about.get("models", {}).items():
                if self._wanted.get(role, digest) != digest:
                    self.note(f"The {role} of the model is another file than the run's (sha256 {self._wanted[role]}).")

    def _resumed(self, losses: Sequence[float], *_: object) -> None:
        self._losses.extend(losses[-MEAN_OF:])

    def _step(self, report: StepReport) -> None:
        now = time.perf_counter()
        first = not self._started
        self._started = True
        self._remaining.add(report.step, now, report.seconds)
        self._losses.append(report.loss)
        loss = say_loss(list(self._losses))
        text = "  ".join([f"step {report.step} of {report.steps}", *self._remaining.texts(report.steps), loss])
        part = report.step * PARTS // report.steps > (report.step - 1) * PARTS // report.steps
        numbers = {"loss": report.loss, "rate": report.learning_rates, "seconds": report.seconds}
        self.screen.status(
            "step", text, milestone=first or part, step=report.step, steps=report.steps, **numbers, epoch=report.epoch
        )

    def _validated(self, steps: int, loss: float) -> None:
        self.screen.tell("validation", step=steps, loss=loss)
        self.note(f"Validation loss after {count(steps, 'step')}: {loss:.4f}")

    def _samples(self, steps: int, pictures: Sequence[Path]) -> None:
        text = f"Samples after {count(steps, 'step')}: {', '.join(map(str, pictures))}"
        self.screen.tell("samples", text, step=steps, files=list(map(str, pictures)))


class Stop:
    """A stop that a signal asks for: Ctrl+C, or the system that ends the process."""

    def __init__(self, screen: Screen) -> None:
        self.number = 0  # of the signal
        self._screen = screen

    def check(self) -> None:
        """Raise KeyboardInterrupt once a signal came."""
        if self.number:
            raise KeyboardInterrupt

    def ask(self, number: int, _: object) -> None:
        """Ask for the stop; the next signal ends the process at once."""
        self.number = number
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        self._screen.tell("stopping", "Stopping: the run is saved first. Press Ctrl+C again to end it at once.")


@contextmanager
def stopping(screen: Screen) -> Iterator[Stop]:
    """Let a signal stop the run for the length of a `with` block."""
    stop = Stop(screen)
    before = {number: signal.signal(number, stop.ask) for number in ENDING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
