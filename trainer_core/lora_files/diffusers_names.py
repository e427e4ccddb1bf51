"""What diffusers calls the layers of a transformer: asked of its own conversion of checkpoints, or from a table.

The conversion gets tensors whose rows are numbered. So the names, the slices of fused layers and their order are those
of the version that is installed. The rows of `models/architectures.py` tell architectures by their layers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..models.architectures import ARCHITECTURES, UNLISTED
from ..models.base import Slice
from ..models.diffusers_tables import Conversion, NameTable, NoLoras
from .names import CONDITIONER, Named

WEIGHT = ".weight"
ADAPTER = "llm_adapter."  # of Anima's text, which is a model of its own in diffusers


NAMED = (*UNLISTED, *(row.diffusers for row in ARCHITECTURES if row.diffusers is not None))
OneOf = TypeVar("OneOf", Conversion, NameTable, NoLoras)


def diffusers_paths(rows: Mapping[str, int]) -> dict[str, list[Named]]:
    """Map paths of a transformer's layers to those of diffusers, as far as it knows the architecture.

    rows: how many rows each tensor has, by its name in ComfyUI's model: {"blocks.0.cross_attn.o.weight": 64, …}. Empty
    for architectures, versions of diffusers and sizes that its conversion of checkpoints does not know, unless they are
    in the table.
    """
    table = _find(NameTable, rows)
    if table is not None:
        paths = {name.removesuffix(WEIGHT): count for name, count in rows.items() if name.endswith(WEIGHT)}
        return {path: _by_table(path, count, table) for path, count in paths.items()}
    origin = _find(Conversion, rows)
    convert = None if origin is None else _conversion(origin.kind)
    if origin is None or convert is None:
        return {}
    marked: dict[str, Tensor] = {}
    starts, names, first = [], list(rows), 0
    for name in names:
        if name.startswith(ADAPTER):
            starts.append(first)
            continue
        values = torch.arange(first, first + rows[name], dtype=torch.float64)
        marked[origin.start + name] = values[:, None] if name.endswith(WEIGHT) else values
        starts.append(first)
        first += rows[name]
    try:
        converted = convert(marked)
    except (KeyError, RuntimeError, ValueError):  # other sizes or layers than those that the conversion is written for
        return {}
    adapter = [name.removesuffix(WEIGHT) for name in names if name.startswith(ADAPTER) and name.endswith(WEIGHT)]
    found = {path: [Named(CONDITIONER + path.removeprefix(ADAPTER))] for path in adapter}
    for name, values in converted.items():
        if name.endswith(WEIGHT) and values.ndim > 1:
            index = bisect_right(starts, int(values.min())) - 1
            piece = _piece(values.flatten() - starts[index], rows[names[index]])
            if piece is not None:
                found.setdefault(names[index].removesuffix(WEIGHT), []).append(Named(name.removesuffix(WEIGHT), *piece))
    return found


def why_unnamed(rows: Mapping[str, int], otherwise: str = "diffusers has no such model") -> str:
    """Say why layers of a model have no names in diffusers; rows: of its tensors, as for `diffusers_paths`.

    otherwise: what to say of an architecture that is not known here.
    """
    refusing = _find(NoLoras, rows)
    if refusing is not None:
        return f"diffusers' {refusing.kind} takes no LoRAs"
    origin = _find(Conversion, rows)
    if origin is None:
        return otherwise
    if diffusers_paths(rows):
        return f"diffusers' {origin.kind} has no such layer"
    return "the installed diffusers converts no model of these sizes"


def _find(kind: type[OneOf], rows: Mapping[str, int]) -> OneOf | None:
    """Find the first entry of a kind whose marks are all among a model's tensors."""
    entries = (each for each in NAMED if isinstance(each, kind))
    return next((each for each in entries if all(mark + WEIGHT in rows for mark in each.marks)), None)


def _by_table(path: str, rows: int, table: NameTable) -> list[Named]:
    """Name a layer, or the parts of a fused one."""
    for pattern, start, ends in table.fused:
        if found := re.fullmatch(pattern, path):
            share, named, first = rows // sum(ends.values()), [], 0
            for end, shares in ends.items():
                named.append(Named(found.expand(start) + end, Slice(comfy="", start=first, length=share * shares)))
                first += share * shares
            return named
    for pattern, other in table.renamed:
        path = re.sub(pattern, other, path)
    return [Named(path, Slice(comfy="", start=0, length=rows, swapped=True) if path == table.swapped else None)]


def _conversion(kind: str) -> Any:
    """Find diffusers' conversion of original checkpoints to a class; None where this version has none."""
    from diffusers.loaders import single_file_model  # here, as diffusers takes seconds to import

    return single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(kind, {}).get("checkpoint_mapping_fn")


def _piece(rows: Tensor, whole: int) -> tuple[Slice | None] | None:
    """Read which rows of a weight a tensor holds: all, or a slice, perhaps with its halves swapped; None for others."""
    start, length = int(rows.min()), len(rows)
    expected = torch.arange(start, start + length, dtype=rows.dtype)
    if swapped := not rows.equal(expected):
        expected = torch.cat(expected.chunk(2)[::-1])
    if not rows.equal(expected):
        return None
    if length == whole and not swapped:
        return (None,)
    return (Slice(comfy="", start=start, length=length, swapped=swapped),)
