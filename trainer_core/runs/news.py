"""Tell other programs of a run while it trains: what a person wants to read, and the numbers of each step."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.callbacks import Callbacks, StepReport
from ..common.smooth import MEAN_OF, say_loss
from ..common.wording import count, printable, without_paths
from ..outward import About, Event, Sender, finite_only, masked
from .detail import settings_of
from .folder import open_run

FAILURES = (ValueError, TypeError, RuntimeError, OSError, MemoryError)  # what ends a run beside a person's wish
LONGEST = 500  # characters of an error


@contextmanager
def telling(
    callbacks: Callbacks, senders: Sequence[Sender], name: str, patience: float, secrets: Sequence[str] = ()
) -> Iterator[Callbacks]:
    """Yield callbacks that also tell services of a run; they hear how the `with` block ends, too.

    patience: seconds that the end waits for each service. secrets: which no error that they hear may hold.
    """
    if not senders:
        yield callbacks
        return
    news = _News(callbacks, senders, name)
    try:
        yield news.callbacks()
    except FAILURES as problem:
        said = without_paths(masked(printable(str(problem)), secrets))[:LONGEST]
        news.tell("error", f"Failed{news.at()}: {said}")
        raise
    except BaseException:
        news.tell("end", f"Stopped{news.at()}.")
        raise
    else:
        news.finish()
    finally:
        news.close(patience)


class _News:
    """What services hear of one run."""

    def __init__(self, callbacks: Callbacks, senders: Sequence[Sender], name: str) -> None:
        self._callbacks, self._senders = callbacks, senders
        self._about = About(name=name)
        self._trains = self._failed = False
        self._last: tuple[int, int] = (0, 0)  # steps finished, and of all
        self._losses: deque[float] = deque(maxlen=MEAN_OF)

    def callbacks(self) -> Callbacks:
        """Build callbacks that tell, and then call those of whoever shows the run."""
        own = self._callbacks

        def also(tell: Callable[..., None], then: Callable[..., Any]) -> Callable[..., Any]:
            def call(*values: Any) -> Any:
                tell(*values)
                self._pass_notes()
                return then(*values)

            return call

        return dataclasses.replace(
            own,
            run=also(self._begin, own.run),
            step=also(self._step, own.step),
            validation=also(self._validated, own.validation),
            samples=also(self._sampled, own.samples),
            saved=also(self._saved, own.saved),
            best=also(self._best, own.best),
            resumed=also(self._resumed, own.resumed),
        )

    def tell(self, kind: str, text: str = "", step: int = 0, **more: Any) -> None:
        """Hand an event to every service; trackers know a run from its start on."""
        self._failed = self._failed or kind == "error"
        event = Event(kind=kind, text=text, step=step or self._last[0], **more)
        for sender in self._senders:
            if self._trains or not sender.service.tracks:
                sender.put(self._about, event)

    def at(self) -> str:
        """Say after which step."""
        step, steps = self._last
        return f" after step {step} of {steps}" if step else " before the first step"

    def finish(self) -> None:
        """Tell that training is over; nothing of a result that was reused."""
        step, steps = self._last
        if self._trains:
            begun = "Finished" if step == steps else "Ended"
            self.tell("end", f"{begun}{self.at()}, {say_loss(list(self._losses))}." if self._losses else f"{begun}.")

    def close(self, patience: float) -> None:
        """Let every service end, and pass on what a person has to know of it."""
        for sender in self._senders:
            for sentence in sender.close(patience, failed=self._failed):
                self._callbacks.note(sentence)

    def _pass_notes(self) -> None:
        for sender in self._senders:
            for sentence in sender.notes():
                self._callbacks.note(sentence)

    def _begin(self, path: Path, trained: bool) -> None:
        if trained:
            self._trains = True
            self._about = About(name=self._about.name, run=path.name, settings=settings_of(open_run(path)))
            self.tell("start", "Training begins.")

    def _resumed(self, losses: Sequence[float], *_: object) -> None:
        self._losses.extend(losses[-MEAN_OF:])

    def _step(self, report: StepReport) -> None:
        self._last = report.step, report.steps
        self._losses.append(report.loss)
        numbers: dict[str, float | None] = {
            "loss": report.loss,
            "epoch": report.epoch,
            "grad_norm": report.grad_norm,
            "seconds": report.seconds,
            "noise_scale": report.noise_scale,
            **_prefixed("lr/", report.learning_rates),
            **_prefixed("concept/", report.concepts),
        }
        self.tell("step", values=finite_only(numbers))

    def _validated(self, steps: int, loss: float) -> None:
        self.tell("validation", step=steps, values=finite_only({"validation": loss}))

    def _sampled(self, steps: int, pictures: Sequence[Path]) -> None:
        drawn = f"{count(pictures, 'sample')} drawn after {count(steps, 'step')}."
        self.tell("sample", drawn, steps, pictures=tuple(pictures))

    def _saved(self, steps: int) -> None:
        self.tell("save", f"Saved after step {steps}.", steps)

    def _best(self, steps: int, loss: float) -> None:
        self.tell("best", f"Best so far: validation loss {loss:.4f} after step {steps}.", steps)


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}
