"""The threads in which the pack answers pages: its own ones, so that nothing of ours can use up ComfyUI's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

THREADS, MOST = 8, 64  # at work at once; calls that work or wait
_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="atelier")
Result = TypeVar("Result")
_calls = 0  # that work or wait; of the server's loop


class Busy(Exception):
    """So many calls wait that one more is refused."""


async def in_thread(call: Callable[..., Result], *given: Any) -> Result:
    """Call a function in a thread of the pack; raises Busy where MOST wait. The call goes on if nobody waits for it."""
    global _calls
    if _calls >= MOST:
        raise Busy
    _calls += 1
    future = asyncio.get_running_loop().run_in_executor(_pool, call, *given)
    future.add_done_callback(_ended)
    return await asyncio.shield(future)


def _ended(_: object) -> None:
    global _calls
    _calls -= 1
