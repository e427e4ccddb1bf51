"""Do work for many items at once: one on each processor, each with one thread of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TypeVar

import torch

from .cancel import look

MOST = 8  # at once, as each holds memory
Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of all items in their order; a Cancel ends what is at work.

    For work of many small steps, where threads within a step wait for each other longer than they compute.
    """
    threads = torch.get_num_threads()

    @torch.no_grad()  # which other threads are not in
    def alone(item: Item) -> Result:
        return work(item)

    pool = ThreadPoolExecutor(min(threads, MOST), initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures = [pool.submit(copy_context().run, alone, item) for item in items]
        for future in futures:
            while not wait([future], timeout=0.05).done:
                look()
            look()
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # of threads to come
