"""Gradient checkpointing in levels: from its level on, a block or a part of it recomputes its activations."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..common.subset import computing, current_subset

Unit = tuple[nn.Module, int]  # a repeated block or a part of one, and the lowest level (of LEVELS) that recomputes it
PARTS = "feed-forward"  # the level that recomputes parts of blocks alone
LEVELS = ("0", PARTS, "1", "2", "3", "4", "full")
WHOLE = LEVELS.index("1")  # the lowest level of a whole block
FULL = LEVELS[-1]
SEGMENTS = {f"segments of {count}": count for count in (2, 4)}  # every block, and all inputs but the first of so many
BUDGETS = {f"budget {share}": share for share in (0.75, 0.5, 0.25, 0.1)}  # of what blocks keep; the compiler recomputes


class Recomputed:
    """A module's forward whose activations are recomputed in the backward pass instead of kept."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # some models look at the signatures of their blocks
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; it draws no random numbers, so no generator state is kept."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class RecomputedPart(Recomputed):
    """The same for a part of a block, which stays outside of the block's compiled code."""

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return super().__call__(*args, **kwargs)


class RecomputedOnCopies(Recomputed):
    """The same for a module that may write into its inputs: it runs on copies of them, every time.

    torch's own checkpointing runs it again on what the first run left of its inputs: no error, and wrong gradients.
    segment: as of `RecomputedInSegments`.
    """

    def __init__(self, forward: Callable[..., Any], segment: int = 1) -> None:
        super().__init__(forward)
        self.segment = segment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; a block inside a block is recomputed with it, not once more."""
        if not torch.is_grad_enabled() or getattr(_running, "again", False):
            return self.forward(*args, **kwargs)
        call = _Call(self.forward, args, kwargs, copies=True)
        call.follow(self.segment)
        # Without an input that needs a gradient there would be no backward pass for what is trained inside.
        anchor = torch.zeros((), requires_grad=True)
        return call.result(_Block.apply(anchor, call, *call.tensors))


class RecomputedInSegments(Recomputed):
    """A block's forward of which some inputs are recomputed, too.

    segment: of so many blocks in a row, the first one's inputs are kept; what another one got from the block before is
    computed again by that one. The numbers are those of `Recomputed`.
    """

    def __init__(self, forward: Callable[..., Any], segment: int) -> None:
        super().__init__(forward)
        self.segment = segment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; it draws no random numbers, so no generator state is kept."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = _Call(self.forward, args, kwargs, copies=False)
        call.follow(self.segment)
        needed = [tensor.requires_grad for tensor in call.tensors]
        kept: Any = _Keep.apply(torch.zeros((), requires_grad=True), call, *call.tensors)
        call.node, first = weakref.ref(kept), [call.tensors]

        def run() -> tuple[Tensor, ...]:
            if first:
                return tuple(call.run(call.now, first.pop()))
            inputs = [t.detach().requires_grad_(wanted) for t, wanted in zip(_inputs(kept), needed, strict=True)]
            kept.grad_fn.again = None
            return tuple(call.run(call.later, inputs))

        found = cast("tuple[Tensor, ...]", checkpoint(run, use_reentrant=False, preserve_rng_state=False))
        del call.now
        return call.result(found)


def recompute(units: Iterable[Unit], level: str, *, copies: bool = False) -> None:
    """Switch gradient checkpointing on for the blocks of a level; may be called again with a higher level.

    units: blocks and parts of them, each with the lowest level that recomputes it; from the first level of whole blocks
    on, no part is recomputed alone. level: of LEVELS or SEGMENTS. copies: the blocks may write into their inputs.
    """
    segment = SEGMENTS.get(level, 1)
    level = FULL if segment > 1 else level
    wanted = LEVELS.index(level) if level in LEVELS else 0  # auto, where no estimate has chosen one
    found = list(units)
    if wanted >= WHOLE:
        keep_activations(unit for unit, least in found if least < WHOLE or segment > 1)
    for unit, least in found:
        if min(wanted, WHOLE) <= least <= wanted and not isinstance(unit.forward, Recomputed):
            plain = RecomputedPart if least < WHOLE else Recomputed
            if copies:
                unit.forward = RecomputedOnCopies(unit.forward, segment)
            else:
                unit.forward = plain(unit.forward) if segment == 1 else RecomputedInSegments(unit.forward, segment)


def keep_activations(modules: Iterable[nn.Module]) -> None:
    """Switch gradient checkpointing off again."""
    for module in modules:
        if isinstance(wrapped := module.__dict__.get("forward"), Recomputed):
            # The wrapper is an attribute of the instance, which hides the forward of the class.
            del module.__dict__["forward"]
            if module.forward != wrapped.forward:  # the module had a forward of its own instead of its class's
                module.forward = wrapped.forward


# --- blocks that may write into their inputs, or compute each other's again -----------------------------------

_running = threading.local()  # again: whether a block runs for the second time; last: a weak reference to its last call


class _Slot(NamedTuple):
    """The index of a tensor in a list, where a structure held the tensor."""

    index: int


class _Call:
    """A call of a block: its tensors in a list, and how to run it with others.

    It holds none of its tensors once it has given its result: these may go to RAM, or be computed again.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple, kwargs: dict, *, copies: bool) -> None:
        self.forward, self.subset, self.copies = forward, current_subset(), copies
        self.before: Any = None  # what autograd keeps of the call before, which computes some inputs again
        self.made: dict[int, int] = {}  # these inputs: their places among its results
        self.depth = 0  # calls to compute again before this one has its inputs
        self.node: Callable[[], Any] = lambda: None  # what autograd keeps of this call, a node or its result
        self.given: list[tuple[Callable[[], Any], int]] = []  # its results, and how often they had been written into
        self.tensors: list[Tensor] = []
        self.now = _map_arguments((args, kwargs), Tensor, self._take)
        # Models count in dictionaries that they are given, so the second run gets them as the first one did.
        self.later = _map_arguments(self.now, _Slot, lambda slot, _: slot, fresh=True)
        self.results: Any = None
        self.written: list[int] = []  # inputs that the block writes into and does not give back

    def _take(self, tensor: Tensor, named: bool) -> _Slot | Tensor:
        """Note a tensor that has a gradient, or that the block may write into."""
        if not tensor.requires_grad and (named or isinstance(tensor, nn.Parameter)):
            return tensor
        self.tensors.append(tensor)
        return _Slot(len(self.tensors) - 1)

    def run(self, slots: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Run the block with these tensors in their slots; list those of its result, then those that it only wrote."""
        tensors, found = [tensor.clone() if self.copies else tensor for tensor in tensors], []
        versions = [tensor._version for tensor in tensors]
        known: dict[int, _Slot] = {}

        def put(tensor: Tensor, _: bool) -> _Slot:
            if id(tensor) not in known:
                known[id(tensor)] = _Slot(len(found))
                found.append(tensor)
            return known[id(tensor)]

        args, kwargs = _map_arguments(slots, _Slot, lambda slot, _: tensors[slot.index], fresh=slots is self.later)
        with computing(self.subset):
            self.results = _map(self.forward(*args, **kwargs), Tensor, put)
        changed = (i for i, (t, version) in enumerate(zip(tensors, versions, strict=True)) if t._version != version)
        self.written = [i for i in changed if id(tensors[i]) not in known]
        return found + [tensors[i] for i in self.written]

    def result(self, tensors: tuple[Tensor, ...]) -> Any:
        """Build the block's result from its tensors, and write what it wrote into its inputs alone."""
        for number, written in zip(self.written, tensors[len(tensors) - len(self.written) :], strict=True):
            self.tensors[number].copy_(written)
        self.tensors, self.given = [], [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        _running.last = weakref.ref(self)
        return _map(self.results, _Slot, lambda slot, _: tensors[slot.index])

    def follow(self, segment: int) -> None:
        """Find the inputs that are the last call's results as it gave them; they are not kept, within a segment."""
        last: _Call | None = getattr(_running, "last", lambda: None)()
        if segment == 1 or last is None or last.depth + 1 == segment:
            return
        given = {id(result()): (place, version) for place, (result, version) in enumerate(last.given)}
        for index, tensor in enumerate(self.tensors):
            place, version = given.get(id(tensor), (0, None))
            if version == tensor._version:
                self.made[index] = place
        if self.made:
            self.before, self.depth = last.node(), last.depth + 1


class _Block(torch.autograd.Function):
    """A block without gradients inside; the backward pass runs it again, with them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block on copies."""
        del anchor
        _keep(ctx, call, tensors)
        call.node = weakref.ref(ctx)
        # A result without a gradient then gives None, not zeros of its size.
        ctx.set_materialize_grads(False)
        found = call.run(call.now, tensors)
        del call.now
        # A model may write into a result, which autograd refuses for views that a function gives.
        found = [tensor.clone() if tensor._is_view() else tensor for tensor in found]
        ctx.mark_non_differentiable(*(t for t in found if not (t.is_floating_point() or t.is_complex())))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Run the block again on copies, then its backward pass; what is trained inside collects its gradients."""
        needed = ctx.needs_input_grad[2:]
        _running.again = True
        try:
            inputs = _inputs(ctx)
            ctx.again = None
            leaves = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(inputs, needed, strict=True)]
            del inputs
            with torch.enable_grad():
                found = ctx.call.run(ctx.call.later, leaves)
        finally:
            _running.again = False
        pairs = [(f, g) for f, g in zip(found, gradients, strict=True) if g is not None and f.requires_grad]
        if pairs:
            torch.autograd.backward([f for f, _ in pairs], [g for _, g in pairs])
        return None, None, *(leaf.grad for leaf in leaves)


class _Keep(torch.autograd.Function):
    """What is kept of a call that torch's own checkpointing runs again; in the hooks of saved tensors, as all else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *tensors: Tensor) -> Tensor:
        """Keep tensors."""
        _keep(ctx, call, tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Refuse, as nothing depends on it."""
        raise AssertionError("no part of the graph")


def _keep(node: Any, call: _Call, tensors: Iterable[Tensor]) -> None:
    """Keep the tensors of a call that the one before does not compute again."""
    node.call, node.again = call, None
    node.save_for_backward(*(tensor for i, tensor in enumerate(tensors) if i not in call.made))


def _inputs(kept: Any) -> list[Tensor]:
    """List a call's tensors: what was saved, and what the call before computes again; that stays until it is used."""
    node = _node(kept)
    call, saved = node.call, list(node.saved_tensors)
    if call.made and node.again is None:
        before, inputs = _node(call.before).call, _inputs(call.before)
        with torch.no_grad():
            results = before.run(before.later, inputs)
        node.again = {index: results[place] for index, place in call.made.items()}
    rest = iter(saved)
    return [node.again[i] if i in call.made else next(rest) for i in range(len(call.made) + len(saved))]


def _node(kept: Any) -> Any:
    """Give the node of what autograd keeps of a call; it lives as long as its result."""
    return kept.grad_fn if isinstance(kept, Tensor) else kept


def _map_arguments(
    arguments: tuple[tuple, dict], kind: type, change: Callable[[Any, bool], Any], *, fresh: bool = False
) -> tuple[tuple, dict]:
    """Map the arguments of a call like `_map`; its keywords are no dictionary of the model's."""
    args, kwargs = arguments
    mapped = {name: _map(value, kind, change, fresh=fresh) for name, value in kwargs.items()}
    return tuple(_map(value, kind, change, fresh=fresh) for value in args), mapped


def _map(
    value: Any, kind: type, change: Callable[[Any, bool], Any], *, named: bool = False, fresh: bool = False
) -> Any:
    """Replace everything of a kind in nested tuples, lists, dictionaries and objects with attributes.

    change: gets the thing, and whether it lies in a dictionary. What holds nothing of the kind stays the same object,
    but for dictionaries if `fresh`. Objects in dictionaries and in objects are not opened: they may hold whole models.
    """
    if isinstance(value, kind):
        return change(value, named)
    if isinstance(value, (tuple, list)):
        parts = [_map(part, kind, change, named=named, fresh=fresh) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return _with(value, value, {k: _map(v, kind, change, named=True, fresh=fresh) for k, v in value.items()}, fresh)
    if named or callable(value):
        return value
    held = _attributes(value)
    inside = {k: v for k, v in held.items() if isinstance(v, (kind, tuple, list, dict))}
    return _with(value, held, {k: _map(v, kind, change) for k, v in inside.items()}, fresh=False)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also of one that names them in slots."""
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ()) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _with(value: Any, held: dict, parts: dict, fresh: bool) -> Any:
    """Copy a dictionary or an object with other parts; the same one if they are the same."""
    if not fresh and all(held[key] is part for key, part in parts.items()):
        return value
    value = copy.copy(value)
    if isinstance(value, dict):
        value.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(value, name, part)
    return value
