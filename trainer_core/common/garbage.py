"""When Python looks for garbage, where that would stop the work for longer than the work takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let a short piece of work make many objects at once, without a search for garbage after each share of them.

    Each search goes through all objects of the process, millions in ComfyUI, while every thread waits. What is garbage
    by then is found later. Threads may overlap: the one that stopped the searches lets them go on.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
