"""Restore an optimizer's state from a checkpoint, exact to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


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
