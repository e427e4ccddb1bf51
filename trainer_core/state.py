"""Nested state (tensors, numbers, texts in dicts, lists, tuples) as a safetensors file: exact, and never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))  # JSON keeps these to the last bit
DISK_ERRORS = (OSError, SafetensorError)  # safetensors reports a full disk in its own way
TREE = "tree"  # in a file's metadata: everything but the tensors


def pack(state: Any, *, copy: bool = False) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors of a state by their path in it, on the CPU, and the rest as plain JSON values.

    copy: the tensors share no memory with the state. Raises ValueError for a value that is neither.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _tree(state, "", tensors, set(), copy)


def _tree(value: Any, path: str, tensors: dict[str, Tensor], seen: set[int], copy: bool) -> Any:
    """Return a state without its tensors, which are added to `tensors` under their paths; seen: their memory so far."""

    # A function of its own, not inside `pack`: one that calls itself there would keep the tensors in a circle.
    def go_on(part: Any, name: str) -> Any:
        return _tree(part, f"{path}.{name}", tensors, seen, copy)

    if isinstance(value, Tensor):
        moved = value.detach().to("cpu").contiguous()
        storage = moved.untyped_storage().data_ptr()
        if copy or storage in seen or moved.untyped_storage().nbytes() != moved.nbytes:  # a file holds no views
            moved = moved.clone()
        seen.add(storage)
        if path in tensors:
            raise ValueError(f"Two tensors of this state are called {path}; it cannot be saved.")
        tensors[path] = moved
        return {"tensor": path}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[go_on(key, "key"), go_on(each, key)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [go_on(each, f"{number}") for number, each in enumerate(value)]}
    raise ValueError(f"{path} is a {type(value).__name__}, and a state of tensors, numbers and texts can be saved.")


def unpack(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Return the state of which `pack` made tensors and tree."""
    if not isinstance(tree, dict):
        return tree
    ((kind, values),) = tree.items()
    if kind == "tensor":
        return tensors[values]
    if kind == "dict":
        return {unpack(tensors, key): unpack(tensors, value) for key, value in values}
    found = [unpack(tensors, value) for value in values]
    return tuple(found) if kind == "tuple" else found


def save_state(path: Path, state: Any) -> None:
    """Write a state; ValueError as of `pack`, SafetensorError or OSError when the disk refuses it."""
    tensors, tree = pack(state)
    # A file without tensors is no safetensors file to every reader.
    save_file(tensors or {"": torch.zeros(0)}, path, {TREE: json.dumps(tree)})


def load_state(path: Path) -> Any:
    """Read a state; SafetensorError, OSError or ValueError for a file that holds none."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if TREE not in metadata:
            raise ValueError(f"{path.name} holds no state.")
        # Copies: what a file maps would change or vanish with it.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return unpack(tensors, json.loads(metadata[TREE]))
