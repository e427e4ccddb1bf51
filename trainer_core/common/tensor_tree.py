"""Nested state (tensors, numbers, texts in dicts, lists, tuples) as a safetensors file: exact, and never a pickle.

A file holds tensors row by row. Their order in memory is stored too, because sums in another order round differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .json_files import parse_json

PLAIN = (bool, int, float, str, type(None))  # JSON keeps these to the last bit
DISK_ERRORS = (OSError, SafetensorError)  # safetensors reports a full disk in its own way
TREE = "tree"  # in a file's metadata: everything but the tensors


def pack(state: Any, *, copy: bool = False, live: bool = False) -> tuple[dict[str, Tensor], Any]:
    """Split a state into its tensors, by their path in it and on the CPU, and the rest as plain JSON values.

    copy: the tensors share no memory with the state. live: they stay on their device, with their gradients. Raises
    ValueError for a value that is neither.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _tree(state, "", tensors, set(), copy, live)


def _tree(value: Any, path: str, tensors: dict[str, Tensor], seen: set[int], copy: bool, live: bool) -> Any:
    """Move a state's tensors into `tensors` and describe the rest; seen: memory of the tensors so far."""

    # A function of its own, not inside `pack`: one that calls itself there would keep the tensors in a circle.
    def inner(part: Any, name: str) -> Any:
        return _tree(part, f"{path}.{name}", tensors, seen, copy, live)

    if isinstance(value, Tensor):
        moved = (value if live else value.detach().to("cpu")).contiguous()
        storage = moved.untyped_storage().data_ptr()
        if copy or storage in seen or moved.untyped_storage().nbytes() != moved.nbytes:  # a file holds no views
            moved = moved.clone()
        seen.add(storage)
        if path in tensors:
            raise ValueError(f"Two tensors of this state are called {path}; it cannot be saved.")
        tensors[path] = moved
        return {"tensor": path} | ({"strides": list(value.stride())} if _is_reordered(value) else {})
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[inner(key, "key"), inner(each, key)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [inner(each, f"{number}") for number, each in enumerate(value)]}
    raise ValueError(f"{path} is a {type(value).__name__}; only tensors, numbers, texts and containers can be saved.")


def _is_reordered(tensor: Tensor) -> bool:
    """Tell whether a tensor fills its memory without gaps, but not row by row, as the transpose of a matrix."""
    if tensor.stride() == _by_row(tensor.shape):
        return False
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the strides of a tensor that lies row by row."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def unpack(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Rebuild the state from the tensors and the tree of `pack`."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        tensor = tensors[tree["tensor"]]
        if "strides" not in tree:
            return tensor
        if not _is_reordered(torch.empty_strided(tensor.shape, tree["strides"], device="meta")):
            raise ValueError("strides with gaps, which could need any amount of memory")
        return torch.empty_strided(tensor.shape, tree["strides"], dtype=tensor.dtype).copy_(tensor)
    ((kind, values),) = tree.items()
    if kind == "dict":
        return {unpack(tensors, key): unpack(tensors, value) for key, value in values}
    found = [unpack(tensors, value) for value in values]
    return tuple(found) if kind == "tuple" else found


def save_state(path: Path, state: Any) -> None:
    """Write a state to a file; raises ValueError as `pack` does, and DISK_ERRORS when the disk fails."""
    tensors, tree = pack(state)
    # Some readers refuse a safetensors file without tensors.
    save_file(tensors or {"": torch.zeros(0)}, path, {TREE: json.dumps(tree)})


def load_state(path: Path) -> Any:
    """Read a state from a file; raises DISK_ERRORS, or ValueError for a file that holds no state."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if TREE not in metadata:
            raise ValueError(f"{path.name} holds no state.")
        # Copies: mapped tensors would change or vanish with the file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    try:
        return unpack(tensors, parse_json(metadata[TREE]))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # a tree that `pack` never makes
        raise ValueError(f"{path.name} holds no state; it is damaged, or not of a run.") from error
