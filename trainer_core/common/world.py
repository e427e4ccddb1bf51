"""The processes that train one run together, as torchrun or accelerate starts them; one alone waits for nobody."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from .devices import fastest, kind_of, module_of
from .disk_errors import reason
from .wording import count

PATIENCE = timedelta(hours=1)  # for the others, which may save, draw samples or hash large files meanwhile
GRACE = 5.0  # seconds from the end of a process's connections to its own, at most
WORDS = ("stop", "save", "sample", "pause", "repeat")  # that processes can agree on; repeat: a step, with less memory

T = TypeVar("T")


class ProcessFailed(Exception):
    """Another process of the world has failed; the message is one sentence that names it and its error."""


class Agreement(NamedTuple):
    """What all processes know after a step."""

    words: Collection[str]  # asked for by any of them
    alike: bool  # all have given the same number


class World:
    """The processes of a run, numbered from 0, the leader; all call the same methods in the same order.

    Every method first learns whether a process has failed, and then raises ProcessFailed in all others. So a failing
    process takes part in one more call, whichever that is. Alone, no method waits or sends anything.
    """

    def __init__(self, number: int = 0, size: int = 1) -> None:
        """Build the world of a joined process group; by default one process alone."""
        self.number, self.size = number, size
        self._broken = False  # a process has vanished, and nobody can be reached any more
        self._processes: list[tuple[str, int]] = []  # (host, process id) of each
        if size > 1:
            self._processes = self.gather((platform.node(), os.getpid()))

    @property
    def leads(self) -> bool:
        """Whether this is the process that saves, draws samples and talks."""
        return self.number == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Cut out this process's share of a list: neighbours, as many as for the others, or one more or less."""
        return items[len(items) * self.number // self.size : len(items) * (self.number + 1) // self.size]

    def meet(self) -> None:
        """Wait until all processes are here."""
        self.agree()

    def agree(self, words: Collection[str] = (), number: int = 0) -> Agreement:
        """Collect the WORDS that any process asks for, and compare a number below 2**63 of all processes."""
        if self.size == 1:
            return Agreement(words, alike=True)
        # The largest of each: whether one has failed, each word, the number and its negative.
        said = torch.tensor([0, *(word in words for word in WORDS), number, -number], dtype=torch.int64)
        self._call(dist.all_reduce, said, op=dist.ReduceOp.MAX)
        failed, *asked, most, least = said.tolist()
        if failed:
            raise self._failure(self._sentences(""))
        return Agreement({word for word, is_asked in zip(WORDS, asked, strict=True) if is_asked}, most == -least)

    def share(self, value: T) -> T:
        """Return the leader's value, in every process."""
        self.meet()
        if self.size == 1:
            return value
        values: list[Any] = [value]
        self._call(dist.broadcast_object_list, values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by their numbers."""
        self.meet()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, values, value)
        return values

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sum float tensors of equal shapes over the processes, in float32 and one message; returns the sums."""
        if self.size == 1:
            return list(tensors)
        whole = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
        self.meet()
        self._call(dist.all_reduce, whole)
        parts = whole.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Let the leader finish a `with` block before the others begin it, which then find its files."""
        if not self.leads:
            self.meet()
        yield
        if self.leads:
            self.meet()

    @contextmanager
    def together(self) -> Iterator[None]:
        """End a `with` block in all processes or in none: an error in one raises ProcessFailed in the others.

        Nobody leaves before all have cleaned up: torchrun ends the processes that remain once one has failed.
        """
        try:
            yield
            self.meet()
        except ProcessFailed:
            raise
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._tell(None)

    def _tell(self, error: BaseException | None) -> None:
        """Tell the others of an error, and meet them once more; they may have vanished."""
        if self.size > 1 and not self._broken:
            with suppress(ProcessFailed):
                if error is None:
                    self._call(dist.all_reduce, torch.zeros(1))
                    return
                said = torch.tensor([1, *(0 for _ in WORDS), 0, 0], dtype=torch.int64)
                self._call(dist.all_reduce, said, op=dist.ReduceOp.MAX)
                self._sentences(reason(error) or type(error).__name__)

    def _sentences(self, sentence: str) -> list[str]:
        found: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, found, sentence)
        return found

    def _failure(self, sentences: Sequence[str]) -> ProcessFailed:
        number, sentence = next((number, said) for number, said in enumerate(sentences) if said)
        return ProcessFailed(f"Process {number} of {self.size} failed: {sentence}")

    def _call(self, work: Any, *values: Any, **options: Any) -> None:
        """Call a function of torch.distributed; raises ProcessFailed where a process has vanished."""
        try:
            work(*values, **options)
        except RuntimeError as error:
            self._broken = True
            sentence = self._gone() or f"The processes of this run lost each other ({reason(error)})."
            dist.destroy_process_group()  # so that no other one waits for this one
            raise ProcessFailed(sentence) from error

    def _gone(self) -> str:
        """Name the processes of this machine that have vanished; "" if none does within GRACE."""
        here = [(number, process) for number, (host, process) in enumerate(self._processes) if host == platform.node()]
        until = time.monotonic() + GRACE
        while not (gone := [f"process {number}" for number, process in here if not _lives(process)]):
            if time.monotonic() > until:
                return ""
            time.sleep(0.05)
        processes = count(self.size, "process", "processes")
        return f"Of the {processes} of this run, {', '.join(gone)} was killed or has crashed."


ALONE = World()


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def joined() -> Iterator[World]:
    """Join the processes that torchrun or accelerate has started with this one; without them ALONE.

    Tensors on the CPU are sent by gloo, those on GPUs by what their kind has for it (NCCL on CUDA).
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield ALONE
        return
    gpu = fastest().type
    sends = kind_of(torch.device(gpu)).sends
    known = bool(sends) and dist.is_backend_available(sends)
    dist.init_process_group(f"cpu:gloo,{gpu}:{sends}" if known else "gloo", timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def own_gpu() -> torch.device:
    """Choose the GPU of this process's number on its machine; ValueError if there are fewer GPUs than processes."""
    kind = fastest()
    module = module_of(kind)
    number, gpus = dist.get_node_local_rank(fallback_rank=0), module.device_count()
    if number >= gpus:
        raise ValueError(
            f"More processes were started on this machine than it has GPUs, which is {gpus}; set --nproc-per-node of "
            f"torchrun, or --num_processes of accelerate, to {gpus}."
        )
    module.set_device(number)
    return torch.device(kind.type, number)
