"""Right gradients where a model writes into tensors that the backward pass needs: these are copied first.

torch's own `allow_mutation_on_saved_tensors` compares addresses, so it misses a write into a slice that does not begin
where the saved tensor does, and the gradient is wrong without an error. Here a write counts for its whole storage.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN: tuple[type[Tensor], ...] = (Tensor,)  # parameters are not written into; others have no storage of their own


class _Saved:
    """A tensor that the backward pass needs, or its copy from before a write."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Unwatched(NamedTuple):
    """A tensor that the backward pass needs, and how often it had been written into when it was saved."""

    tensor: Tensor
    version: int


@functools.cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """List indices and names of the arguments that an operator writes into."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


class _CopyBeforeWrite(TorchDispatchMode):
    """Copies saved tensors right before an operator writes into their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[int, weakref.WeakSet[_Saved]] = {}  # by address of the storage
        self.copied = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch, which else tells its compiler at every operator to stay away: there is none in these passes."""
        return False

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        """Note a tensor that autograd saves."""
        if type(tensor) not in PLAIN:
            return tensor
        saved = _Saved(tensor)
        self.saved.setdefault(_storage(tensor), weakref.WeakSet()).add(saved)
        return saved

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, after copies of what it would overwrite."""
        del types
        kwargs = kwargs or {}
        for index, name in _written(operator):
            written = args[index] if index < len(args) else kwargs.get(name)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, Tensor) and type(tensor) in PLAIN:
                    for saved in self.saved.pop(_storage(tensor), ()):
                        saved.tensor = saved.tensor.clone()
                        self.copied = True
        with torch._C.DisableTorchFunctionSubclass():  # else results get the classes of what was given
            return operator(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


@contextmanager
def copied_before_written() -> Iterator[_CopyBeforeWrite]:
    """Let a model write into any tensor, without harm to gradients; around a forward and its backward pass."""
    mode = _CopyBeforeWrite()
    pack: Callable[[Tensor], Any] = mode.pack
    with saved_tensors_hooks(pack, _unpack), mode:
        _watching.append(mode)
        try:
            yield mode
        finally:
            _watching.remove(mode)


_watching: list[_CopyBeforeWrite] = []  # those at work; autograd has threads of its own


def stay(tensor: Tensor) -> Any:
    """Save a tensor for the backward pass inside of other hooks, which replace those of `copied_before_written`."""
    return _watching[-1].pack(tensor) if _watching else _Unwatched(tensor, tensor._version)


def stayed(saved: Any) -> Tensor:
    """Give a tensor that `stay` saved; RuntimeError, as torch's own, for one that was written into unwatched."""
    if not isinstance(saved, _Unwatched):
        return _unpack(saved)
    if saved.tensor._version != saved.version:
        raise RuntimeError("a model wrote into a tensor that its backward pass needs")
    return saved.tensor


class Watched:
    """Passes of a model that may write into tensors: watched, until passes of their kind needed no copy.

    To look at every operator costs a tenth of a step on a CPU. Should a later pass write all the same, torch refuses
    its backward pass.
    """

    def __init__(self) -> None:
        self._harmless: set[Hashable] = set()
        # True while blocks are compiled, which hide their operators and were compared with the eager ones.
        self.needless: Callable[[], bool] = bool

    @contextmanager
    def passes(self, kind: Hashable) -> Iterator[None]:
        """Wrap a forward pass and its backward pass."""
        if kind in self._harmless or self.needless():
            yield
            return
        with copied_before_written() as mode:
            yield
        if not mode.copied:
            self._harmless.add(kind)
