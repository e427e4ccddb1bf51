"""Hand events to a library in a thread of its own: a step never waits, and what hangs or fails costs one note."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..common.wording import count
from .attempt import Attempt
from .event import About, Event
from .masked import mask_logs

MOST_WAITING = 20_000  # events; of more the oldest go
AT_ONCE = 500  # of these in one call of a library
HANGS = 60.0  # seconds in one call, after which a service counts as one that does not answer
MOST_FAILURES = 3  # one after another, after which a service is left alone


class Service(Protocol):
    """A library that hears of runs."""

    name: str  # of its package
    tracks: bool  # it draws curves of all steps; else it gets what a person wants to read

    def begin(self, about: About) -> None:
        """Import the library and open what it writes to."""
        ...

    def take(self, events: Sequence[Event]) -> None:
        """Hand on what happened since the last call, at least one event."""
        ...

    def end(self, failed: bool) -> None:
        """Close it."""
        ...


_last: dict[str, Sender] = {}  # by service: the one of the newest run; its thread may outlive the run
problems: dict[str, str] = {}  # by service: what went wrong last, also after a run; the settings show it


class Sender:
    """Tells one service of one run."""

    def __init__(
        self, service: Service, wanted: Collection[str] = (), secrets: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Tell a service; wanted: kinds of events for one that does not track."""
        self.service, self._wanted, self._secrets, self._clock = service, wanted, secrets, clock
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._awake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy: float | None = None  # since when the library is at work
        self._left = False  # it gets nothing more
        self._closing = self._failed = self._told = False
        self._dropped = 0
        self._notes: list[str] = []  # which the run's own thread takes
        self._about = About(name="")

    def put(self, about: About, event: Event) -> None:
        """Hand over an event; never waits for the service."""
        name = self.service.name
        if self._left or not (self.service.tracks or event.kind in self._wanted):
            return
        if self._thread is None:
            self._about, before = about, _last.get(name)
            if before is not None and before.hangs():
                self._leave(f"{name} has not answered since an earlier run, so it is not told of this one.")
                return
            mask_logs(self._secrets)
            _last[name] = self
            self._thread = threading.Thread(target=self._work, args=(before,), name=f"atelier-{name}", daemon=True)
            self._thread.start()
        if self.hangs():
            self._leave(
                f"{name} has not answered for {count(round(HANGS), 'second')}; it hears nothing more of this run, "
                "whose training is not affected."
            )
            return
        with self._awake:
            self._dropped += len(self._waiting) == MOST_WAITING
            self._waiting.append(event)
            self._awake.notify()

    def hangs(self) -> bool:
        """Tell whether the library has been at work in one call for longer than any answer takes."""
        busy, thread = self._busy, self._thread
        return busy is not None and self._clock() - busy > HANGS and thread is not None and thread.is_alive()

    def notes(self) -> list[str]:
        """Take what a person has to know."""
        with self._awake:
            notes, self._notes = self._notes, []
        return notes

    def close(self, patience: float, *, failed: bool = False) -> list[str]:
        """Let the thread end once all is handed over; wait for it at most `patience` seconds, and take the notes."""
        with self._awake:
            self._closing, self._failed = True, failed
            self._awake.notify()
        if self._thread is not None and not self._left:
            self._thread.join(patience)
            if self._thread.is_alive():
                self._say(f"{self.service.name} is slow to answer; it may miss the end of this run.")
        if self._dropped:
            self._say(f"{self.service.name} was too slow for {count(self._dropped, 'event')} of this run.")
        return self.notes()

    def _leave(self, sentence: str) -> None:
        self._left = True
        with self._awake:
            self._waiting.clear()
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        self._told = True
        problems[self.service.name] = sentence
        with self._awake:
            self._notes.append(sentence)

    # --- in the thread -------------------------------------------------------------------------------------

    def _work(self, before: Sender | None) -> None:
        self._busy = self._clock()
        if before is not None and before._thread is not None:
            before._thread.join()  # libraries keep one run at a time
        if self._left or not self._tried(lambda: self.service.begin(self._about)):
            self._left = True
            return
        failures = 0  # one after another
        while failures < MOST_FAILURES and (events := self._next()) is not None:
            failures = 0 if self._tried(lambda events=events: self.service.take(events)) else failures + 1
        self._tried(lambda: self.service.end(self._failed))
        self._left = True
        if not self._told:
            problems.pop(self.service.name, None)

    def _tried(self, call: Callable[[], None]) -> bool:
        """Call the library; note the first thing that it raises in a run."""
        self._busy = self._clock()
        with Attempt(self._secrets) as attempt:
            call()
        self._busy = None
        if attempt.problem and not self._told:
            self._say(f"{self.service.name} did not hear of the run: {attempt.problem}. The training is not affected.")
        return not attempt.problem

    def _next(self) -> list[Event] | None:
        """Wait for events and take all of them; None after the last."""
        with self._awake:
            self._awake.wait_for(lambda: self._waiting or self._closing or self._left)
            if self._left or not self._waiting:
                return None
            return [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
