"""Tell every open page of a run as it goes: status, steps, notes; the page draws them on the node of that run."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import comfy.model_management
import comfy.utils
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...trainer_core.common.callbacks import Callbacks, StepReport
from ...trainer_core.common.devices import kind_of
from ...trainer_core.common.json_files import finite
from ...trainer_core.common.remaining import Remaining
from ...trainer_core.common.smooth import MEAN_OF, say_loss
from ...trainer_core.common.wording import count, for_page, say
from . import shown
from .server import announce_lora
from .session import Buttons

if TYPE_CHECKING:
    from ...trainer_core.runs import RunFolder

RUN_EVENT = "atelier.run"
INTERVAL = 0.25  # seconds between two events
MEMORY_INTERVAL = 1.0  # seconds between two looks at the memory
MOST_POINTS = 200  # steps in one event, the newest
# What measuring, sending and writing may raise: a run does not end because nobody can watch it.
UNSEEN = (OSError, ValueError, RuntimeError, MemoryError)


class NodeAddress(NamedTuple):
    """The node that shows a run."""

    prompt_id: str
    workflow: str  # its id, "" where nobody knows it
    node: str  # its id in the prompt


def address_of(hidden: Any) -> NodeAddress:
    """Find the address of the node at work; hidden: its hidden inputs, in which a stranger wrote the workflow."""
    context = get_executing_context()
    known = shown.id_in(hidden.extra_pnginfo, *shown.OF_A_PROMPT[2:])
    # A loop runs copies of a node, which stand for the one on the page.
    shown_as = hidden.dynprompt.get_display_node_id if hidden.dynprompt else str
    return NodeAddress(context.prompt_id if context else "", known, shown_as(str(hidden.unique_id)))


_live: NodeProgress | None = None  # of the run at work; ComfyUI's worker runs one node at a time


def live_state(workflow: str, node: str) -> dict[str, Any] | None:
    """Return the state of the run that works for a node, as its events tell it; None if none does."""
    live = _live
    return live.state() if live and (live.address.workflow, live.address.node) == (workflow, node) else None


class NodeProgress:
    """Tell of one run while a `with` block lasts: progress bar, status, steps, notes."""

    def __init__(self, address: NodeAddress, name: str = "") -> None:
        self.address = address
        self.notes: list[str] = []
        self._name = name
        context = get_executing_context()
        self._bar = comfy.utils.ProgressBar(1, node_id=context.node_id if context else address.node)
        self._run: Path | None = None
        self._log: RunFolder | None = None  # of a run that is trained, not reused
        self._report: list[str] = []  # texts after the training
        self._status: dict[str, Any] = {"text": say("preparing the run"), "step": 0, "steps": 0, "details": []}
        self._points: list[dict[str, Any]] = []  # of steps that no event has told of
        self._losses: deque[float] = deque(maxlen=MEAN_OF)
        self._validation: float | None = None
        self._remaining = Remaining()
        self._began, self._told, self._measured = False, 0.0, 0.0
        self._memory: dict[str, Any] = {}
        self._alive = True
        self._unseen = False

    def __enter__(self) -> NodeProgress:
        global _live
        _live = self
        self._tell()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _live
        _live = None
        self._alive = False
        if self._run is None or not os.path.isdir(self._run):  # nothing of it is on the disk
            # Of a failure the node tells why: see failures.py.
            cancelled = kind is not None and issubclass(kind, comfy.model_management.InterruptProcessingException)
            self._run = None
            text = say("Cancelled before the first step.") if cancelled else ""
            self._status |= {"text": text, "details": [], "memory": {}}
        self._tell(changed=True, notes=[*self.notes, *self._report])
        self._show(announce_lora)  # one that is cancelled leaves a LoRA, too

    def callbacks(self, buttons: Buttons) -> Callbacks:
        """Build the core's callbacks."""
        return Callbacks(
            phase=self._phase,
            run=self._begin,
            step=self._step,
            validation=self._validated,
            note=self._note,
            check=buttons.check,
            resumed=self._resumed,
            samples=lambda *_: self._tell(changed=True),
            asked=buttons.take,
        )

    def report(self, text: str) -> None:
        """Show a text after the training, beside the notes."""
        self._report.append(text)
        self._write("note", text=text)

    def state(self) -> dict[str, Any]:
        """Describe the run now: its address, its folder's name, its status and its notes."""
        return {**self._event(), "notes": [*self.notes, *self._report]}

    def _event(self) -> dict[str, Any]:
        run = self._run.name if self._run else None
        return {**self.address._asdict(), "run": run, "name": self._name, "alive": self._alive, **self._status}

    def _tell(self, *, changed: bool = False, **more: Any) -> None:
        """Send an event; changed: the run's folder holds something new beside the steps that events tell of."""
        points, self._points, self._told = self._points[-MOST_POINTS:], [], time.perf_counter()
        event = {**self._event(), "points": points, "changed": changed, **more}
        self._show(lambda: PromptServer.instance.send_sync(RUN_EVENT, for_page(event)))

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

    def _begin(self, path: Path, trained: bool) -> None:
        self._run = path
        if trained:
            from ...trainer_core.runs import open_run  # here, so that ComfyUI starts fast

            self._log = open_run(path)
            self._write("begun")
            for note in self.notes:
                self._write("note", text=note)
        self._show(lambda: shown.remember(self.address.workflow, self.address.node, path.name))
        shown.begun(self.address.prompt_id, self.address.node, path.name)
        self._tell(changed=True)

    def _write(self, event: str, **values: Any) -> None:
        """Write a line into the run's log."""
        if (log := self._log) is not None:
            self._show(lambda: log.log(event, **values))

    def _phase(self, phase: str, done: int, total: int) -> None:
        self._status |= {
            "text": say("{0} {1} of {2}", phase, done, total) if total > 1 else phase,
            "details": [],
            "memory": self._room(),
        }
        if done in (0, total) or time.perf_counter() - self._told >= INTERVAL:
            self._tell()
        self._show(lambda: self._bar.update_absolute(done, total))

    def _resumed(
        self, losses: Sequence[float], _: Mapping[str, Sequence[float]], measured: Sequence[tuple[int, float]]
    ) -> None:
        self._losses.extend(losses[-MEAN_OF:])
        self._validation = measured[-1][1] if measured else None

    def _step(self, report: StepReport) -> None:
        now, first = time.perf_counter(), not self._began
        self._began = True
        self._remaining.add(report.step, now, report.seconds)
        self._losses.append(report.loss)
        numbers = {"loss": report.loss, "rate": report.learning_rates, "concepts": report.concepts}
        self._points.append({"step": report.step, **finite(numbers)})
        details = [*self._remaining.texts(report.steps), say_loss(list(self._losses))]
        if self._validation is not None:
            details.append(say("validation {0}", f"{self._validation:.4f}"))
        if report.masked_area is not None:
            details.append(say("mask {0}", f"{report.masked_area:.0%}"))
        text = say("step {0} of {1}", report.step, report.steps)
        self._status = {"text": text, "step": report.step, "steps": report.steps, "details": details}
        self._status["memory"] = self._room()
        if first or report.step == report.steps or now - self._told >= INTERVAL:
            self._tell()
        self._show(lambda: self._bar.update_absolute(report.step, report.steps))

    def _validated(self, steps: int, loss: float) -> None:
        self._validation = loss
        self._note(f"Validation loss after {count(steps, 'step')}: {loss:.4f}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._write("note", text=text)
        self._tell(changed=True, note=text)

    def _room(self) -> dict[str, Any]:
        """Describe the memory in use, in words and as a share of all; looked at once in MEMORY_INTERVAL."""
        now = time.perf_counter()
        if now - self._measured >= MEMORY_INTERVAL or not self._memory:
            self._measured = now
            self._show(self._measure)
        return self._memory

    def _measure(self) -> None:
        device = comfy.model_management.get_torch_device()
        free = cast("int", comfy.model_management.get_free_memory(device))
        total = cast("int", comfy.model_management.get_total_memory(device))
        sizes = f"{(total - free) / 1e9:.1f}", f"{total / 1e9:.1f}", f"{free / 1e9:.1f}"
        if kind_of(device).shares_ram:
            words = say("RAM: {0} of {1} GB used, {2} GB free", *sizes)
        else:
            words = say("GPU memory: {0} of {1} GB used, {2} GB free", *sizes)
        self._memory = {"words": words, "share": 1 - free / max(1, total)}


def scan_callbacks(node_id: str) -> Callbacks:
    """Build the core's callbacks of a node that trains nothing: its progress bar, and Cancel."""
    bar = comfy.utils.ProgressBar(1, node_id=node_id)
    return Callbacks(
        phase=lambda _, done, total: bar.update_absolute(done, total),
        check=comfy.model_management.throw_exception_if_processing_interrupted,
    )
