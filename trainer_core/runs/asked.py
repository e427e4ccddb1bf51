"""Ask something of a run at work through its folder, whichever process on whichever machine trains it.

Each thing that is asked for is an empty file of a known name: nothing is parsed, and several pages can ask at once. The
process takes it after its next step by deleting the file. What was asked before a process took the run up is deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ..common.wording import say

PAUSE = 0.5  # seconds from one look to the next, at least
SAID = {  # what can be asked, and what is answered
    "pause": say("The run is saved after its next step, and ends. Press Continue, or start the command again."),
    "stop": say("The run ends after its next step; its LoRA so far is saved."),
    "save": say("The run will be saved after its next step."),
    "sample": say("Samples will be drawn after its next step."),
}
FILES = {f"asked-{word}": word for word in SAID}


class Paused(Exception):
    """Ends a run whose pause was asked for; it is saved."""


class Asked:
    """Takes what is asked through a run's folder; cheap enough for every step."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Look into a run's folder at most once in PAUSE seconds of a clock."""
        self._folder, self._clock = folder, clock
        self._next = clock()

    def take(self) -> Collection[str]:
        """Take the words that were asked since the last look; what cannot be deleted is not taken."""
        if self._clock() < self._next:
            return ()
        self._next = self._clock() + PAUSE
        return take(self._folder)


def take(folder: Path) -> set[str]:
    """Delete the files in a run's folder by which something is asked; return their words."""
    taken: set[str] = set()
    with suppress(OSError):  # a folder that is gone: the run's next save makes it again
        # Listing asks a network disk anew; it may remember for a minute that a single file was missing.
        for name in FILES.keys() & set(os.listdir(folder)):
            with suppress(OSError):  # taken by another process, or a folder of that name
                (folder / name).unlink()
                taken.add(FILES[name])
    return taken


def ask(folder: Path, word: str) -> None:
    """Write the file that asks for a word of SAID; an existing one, also a link, stays. Raises OSError."""
    with suppress(FileExistsError):
        (folder / f"asked-{word}").open("xb").close()
