"""Safetensors files, read with care: a header that holds together, and bytes that stay the same while they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PICKLE_SUFFIXES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a tensor lie, and what they are."""

    dtype: torch.dtype
    start: int  # from the beginning of the file
    size: int  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """The header of a safetensors file: shapes by tensor name, and its metadata."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    places: dict[str, Place] = field(default_factory=dict, repr=False)
    stamp: tuple[int, int] = (0, 0)  # size and time of the last change, nanoseconds


def read_header(path: Path) -> FileHeader:
    """Read and check a safetensors header without touching a tensor.

    Raises ValueError that says what the file is when it is not a whole safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"There is no model file at {path}; choose one that exists.")
    stamp = _stamp(path)
    size = stamp[0]
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            raise ValueError(f"{path.name} is a GGUF file; training needs a .safetensors checkpoint.")
        length = int.from_bytes(start, "little") if len(start) == 8 else 0
        whole = 2 <= length <= min(size - 8, LONGEST_HEADER)  # then the first bytes are a number, whatever they spell
        pickled = start[:2] in (b"PK", *(bytes((0x80, protocol)) for protocol in range(2, 6)))
        if path.suffix.lower() in PICKLE_SUFFIXES or (pickled and not whole):
            raise ValueError(
                f"{path.name} is a pickle, which can run code when opened; convert it to .safetensors first."
            )
        if not whole and start.startswith((b"<", b"{", b"version ")):
            raise ValueError(
                f"{path.name} is a short text or a web page that was saved in place of the model ({size} bytes); get "
                "the file again, signed in where that is asked for."
            )
        if not whole:
            raise ValueError(f"{path.name} is not a whole safetensors file ({size} bytes); get it again.")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):  # no text, no JSON, a name that occurs twice, brackets without end
        raise ValueError(f"{path.name} has a broken safetensors header; get the file again.") from None
    metadata = header.pop("__metadata__", None) or {} if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path.name} has a broken safetensors header; get the file again.")
    places = {name: _place(path, name, entry, 8 + length) for name, entry in header.items()}
    if not places:
        raise ValueError(f"{path.name} holds no tensors; choose a checkpoint.")
    _check_places(path, places, 8 + length, size)
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return FileHeader(path=path, shapes=shapes, metadata=metadata, places=places, stamp=stamp)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raises ValueError for a name that occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _place(path: Path, name: str, entry: Any, begin: int) -> Place:
    """Return where a tensor lies; raises ValueError when its entry does not make sense."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = str(fields.get("dtype")), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if "dtype" not in fields or shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path.name} has a broken header: its entry {name!r} makes no sense; get the file again.")
    if dtype not in DTYPES:
        raise ValueError(f"{path.name} stores {name} as {dtype}, which is not read here; get the file as float16.")
    size = offsets[1] - offsets[0]
    if size != (needed := math.prod(shape) * DTYPES[dtype].itemsize):
        raise ValueError(
            f"{path.name} has a header that contradicts itself: {name} takes {size} bytes, its shape {shape} in "
            f"{dtype} {needed}; get the file again."
        )
    return Place(DTYPES[dtype], begin + offsets[0], size)


def _counts(values: Any) -> list[int] | None:
    """Return values if they are a list of whole numbers of at least 0, else None."""
    right = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return values if right else None


def _check_places(path: Path, places: dict[str, Place], begin: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the rest of the file, one behind the other."""
    end = max(place.start + place.size for place in places.values())
    if size != end:
        raise ValueError(
            f"{path.name} is cut short or damaged: it has {size} bytes, its header needs {end}; get the file again."
        )
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].size)):
        if place.start != begin:
            raise ValueError(
                f"{path.name} has a header that contradicts itself: {name} does not begin where the tensor before it "
                "ends; get the file again."
            )
        begin += place.size


class TensorFile:
    """An open safetensors file that gives its tensors by name, each in memory of its own.

    The file is not mapped: weights in use would change with it, and end the process if it became shorter.
    """

    def __init__(self, header: FileHeader, file: BufferedReader, kept: dict[str, Tensor] | None = None) -> None:
        """Read from a file, or hand over the tensors of it that are in memory already."""
        self._header = header
        self._file = file
        self._kept = kept or {}

    def get_tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        if name in self._kept:
            return self._kept.pop(name)
        place = self._header.places[name]
        self._file.seek(place.start)
        return _read_tensor(self._header, self._file, name)


@contextmanager
def opened(header: FileHeader, kept: dict[str, Tensor] | None = None) -> Iterator[TensorFile]:
    """Open the file of a header for reading; raises ValueError when it is not the same file before and after.

    kept: its tensors that are in memory already, which the file hands over.
    """
    _check_unchanged(header)
    with header.path.open("rb") as file:
        yield TensorFile(header, file, kept)
    _check_unchanged(header)


def read_whole(header: FileHeader, use: Callable[[Any], None]) -> dict[str, Tensor]:
    """Read a file from its first byte to its last, once: hand all bytes to `use` in order, and return the tensors."""
    tensors = {}
    with header.path.open("rb") as file:
        use(file.read(min(place.start for place in header.places.values())))
        for name in sorted(header.places, key=lambda name: (header.places[name].start, header.places[name].size)):
            tensors[name] = _read_tensor(header, file, name)
            use(tensors[name].flatten().view(torch.uint8).numpy().data)
    return tensors


def _read_tensor(header: FileHeader, file: BufferedReader, name: str) -> Tensor:
    """Read a tensor from a file that stands where it begins."""
    place = header.places[name]
    data = torch.empty(place.size, dtype=torch.uint8)
    view = memoryview(data.numpy())  # pyright: ignore[reportArgumentType]
    while len(view):
        count = file.readinto(view)
        if not count:
            raise _changed(header.path)
        view = view[count:]
    return data.view(place.dtype).reshape(header.shapes[name])


def read_part(file: Any, names: Iterable[str], prefix: str) -> dict[str, Tensor]:
    """Read the tensors under a prefix, named without it."""
    return {name[len(prefix) :]: file.get_tensor(name) for name in names if name.startswith(prefix)}


def under(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes under a prefix, named without it."""
    return {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}


def highest(names: Iterable[str], pattern: str) -> int:
    """Return the highest number that a pattern's first group finds at the beginning of a name; -1 for none."""
    return max((int(m[1]) for name in names if (m := re.match(pattern, name))), default=-1)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _check_unchanged(header: FileHeader) -> None:
    if not header.path.is_file() or _stamp(header.path) != header.stamp or read_header(header.path) != header:
        raise _changed(header.path)


def _changed(path: Path) -> ValueError:
    return ValueError(f"{path.name} changed while it was read; start again when nothing writes to it any more.")
