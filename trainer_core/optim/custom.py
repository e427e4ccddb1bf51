"""Any optimizer of torch.optim or pytorch-optimizer by name, with parameters that a person wrote as text."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import OptimizerConfig
from ..rng import generator
from ..state import pack, unpack
from .again import load_exactly

LIBRARIES = ("torch.optim", "pytorch_optimizer")  # in the order in which a name is looked up
OURS = ("self", "params", "lr", "kwargs")  # parameters of the class that its own settings are not among
SHAPES = ((4, 8), (8, 4, 1, 1), (4, 8, 3, 3), (1, 8))  # as the parts of networks have them
TRIED = 8  # steps: some begin with a few that move nothing
WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # what trials end in


def find_class(name: str) -> Any:
    """Return the optimizer class of that name; raises ValueError for any other, with names that are like it."""
    library, _, plain = name.strip().rpartition(".")
    known: dict[str, Any] = {}
    for module in reversed(LIBRARIES):
        if library not in ("", module) or importlib.util.find_spec(module) is None:
            continue
        members = vars(importlib.import_module(module)).items()
        known |= {k: v for k, v in members if inspect.isclass(v) and issubclass(v, torch.optim.Optimizer)}
    known.pop("Optimizer", None)
    if plain in known:
        return known[plain]
    exact = [k for k in known if k.lower() == plain.lower()]
    near = exact or difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "for example AdEMAMix or StableAdamW."
    missing = importlib.util.find_spec("pytorch_optimizer") is None
    more = " (pytorch-optimizer is not installed: pip install pytorch-optimizer)" if missing else ""
    raise ValueError(f"There is no optimizer {name!r} in torch.optim or pytorch-optimizer{more}; {hint}")


def read_arguments(kind: Any, text: str) -> dict[str, Any]:
    """Read `name=value, …` into a dict; values are Python literals, never code.

    Raises ValueError for text that is not of this form and for names that the class does not know.
    """
    form = "write name=value, …, with numbers, True, False, None, 'text' or (tuples)"
    try:
        call = ast.parse(f"f({text.strip().rstrip(',')}\n)", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"arguments {text!r} cannot be read; {form}.") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"arguments {text!r} cannot be read; {form}.")
    signature = inspect.signature(kind.__init__).parameters
    known = [name for name in signature if name not in OURS]
    given = {}
    for keyword in call.keywords:
        name = keyword.arg
        if name == "lr":
            raise ValueError("lr is not set in arguments; learning_rate is what sets it.")
        if name not in known:
            near = difflib.get_close_matches(name or "", known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}."
            raise ValueError(f"{kind.__name__} has no parameter {name!r}; {hint}")
        try:
            given[name] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise ValueError(
                f"{name} is {ast.unparse(keyword.value)} in arguments, which is no value; {form}."
            ) from error
    return given


def try_out(config: OptimizerConfig, kind: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for an optimizer that cannot train a LoRA here, found by taking a few steps on a few numbers."""
    name, signature = kind.__name__, inspect.signature(kind.__init__).parameters
    if next(name for name in signature if name != "self") != "params":
        raise ValueError(f"{name} is not built over parameters but around something else; choose a plain optimizer.")
    if "lr" not in signature:
        raise ValueError(f"{name} takes no learning rate, which the schedule would set; choose another optimizer.")
    needed = [k for k, v in signature.items() if v.default is v.empty and v.kind is v.POSITIONAL_OR_KEYWORD]
    if lacking := [k for k in needed if k not in (*OURS, *options)]:
        raise ValueError(
            f"{name} needs {lacking[0]} as well; add {lacking[0]}=… to arguments, or choose another optimizer."
        )
    draws, state = generator(0, "optimizer"), torch.random.get_rng_state()
    gradients = [[torch.randn(shape, generator=draws) for shape in SHAPES] for _ in range(TRIED + 1)]
    before = [torch.randn(shape, generator=draws) for shape in SHAPES]
    try:
        optimizer, weights = _tried(config, kind, options, before)
        for step in gradients[:TRIED]:
            _step(optimizer, weights, step)
    except WRONG as error:
        raise ValueError(f"{name} does not work with these settings: {error}") from error
    if not torch.equal(state, torch.random.get_rng_state()):
        torch.random.set_rng_state(state)
        raise ValueError(f"{name} draws random numbers that no seed of the run decides, so that it would not repeat.")
    if not all(weight.isfinite().all() for weight in weights):
        raise ValueError(f"{name} makes numbers that are not finite, on a first trial; choose another optimizer.")
    if all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)):
        raise ValueError(f"{name} does not move the weights in {TRIED} steps of a trial; choose another optimizer.")
    remedy = "so that a run that is cut off could not be continued; choose another optimizer."
    try:
        again, others = _tried(config, kind, options, [weight.detach() for weight in weights])
        tensors, tree = pack(optimizer.state_dict(), copy=True)
        load_exactly(again, unpack(tensors, json.loads(json.dumps(tree))))
        for one, its in ((optimizer, weights), (again, others)):
            _step(one, its, gradients[TRIED])
    except WRONG as error:
        raise ValueError(f"The state of {name} cannot be saved ({str(error).rstrip('.')}), {remedy}") from error
    if not all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True)):
        raise ValueError(f"{name} does not go on from its saved state as it would have without a break, {remedy}")


def _tried(
    config: OptimizerConfig, kind: Any, options: dict[str, Any], values: Sequence[Tensor]
) -> tuple[Any, list[Tensor]]:
    """Return an optimizer over parameters of these values, and the parameters."""
    weights: list[Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [{"params": weights, "lr": rate, "base_lr": rate} for rate in dict.fromkeys(config.rates.values())]
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
