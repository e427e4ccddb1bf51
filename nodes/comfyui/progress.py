"""Show a run on its node: progress bar, live text, pictures, notes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import comfy.model_management
import comfy.utils
from PIL import Image
from server import PromptServer

from ...trainer_core.common.callbacks import Callbacks, StepReport
from ..plot import draw_grid, draw_losses

SAVED_EVENT = "atelier.lora_saved"
TEXT_INTERVAL = 0.2  # seconds between two lines of live text
PLOT_INTERVAL = 5.0  # seconds between two live pictures of the losses
PLOT_SHARE = 0.005  # of the time that drawing them may take
SAMPLES_SHOWN = 15.0  # seconds before the losses take the place of samples again
MOST_CONCEPTS = 4  # whose losses are in the line of live text
# What drawing, reading and sending pictures and text may raise: a run does not end because nobody can watch it.
UNSEEN = (OSError, ValueError, RuntimeError, MemoryError)


class NodeProgress:
    """Show a run on its node: progress bar, one line of live text, losses so far; and let Cancel stop it."""

    def __init__(self, node_id: str, name: str = "") -> None:
        self.node_id = node_id
        self.notes: list[str] = []
        self._name = name
        self._bar = comfy.utils.ProgressBar(1, node_id=node_id)
        self._losses: list[float] = []
        self._concepts: dict[str, list[float]] = {}
        self._measured: list[tuple[int, float]] = []
        self._before = 0  # steps of the run that this one resumes
        self._began = self._shown = self._next_plot = 0.0
        self._unseen = False

    def callbacks(self, asked: Callable[[], Collection[str]] = tuple) -> Callbacks:
        """Build the core's callbacks; asked: returns what people have requested since its last call."""
        return Callbacks(
            phase=self._phase,
            step=self._step,
            validation=self._validation,
            note=self._note,
            check=comfy.model_management.throw_exception_if_processing_interrupted,
            resumed=self._resumed,
            samples=self._samples,
            asked=asked,
        )

    def text(self, text: str) -> None:
        """Show a text on the node."""
        self._show(lambda: PromptServer.instance.send_progress_text(text, self.node_id))

    def _show(self, show: Callable[[], object]) -> None:
        """Show something; note a failure once and carry on."""
        try:
            show()
        except comfy.model_management.InterruptProcessingException:
            comfy.model_management.interrupt_current_processing()  # a run ends at its own checks, not while it saves
        except UNSEEN as problem:
            if not self._unseen:
                self._unseen = True
                self.notes.append(
                    f"The node could not show everything while it trained; the training is not affected: {problem}"
                )

    def _phase(self, phase: str, done: int, total: int) -> None:
        self._live(f"{phase} {done}/{total}", at_once=done == total)
        self._show(lambda: self._bar.update_absolute(done, total))

    def _resumed(
        self, losses: Sequence[float], concepts: Mapping[str, Sequence[float]], measured: Sequence[tuple[int, float]]
    ) -> None:
        self._before, self._losses, self._measured = len(losses), list(losses), list(measured)
        self._concepts = {name: list(curve) for name, curve in concepts.items()}

    def _step(self, report: StepReport) -> None:
        now, first = time.perf_counter(), not self._began
        if first:
            self._began = now - report.seconds
            self._next_plot = max(self._next_plot, now + PLOT_INTERVAL)
        self._losses.append(report.loss)
        for name in {*self._concepts, *report.concepts}:
            curve = self._concepts.setdefault(name, [math.nan] * (report.step - 1))
            curve.append(report.concepts.get(name, math.nan))
        each = (now - self._began) / (report.step - self._before)
        parts = [f"step {report.step}/{report.steps}", f"loss {recent(self._losses):.4f}"]
        if 1 < len(self._concepts) <= MOST_CONCEPTS:
            parts += [f"{name} {recent(curve):.4f}" for name, curve in sorted(self._concepts.items())]
        if self._measured:
            parts.append(f"validation {self._measured[-1][1]:.4f}")
        if report.masked_area is not None:
            parts.append(f"mask {report.masked_area:.0%}")
        parts.append(f"lr {next(iter(report.learning_rates.values())):.2g}")
        parts += [speed(each), f"{clock(each * (report.steps - report.step))} left"]
        self._live(" · ".join(parts), at_once=first or report.step == report.steps)
        self._show(lambda: self._bar.update_absolute(report.step, report.steps))
        if now >= self._next_plot:
            self._show(lambda: self._plot(report.step))
            done = time.perf_counter()
            self._next_plot = done + max(PLOT_INTERVAL, (done - now) / PLOT_SHARE)

    def _plot(self, steps: int) -> None:
        title = f"{self._name}: loss over {steps} steps"
        self._preview(draw_losses(self._losses, title, self._measured, self._concepts))

    def _samples(self, _: int, paths: Sequence[Path]) -> None:
        self._show(lambda: self._preview(draw_grid([read_picture(path) for path in paths])))
        self._next_plot = time.perf_counter() + SAMPLES_SHOWN

    def _preview(self, picture: Image.Image) -> None:
        """Show a picture on the node."""
        self._bar.update_absolute(self._bar.current, preview=("JPEG", picture, max(picture.size)))

    def _validation(self, steps: int, loss: float) -> None:
        self._measured.append((steps, loss))
        self._note(f"Validation loss after {steps} steps: {loss:.4f}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.text(text)

    def _live(self, text: str, at_once: bool) -> None:
        now = time.perf_counter()
        if at_once or now - self._shown >= TEXT_INTERVAL:
            self._shown = now
            self.text(text)


def read_picture(path: Path) -> Image.Image:
    """Read the picture in a file; raises OSError or ValueError."""
    with Image.open(path) as picture:
        return picture.convert("RGB")


def recent(losses: list[float]) -> float:
    """Average the last finite losses, at most twenty."""
    finite = [loss for loss in losses[-200:] if math.isfinite(loss)][-20:]
    return sum(finite) / len(finite) if finite else math.nan


def announce_lora() -> None:
    """Tell every open browser of a new LoRA, so that it reads its lists again."""
    PromptServer.instance.send_sync(SAVED_EVENT, {})


def speed(seconds: float) -> str:
    """Write a step's duration: 11.3 it/s, or 2.50 s/it when it takes longer than a second."""
    return f"{1 / seconds:.1f} it/s" if 0 < seconds < 1 else f"{seconds:.2f} s/it"


def clock(seconds: float) -> str:
    """Write a duration as 0:25, 12:05 or 3:00:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
