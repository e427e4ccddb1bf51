"""What a pass of a MODEL does, operator by operator: the layers that it calls, and where gradients are lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ....trainer_core.common.wording import names

OURS = __name__.rsplit(".", 4)[0]  # the pack's own code, whose gradients are tested
TORCH = ("aten", "prims")  # operators of torch's own, which have formulas
VALUELESS = ("zeros", "ones", "full", "empty", "rand", "new_")  # how operators begin that read no values
ALIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")  # and those that read the first of their tensors alone
WARNS = "WarnNotImplemented"  # a backward pass that torch puts in place of none
NUMBERS = ("item", "tolist", "__float__", "data_ptr")  # what leaves torch, where a gradient cannot follow
SHOWN = 3  # operators in a message


class Observed(TorchFunctionMode):
    """Notes which layers a pass calls, and which operators hand no gradient on.

    An operator that is noted may do no harm: a mask, a largest value that cancels out.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], texts: nn.Module | None = None) -> None:
        """Observe layers, by name, of a model, and of the text encoders beside it."""
        super().__init__()
        self.order: dict[str, None] = {}  # layers that are called, in the order of their first calls
        self.past: set[str] = set()  # layers whose weight is read by other code than their own
        self.writing: set[nn.Module] = set()  # modules whose code passes `out` to operators
        self._lost: dict[str, str] = {}  # operators and classes, in their order, and where they are first
        self._custom: dict[str, tuple[str, str]] = {}  # places of operators that torch has not, by name
        self._paths = {module: path or "the whole MODEL" for path, module in model.named_modules()}
        self._paths |= {module: path or "the whole CLIP" for path, module in texts.named_modules()} if texts else {}
        self._layers = dict(layers)
        self._owners: dict[int, list[str]] = {}  # layers by the identity of their weight
        for name, layer in layers.items():
            if (weight := layer._parameters.get("weight")) is not None:
                self._owners.setdefault(id(weight), []).append(name)
        self._inside = 0  # calls of functions with a backward pass of their own

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the passes inside a `with` block."""
        own = torch.autograd.Function.__dict__["apply"]

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                result = own.__func__(kind, *args, **kwargs)
            finally:
                self._inside -= 1
            if not self._inside and not kind.__module__.startswith(OURS):
                self._watch_backward(kind.__name__, result)
            return result

        with ExitStack() as stack:
            stack.enter_context(calls(self._layers, self._note_call))
            torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
            stack.callback(setattr, torch.autograd.Function, "apply", own)
            stack.enter_context(self)
            yield

    @property
    def called(self) -> set[str]:
        """The names of layers that are called."""
        return set(self.order)

    @property
    def lost(self) -> str:
        """Where gradients are lost, for a message; "" for nowhere."""
        return names([lost + path for lost, path in self._lost.items()], SHOWN) if self._lost else ""

    def custom_in(self, error: Exception) -> str:
        """The operator of a custom node that an error names, with its place; "" for none."""
        said = str(error).replace("::", ".")
        return next((name + "".join(where) for name, where in self._custom.items() if f"{name}." in said), "")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note what it does."""
        del types
        kwargs = kwargs or {}
        if kwargs.get("out") is not None and torch.is_grad_enabled():  # which autograd has no formula for
            self.writing.update([owner] if (owner := self._owner()) is not None else [])
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        result = func(*args, **kwargs)
        given = list(tensors_in((*args, *kwargs.values())))
        read = [name for tensor in given for name in self._owners.get(id(tensor), ())]
        if read and next(tensors_in((result,)), None) is not None:
            owner = self._owner()
            self.past.update(read if owner not in [self._layers[name] for name in read] else ())
        if not self._inside and any(tensor.requires_grad for tensor in given):
            name = _name(func)
            if name not in ALIKE or given[0].requires_grad:
                self._look(func, name, kwargs, result)
        return result

    def _note_call(self, name: str) -> None:
        """Note a layer that is called, and where no gradient is recorded at all."""
        self.order.setdefault(name)
        if not torch.is_grad_enabled() and not self._inside:
            self._note("its layers under no_grad", inside=self._layers[name])

    def _look(self, func: Any, name: str, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator on a tensor with a gradient, if its result has none."""
        custom = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if custom and name.partition(".")[0] not in TORCH and (where := self._where()) is not None:
            self._custom.setdefault(name, where)
        made = [tensor for tensor in tensors_in((result,)) if tensor.is_floating_point() or tensor.is_complex()]
        written = not torch.is_grad_enabled() and (_writes(name) or kwargs.get("out") is not None)
        without = bool(made) and not any(tensor.requires_grad for tensor in made)
        warned = any(tensor.grad_fn is not None and WARNS in tensor.grad_fn.name() for tensor in made)
        if written or warned or name in NUMBERS or (without and not name.startswith(VALUELESS)):
            self._note(name + ("" if torch.is_grad_enabled() else " under no_grad"))

    def _watch_backward(self, name: str, result: Any) -> None:
        """Note a function whose backward pass gives nothing for what needs a gradient."""
        where = self._where()
        for node in {tensor.grad_fn for tensor in tensors_in((result,)) if tensor.grad_fn is not None}:

            def look(found: tuple, above: tuple, edges: tuple = node.next_functions) -> None:
                wanted = [one for one, (edge, _) in zip(found, edges, strict=False) if edge is not None]
                if where is not None and any(one is None for one in wanted) and any(one is not None for one in above):
                    self._lost.setdefault(name + where[0], where[1])

            node.register_hook(look)

    def _note(self, operator: str, inside: nn.Module | None = None) -> None:
        where = self._where(inside)
        if where is not None:
            self._lost.setdefault(operator + where[0], where[1])

    def _where(self, inside: nn.Module | None = None) -> tuple[str, str] | None:
        """The class and path of the module whose code runs, as " in Block" and " (blocks.0)"; None for our own code.

        inside: a layer that is no answer, as its caller is asked for.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            own = frame.f_globals.get("__name__", "")
            if own.startswith(OURS) and own != __name__:
                return None
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module is not inside and module in self._paths:
                return f" in {type(module).__name__}", f" ({self._paths[module]})"
            frame = frame.f_back
        return "", ""

    def _owner(self) -> Any:
        """The module of the model whose code runs."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._paths:
                return module
            frame = frame.f_back
        return None


@contextmanager
def calls(layers: Mapping[str, nn.Module], note: Callable[[str], Any]) -> Iterator[None]:
    """Note the names of layers as they are called, inside a `with` block."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(lambda *_, name=name: _none(note(name)))
            stack.callback(handle.remove)
        yield


def _none(_: Any) -> None:
    """Give nothing: what a hook gives would replace a module's input."""


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _name(func: Any) -> str:
    """The name of an operator: torch's own without the module, others with their library."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(getattr(func, "_qualified_op_name", None) or func.name()).replace("::", ".")
    found = resolve_name(func) or getattr(func, "__name__", str(func))
    return found.removesuffix(".__get__").rpartition(".")[2]


def _writes(name: str) -> bool:
    """Tell whether an operator writes into its first argument, by its name."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__index__")
    return name.endswith("_") or name == "fill"
