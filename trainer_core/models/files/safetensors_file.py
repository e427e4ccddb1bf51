"""Read safetensors files: check the header, and check that the file does not change while it is read."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.cancel import look
from ...common.leftovers import TEMPORARY

SUFFIXES = (".safetensors", ".sft")  # of the files that are read
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl", ".pickle")
LONGEST_HEADER = 32 * 2**20  # bytes; ten times as much as the longest that trainers write
MOST_TENSORS = 100_000
LONGEST_NAME = 300  # characters of a tensor's name
MOST_SIDES, MOST_NUMBERS = 8, 2**48  # of a tensor's shape; sides of 0 count as 1
BLOCK = 2**24  # bytes read at once
KEPT_HEADERS, KEPT_TENSORS = 16, 20_000  # headers in memory, as a run asks for its model's 20 times; tensors in one
FRESH = 2_000_000_000  # ns; a file changed more recently may change again within the resolution of its times
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
class ByteRange:
    """The position and dtype of a tensor in a file."""

    dtype: torch.dtype
    start: int  # byte in the file
    size: int  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """The header of a safetensors file: shapes by tensor name, and its metadata."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    ranges: dict[str, ByteRange] = field(default_factory=dict, repr=False)
    stamp: tuple[int, int] = (0, 0)  # size and time of the last change, nanoseconds

    def copy(self) -> FileHeader:
        """Copy the header, so that a change of one is none of the other."""
        return replace(self, shapes=dict(self.shapes), metadata=dict(self.metadata), ranges=dict(self.ranges))


class KeptHeaders:
    """The headers that were read last, each as long as its file stays what it was; threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: OrderedDict[Path, tuple[tuple[int, ...], FileHeader]] = OrderedDict()

    def find(self, path: Path) -> FileHeader | None:
        """Give the header of a file; None where it is not kept, or the file has changed since."""
        state = version(path)
        with self._lock:
            kept, header = self._headers.get(path, ((), None))
            if header is None or kept != state:
                return None
            self._headers.move_to_end(path)
        return header.copy()

    def keep(self, header: FileHeader, before: os.stat_result) -> None:
        """Keep a header of a file that has long been the same; before: the file's status before it was read."""
        settled = max(before.st_mtime_ns, before.st_ctime_ns) < time.time_ns() - FRESH
        if settled and len(header.shapes) <= KEPT_TENSORS:
            with self._lock:
                self._headers[header.path] = _version(before), header.copy()
                self._headers.move_to_end(header.path)
                while len(self._headers) > KEPT_HEADERS:
                    self._headers.popitem(last=False)


_kept = KeptHeaders()


def read_header(path: Path) -> FileHeader:
    """Read and check a safetensors header without touching a tensor; one that was read of the same file is kept.

    Raises ValueError, with the kind of the file, if it is not a whole safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"There is no model file at {path}; choose one that exists.")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _pickle(path)
    if (kept := _kept.find(path)) is not None:
        return kept
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        header = _parse_header(path, file, (status.st_size, status.st_mtime_ns))
    _kept.keep(header, status)
    return header


def _parse_header(path: Path, file: BufferedReader, stamp: tuple[int, int]) -> FileHeader:
    """Read and check the header of an open file; stamp: the file's."""
    length = _header_length(path, file.read(8), stamp[0])
    if not is_readable(path.name) and path.suffix != TEMPORARY:  # that of a file which we are writing
        raise ValueError(f"The name of {path.name} does not end in {' or '.join(SUFFIXES)}; choose another file.")
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):  # not text, not JSON, a duplicate name, an endless number, endless brackets
        raise _broken(path) from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else ()
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path)
    if not header:
        raise ValueError(f"{path.name} holds no tensors; choose a checkpoint.")
    if len(header) > MOST_TENSORS:
        raise ValueError(f"{path.name} holds {len(header)} tensors; at most {MOST_TENSORS} are read. Use another file.")
    first = 8 + len(text)
    ranges = {name: _byte_range(path, name, entry, first) for name, entry in header.items()}
    _check_ranges(path, ranges, first, stamp[0])
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return FileHeader(path=path, shapes=shapes, metadata=metadata, ranges=ranges, stamp=stamp)


def is_readable(name: str) -> bool:
    """Tell whether a file of this name may be a model that is read here."""
    return name.lower().endswith(SUFFIXES)


def _header_length(path: Path, start: bytes, size: int) -> int:
    """Read the length of the header in bytes from a file's first 8; raises ValueError for another kind of file.

    size: of the file, bytes.
    """
    if start[:4] == b"GGUF":
        raise ValueError(f"{path.name} is a GGUF file; training needs a .safetensors checkpoint.")
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if 2 <= length <= size - 8:  # then the first bytes are a length, whatever else they spell
        if length > LONGEST_HEADER:
            raise ValueError(
                f"{path.name} has a header of {length / 2**20:.0f} MiB; at most {LONGEST_HEADER // 2**20} are read. "
                "Use another file."
            )
        return length
    if start[:2] in (b"PK", *(bytes((0x80, protocol)) for protocol in range(2, 6))):
        raise _pickle(path)
    if start.startswith((b"<", b"{", b"version ")):
        raise ValueError(
            f"{path.name} is a short text or a web page that was saved in place of the model ({size} bytes); "
            "download it again, after a login if the site asks for one."
        )
    raise ValueError(f"{path.name} is not a whole safetensors file ({size} bytes); get it again.")


def _pickle(path: Path) -> ValueError:
    return ValueError(f"{path.name} is a pickle, which can run code when opened; convert it to .safetensors first.")


def _broken(path: Path) -> ValueError:
    return ValueError(f"{path.name} has a broken safetensors header; get the file again.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict of pairs; raises ValueError for a duplicate name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _byte_range(path: Path, name: str, entry: Any, first: int) -> ByteRange:
    """Read a tensor's entry of the header; raises ValueError for an invalid one. first: byte after the header."""
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{path.name} holds a tensor whose name is unprintable, or longer than {LONGEST_NAME} characters; use "
            "another file."
        )
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    named = isinstance(dtype, str) and (dtype in DTYPES or re.fullmatch(r"\w{1,12}", dtype))
    if not named or shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path.name} has a broken header: its entry {name!r} makes no sense; get the file again.")
    if dtype not in DTYPES:
        raise ValueError(f"{path.name} stores {name} as {dtype}, which is not read here; get the file as float16.")
    if len(shape) > MOST_SIDES or math.prod(side or 1 for side in shape) > MOST_NUMBERS:
        raise ValueError(f"{path.name} has a broken header: the shape of {name} is too large; get the file again.")
    size = offsets[1] - offsets[0]
    if size != (needed := math.prod(shape) * DTYPES[dtype].itemsize):
        raise ValueError(
            f"{path.name} has a header that contradicts itself: {name} takes {size} bytes, its shape {shape} in "
            f"{dtype} {needed}; get the file again."
        )
    return ByteRange(DTYPES[dtype], first + offsets[0], size)


def _counts(values: Any) -> list[int] | None:
    """Check that values are a list of whole numbers between 0 and 2**63; None otherwise."""
    valid = isinstance(values, list) and all([type(value) is int and 0 <= value < 2**63 for value in values])
    return values if valid else None


def _check_ranges(path: Path, ranges: dict[str, ByteRange], position: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the file from byte `position` on, without gaps or overlaps."""
    end = max(span.start + span.size for span in ranges.values())
    if size != end:
        raise ValueError(
            f"{path.name} is cut short or damaged: it has {size} bytes, its header needs {end}; get the file again."
        )
    for name, span in sorted(ranges.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != position:
            raise ValueError(
                f"{path.name} has a header that contradicts itself: {name} does not begin where the tensor before it "
                "ends; get the file again."
            )
        position += span.size


class TensorFile:
    """An open safetensors file that reads tensors by name, each into new memory.

    The file is not memory-mapped: weights in use would change with it, and the process would crash if it shrank.
    """

    def __init__(self, header: FileHeader, file: BufferedReader, kept: dict[str, Tensor] | None = None) -> None:
        """Read from a file. kept: its tensors that are in memory already."""
        self._header = header
        self._file = file
        self._kept = kept or {}

    def get_tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        if name in self._kept:
            return self._kept.pop(name)
        span = self._header.ranges[name]
        self._file.seek(span.start)
        return _read_tensor(self._header, self._file, name)


@contextmanager
def opened(header: FileHeader, kept: dict[str, Tensor] | None = None) -> Iterator[TensorFile]:
    """Open the file of a header for reading; raises ValueError if it changes before or during reading.

    kept: its tensors that are in memory already.
    """
    _check_unchanged(header)
    with header.path.open("rb") as file:
        yield TensorFile(header, file, kept)
    _check_unchanged(header)


def read_whole(header: FileHeader, use: Callable[[Any], None]) -> dict[str, Tensor]:
    """Read all tensors of a file, and pass its bytes to `use` in order: its header, then each tensor."""
    tensors = {}
    with header.path.open("rb") as file:
        use(file.read(min(span.start for span in header.ranges.values())))
        for name in sorted(header.ranges, key=lambda name: (header.ranges[name].start, header.ranges[name].size)):
            tensors[name] = _read_tensor(header, file, name)
            use(tensors[name].flatten().view(torch.uint8).numpy().data)
    return tensors


def _read_tensor(header: FileHeader, file: BufferedReader | FileIO, name: str) -> Tensor:
    """Read a tensor from a file positioned at its first byte."""
    span = header.ranges[name]
    data = torch.empty(span.size, dtype=torch.uint8)
    view = memoryview(data.numpy())  # pyright: ignore[reportArgumentType]
    while len(view):
        look()
        count = file.readinto(view[:BLOCK])
        if not count:
            raise _changed(header.path)
        view = view[count:]
    return data.view(span.dtype).reshape(header.shapes[name])


class WatchedFile:
    """A safetensors file whose tensors are read again and again, as long as it stays what it was.

    Nothing is mapped: a mapped file changes when it is saved over, and ends the process where it becomes shorter.
    """

    def __init__(self, header: FileHeader) -> None:
        """Watch the file of a header; raises ValueError if that has changed since."""
        _check_unchanged(header)
        self.header = header
        self.name = header.path.name
        self.bytes, self.seconds = 0, 0.0  # read so far
        self._state = _state(header.path.stat())

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory; raises ValueError if the file is another, or cannot be read."""
        began = time.perf_counter()
        try:
            with self.header.path.open("rb", buffering=0) as file:
                self._check(file)
                file.seek(self.header.ranges[name].start)
                tensor = _read_tensor(self.header, file, name)
                self._check(file)
        except FileNotFoundError:
            raise _changed(self.header.path) from None
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read; check the disk, or get the file again.") from error
        self.bytes += tensor.nbytes
        self.seconds += time.perf_counter() - began
        return tensor

    def _check(self, file: FileIO) -> None:
        if _state(os.fstat(file.fileno())) != self._state:
            raise _changed(self.header.path)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor that stays in its file; each `read` reads it anew."""

    file: WatchedFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.file.header.shapes[self.name]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.file.header.ranges[self.name].size

    def read(self) -> Tensor:
        """Read the tensor as it is stored."""
        return self.file.read(self.name)


def stored_part(header: FileHeader, prefix: str = "") -> dict[str, Stored]:
    """List the tensors under a prefix, named without it, and leave them in their file."""
    file = WatchedFile(header)
    return {name[len(prefix) :]: Stored(file, name) for name in header.shapes if name.startswith(prefix)}


def read_part(file: Any, names: Iterable[str], prefix: str) -> dict[str, Tensor]:
    """Read the tensors under a prefix, named without it."""
    return {name[len(prefix) :]: file.get_tensor(name) for name in names if name.startswith(prefix)}


def shapes_under(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Select the shapes under a prefix, named without it."""
    return {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}


def highest_number(names: Iterable[str], pattern: str) -> int:
    """Find the highest number that a pattern's first group matches at the start of a name; -1 for none."""
    return max((int(m[1]) for name in names if (m := re.match(pattern, name))), default=-1)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def version(path: Path) -> tuple[int, ...]:
    """Read what changes with every change of a file; raises OSError without it."""
    return _version(path.stat())


def _version(stat: os.stat_result) -> tuple[int, ...]:
    """What changes with every change of a file's content, also where its time of change is set back."""
    return *_state(stat), stat.st_ctime_ns


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """What tells a file from another one, and from itself after a change."""
    return stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino


def _check_unchanged(header: FileHeader) -> None:
    if not header.path.is_file() or _stamp(header.path) != header.stamp or read_header(header.path) != header:
        raise _changed(header.path)


def _changed(path: Path) -> ValueError:
    return ValueError(f"{path.name} changed while it was read; start again when nothing writes to it any more.")
