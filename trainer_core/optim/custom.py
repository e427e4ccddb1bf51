"""Use any optimizer of a known library by name, with arguments that the user wrote as text."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..common.cancel import look
from ..common.rng import generator
from ..common.tensor_tree import pack, unpack
from ..config import OptimizerConfig, setting
from .libraries import LIBRARIES, classes
from .restore import load_exactly

OURS = ("self", "params", "lr", "kwargs")  # parameters of the class that users do not set
SHAPES = ((4, 8), (8, 4, 1, 1), (4, 8, 3, 3), (1, 8))  # typical shapes of network weights
TRIED = 8  # steps of a trial: some optimizers start with a few that change nothing
MOST_OPERATIONS = 100_000  # of torch in a trial; those of the known libraries take a tenth at most
ESTIMATORS = ("prodigy", "dadapt")  # parts of the names of classes that estimate their step size
LONGEST = 1000  # characters of a name or of arguments
# Errors of failed trials.
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_class(name: str) -> Any:
    """Find an optimizer class by the name that the user wrote: Class, or library.Class for one of LIBRARIES.

    Raises ValueError for an unknown name, with similar names.
    """
    if len(name) > LONGEST:
        raise ValueError(f"{setting('options.optimizer')} has {len(name)} characters; write the name of a class.")
    named, _, plain = name.strip().rpartition(".")
    searched = [library for library in LIBRARIES if named in ("", library)]
    known: set[str] = set()
    missing: list[str] = []
    for library in searched:
        try:
            found = classes(library)
        except ImportError:
            missing.append(LIBRARIES[library].package)
            continue
        if plain in found:
            return found[plain]
        known |= found.keys()
    if not searched:
        raise ValueError(
            f"{named!r} is no library of optimizers; write the class alone, or after one of {', '.join(LIBRARIES)}."
        )
    exact = [k for k in sorted(known) if k.lower() == plain.lower()]
    near = exact or difflib.get_close_matches(plain, sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "for example AdEMAMix or StableAdamW."
    more = f" (not installed: {', '.join(missing)})" if missing else ""
    raise ValueError(f"There is no optimizer {plain!r} in {', '.join(searched)}{more}; {hint}")


def read_arguments(kind: Any, text: str) -> dict[str, Any]:
    """Read `name=value, …` into a dict; values are Python literals, never code.

    Raises ValueError for text in another form, and for unknown names.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{setting('options.arguments')} has {len(text)} characters; shorten it to {LONGEST}.")
    form = "write name=value, …, with numbers, True, False, None, 'text' or (tuples)"
    try:
        call = ast.parse(f"f({text.strip().rstrip(',')}\n)", mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:  # the latter two for deep nesting
        raise ValueError(f"arguments {text!r} cannot be read; {form}.") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"arguments {text!r} cannot be read; {form}.")
    signature = inspect.signature(kind.__init__).parameters
    known = [name for name in signature if name not in OURS]
    given = {}
    for keyword in call.keywords:
        name = keyword.arg
        if name == "lr":
            raise ValueError(f"lr is set by {setting('optimizer.learning_rate')}; remove it from arguments.")
        if name not in known:
            near = difflib.get_close_matches(name or "", known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}."
            raise ValueError(f"{kind.__name__} has no parameter {name!r}; {hint}")
        try:
            given[name] = ast.literal_eval(keyword.value)
        except (TypeError, ValueError, RecursionError) as error:  # TypeError: a key that cannot be one
            raise ValueError(f"{name} in arguments is no plain value; {form}.") from error
    return given


class TooMuchWork(ValueError):
    """A trial took too many operations."""


class Counted(TorchDispatchMode):
    """Count the operations of a trial, so that no argument makes it endless; a Cancel ends it, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; raises TooMuchWork above MOST_OPERATIONS."""
        look()
        self.count += 1
        if self.count > MOST_OPERATIONS:
            raise TooMuchWork(
                f"{self.name} takes more than {MOST_OPERATIONS} operations in {TRIED} trial steps; lower the numbers "
                f"in {setting('options.arguments')}."
            )
        return func(*args, **(kwargs or {}))


@functools.cache
def finds_step_size(kind: Any, text: str) -> bool:
    """Tell whether a class estimates its step size d, which learning rates then multiply: by its name or its groups.

    text: its arguments, as the user wrote them. Raises ValueError as `read_arguments` does.
    """
    options = read_arguments(kind, text)
    if any(name in kind.__name__.lower() for name in ESTIMATORS):
        return True
    if "d" in inspect.signature(kind.__init__).parameters:  # a setting of its own, as of torch's Adafactor
        return False
    try:
        with Counted(kind.__name__):
            optimizer = kind([torch.nn.Parameter(torch.zeros(SHAPES[0]))], **options)
            return any("d" in group for group in optimizer.param_groups)
    except WRONG:  # try_out names it
        return False


def try_out(config: OptimizerConfig, kind: Any, options: dict[str, Any]) -> None:
    """Try a few steps on a few numbers; raise ValueError if the optimizer cannot train, repeat or resume."""
    name, signature = kind.__name__, inspect.signature(kind.__init__).parameters
    if next(name for name in signature if name != "self") != "params":
        raise ValueError(f"{name} does not take parameters as its first argument; choose another optimizer.")
    if "lr" not in signature:
        raise ValueError(f"{name} has no learning rate for the schedule to set; choose another optimizer.")
    needed = [k for k, v in signature.items() if v.default is v.empty and v.kind is v.POSITIONAL_OR_KEYWORD]
    if lacking := [k for k in needed if k not in (*OURS, *options)]:
        raise ValueError(
            f"{name} needs {lacking[0]}; add {lacking[0]}=… to {setting('options.arguments')}, or choose another "
            "optimizer."
        )
    draws, state = generator(0, "optimizer"), torch.random.get_rng_state()
    gradients = [[torch.randn(shape, generator=draws) for shape in SHAPES] for _ in range(TRIED + 1)]
    before = [torch.randn(shape, generator=draws) for shape in SHAPES]
    try:
        with Counted(name):
            optimizer, weights = _build_trial(config, kind, options, before)
            for step in gradients[:TRIED]:
                _step(optimizer, weights, step)
    except TooMuchWork:
        raise
    except WRONG as error:
        raise ValueError(f"{name} does not work with these settings: {error}") from error
    if not torch.equal(state, torch.random.get_rng_state()):
        torch.random.set_rng_state(state)
        raise ValueError(
            f"{name} uses random numbers outside the run's seed, so the run could not be repeated; choose another "
            "optimizer."
        )
    if not all(weight.isfinite().all() for weight in weights):
        raise ValueError(f"{name} makes weights that are not finite in a trial; choose another optimizer.")
    if all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)):
        raise ValueError(f"{name} does not change the weights in {TRIED} trial steps; choose another optimizer.")
    remedy = "so a stopped run could not be resumed; choose another optimizer."
    try:
        again, others = _build_trial(config, kind, options, [weight.detach() for weight in weights])
        tensors, tree = pack(optimizer.state_dict(), copy=True)
        load_exactly(again, unpack(tensors, json.loads(json.dumps(tree))))
        for one, its in ((optimizer, weights), (again, others)):
            _step(one, its, gradients[TRIED])
    except WRONG as error:
        raise ValueError(f"The state of {name} cannot be saved ({str(error).rstrip('.')}), {remedy}") from error
    if not all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True)):
        raise ValueError(f"{name} takes other steps after its state is saved and loaded, {remedy}")


def _build_trial(
    config: OptimizerConfig, kind: Any, options: dict[str, Any], values: Sequence[Tensor]
) -> tuple[Any, list[Tensor]]:
    """Build an optimizer over parameters of these values; return both."""
    weights: list[Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
    rates = list(dict.fromkeys(config.rates.values()))
    if finds_step_size(kind, config.options["arguments"]):  # such an optimizer is built once for each rate
        rates = rates[:1]
    groups = [{"params": weights, "lr": rate, "base_lr": rate} for rate in rates]
    for i, group in enumerate(groups):
        group["params"] = weights[i :: len(groups)]
    optimizer = kind([group for group in groups if group["params"]], **options)
    if hasattr(optimizer, "eval"):
        optimizer.train()
    return optimizer, weights


def _step(optimizer: Any, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()
