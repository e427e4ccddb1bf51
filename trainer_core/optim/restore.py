"""Restore an optimizer's state from a checkpoint, exact to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SETTINGS = ("lr", "weight_decay", "decays", "model")  # of a parameter group, which decide how its optimizer is built


def load_exactly(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state_dict into an optimizer, every tensor in its saved dtype.

    torch converts each to the dtype of its parameter, so that state in fewer bits would no longer be rounded.
    """
    optimizer.load_state_dict(state)
    parts = getattr(optimizer, "parts", [optimizer])
    for part, saved in zip(parts, state.get("parts", [state]), strict=True):
        parameters = [p for group in part.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in saved["state"].get(number, {}).items():
                loaded = part.state[parameter].get(name)
                if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    part.state[parameter][name] = value.to(loaded.device, copy=True)


def lay_out_plainly(optimizer: Any) -> None:
    """Keep lists of matrices in an optimizer's state row by row, as a file has them: products round by the order."""

    def straighten(*_: object) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, list):
                    state[name] = [each.contiguous() if isinstance(each, Tensor) else each for each in value]

    optimizer.register_step_post_hook(straighten)


def check_shapes(optimizer: Any, state: Mapping[str, Any], build: Callable[[Sequence[dict[str, Any]]], Any]) -> None:
    """Raise LookupError for a state_dict of tensors in other shapes than the optimizer's own, or of other parameters.

    build: makes an optimizer like this one over other groups, which takes a step with parameters of each shape.
    """
    groups = optimizer.param_groups
    samples = [{(p.shape, p.dtype): _samples(p) for p in group["params"]} for group in groups]
    fresh = build(
        [
            {key: group[key] for key in SETTINGS if key in group} | {"params": [p for pair in s.values() for p in pair]}
            for group, s in zip(groups, samples, strict=True)
        ]
    )
    fresh.step()
    made = dict(
        zip((id(p) for group in fresh.param_groups for p in group["params"]), _states(fresh.state_dict()), strict=True)
    )
    own = [s[p.shape, p.dtype] for group, s in zip(groups, samples, strict=True) for p in group["params"]]
    saved = _states(state)
    if len(saved) != len(own):
        raise LookupError(f"the optimizer's state is of {len(saved)} parameters, not of {len(own)}")
    for found, pair in zip(saved, own, strict=True):
        for name, value in found.items():
            possible = {_shape(made[id(p)][name]) for p in pair if name in made[id(p)]}
            if possible and _shape(value) not in possible:
                raise LookupError(f"the optimizer's state is of other shapes ({name:.20})")


def _samples(parameter: Tensor) -> list[torch.nn.Parameter]:
    """Make parameters like another one, with gradients: of zeros, for which some optimizers keep less, and of ones."""
    made = [torch.nn.Parameter(torch.full_like(parameter, value)) for value in (0.0, 1.0)]
    for each in made:
        each.grad = torch.full_like(each, 1e-3)
    return made


def _states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the values that a state_dict holds for each parameter, by name, in the order of its groups."""
    parts = state.get("parts", [state])
    return [dict(_values(p["state"].get(n, {}))) for p in parts for group in p["param_groups"] for n in group["params"]]


def _values(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a state by name; some libraries put them into a dictionary of their own."""
    for name, value in state.items():
        yield from _values(value) if isinstance(value, Mapping) else [(name, value)]


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a value; () for single numbers, which libraries keep in several forms, None for all else."""
    if isinstance(value, Tensor):
        return () if value.numel() == 1 else tuple(value.shape)
    return () if isinstance(value, int | float) else None
