"""An optimizer's state as it was, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def load_exactly(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Let an optimizer go on from its state_dict, every tensor in the dtype that it had.

    torch gives each the dtype of its parameter, and what an optimizer keeps in fewer bits would round no more.
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
