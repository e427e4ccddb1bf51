"""Cache encoded pictures, masks and captions on disk, each under the hash of everything that decides it.

The folder holds shards: safetensors files of many entries each, written once and never changed. Every process writes
its own shards, so that several can share a folder without locks. The entries of a lost or damaged shard are encoded
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.axes import Size
from ..common.disk_errors import describe_disk_error
from ..common.files import written_whole
from ..common.json_files import parse_json
from ..common.leftovers import sweep

if TYPE_CHECKING:
    from .crops import Crop

FORMAT = 1  # increase it whenever the same inputs give other tensors (resampling, encoding, layout)
SHARD_BYTES = 32 * 2**20  # a shard is written when more bytes than this are pending,
SHARD_SECONDS = 10.0  # or when the oldest entry is this old; a crash loses about as much work

_HEADER_BYTES = 256  # rough size of a tensor's name, shape and checksum in a shard
_SHARD_NAME = re.compile(r"shard-[0-9a-f]{32}\.safetensors")


class CacheError(RuntimeError):
    """The cache folder cannot be read or written."""


def _key(**parts: Any) -> str:
    """Compute the sha256 of named parts and the format version."""
    text = json.dumps(_plain({"format": FORMAT, **parts}), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    """Write whole floats as integers, in nested values too: 4 and 4.0 are equal and need the same key."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _cut(crop: Crop) -> dict[str, Any]:
    """Write a crop plainly; pictures have no frames."""
    parts = dataclasses.asdict(crop)
    return parts if crop.frames else {name: part for name, part in parts.items() if name != "frames"}


def latent_key(*, picture_digest: str, crop: Crop, background: str, vae_id: str, dtype: torch.dtype | str) -> str:
    """Compute the key of one picture's latents: content, background, crop, autoencoder, precision."""
    return _key(
        kind="latents",
        picture=picture_digest,
        crop=_cut(crop),
        background=background,
        vae=vae_id,
        dtype=str(dtype).removeprefix("torch."),
    )


def painted_key(
    *, picture_digest: str, mask_digest: str, crop: Crop, background: str, masks: dict[str, Any], vae_id: str
) -> str:
    """Compute the key of an inpainting model's extra input channels: as of latents, with the mask and its settings."""
    return _key(
        kind="painted",
        picture=picture_digest,
        mask=mask_digest,
        crop=_cut(crop),
        background=background,
        masks=masks,
        vae=vae_id,
    )


def reference_key(
    *,
    picture_digest: str,
    crop: Crop,
    background: str,
    vae_id: str,
    length: int = 0,
    last: tuple[str, Crop] | None = None,
) -> str:
    """Compute the key of a control picture's latents, in the autoencoder's scale.

    length: frames of the clip that it begins; 0: it lies beside a picture. last: digest and crop of its last frame.
    """
    of_clip: dict[str, Any] = {"painted": length} if length else {}
    of_clip |= {"last": [last[0], _cut(last[1])]} if last else {}
    return _key(kind="reference", picture=picture_digest, crop=_cut(crop), background=background, vae=vae_id, **of_clip)


def blank_key(*, size: Size, vae_id: str) -> str:
    """Compute the key of an inpainting model's extra input channels where the whole picture is painted."""
    return _key(kind="blank", size=size, vae=vae_id)


def mask_key(*, mask_digest: str, crop: Crop, source: str, invert: bool, threshold: float, moves: bool = False) -> str:
    """Compute the key of one mask at latent size: content, crop, source and the reading of its grey levels.

    moves: each frame of a clip has its own.
    """
    return _key(
        kind="mask",
        mask=mask_digest,
        crop=_cut(crop if moves else dataclasses.replace(crop, frames=())),
        source=source,
        invert=invert,
        threshold=threshold,
    )


def text_key(*, caption: str, encoder_id: str, pictures: Sequence[Any] = ()) -> str:
    """Compute the key of one final caption, encoded by one text encoder; pictures: what decides those that it reads."""
    return _key(kind="text", caption=caption, encoder=encoder_id, **({"pictures": pictures} if pictures else {}))


@dataclass(slots=True, eq=False)
class _Shard:
    """A file of entries, memory-mapped at its first read."""

    path: Path
    entries: dict[str, tuple[str, list[str]]]  # by key: checksum, names of the tensors
    file: safe_open | None = None
    sound: set[str] = field(default_factory=set)  # keys whose checksum was checked
    own: bool = False  # written by this instance, so all of it is needed


class Cache:
    """A folder of tensors by key: written atomically, read memory-mapped, safe to share between processes.

    limit: bytes that `prune` leaves on disk, 0 = no limit. in_ram: new entries stay pending in RAM and are never
    written. Use it in a `with` block, which writes pending entries.
    """

    def __init__(self, folder: Path, limit: int = 0, *, in_ram: bool = False) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self.in_ram = in_ram
        self._index: dict[str, _Shard] = {}
        self._known: set[str] = set()  # names of the shards whose header was read
        self._used: set[str] = set()  # names of the shards that this instance has read or written
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._pending_bytes = 0
        self._pending_since = 0.0
        self.refresh()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.flush()
        except CacheError:
            if error is None:
                raise
            # an error of the cache must not hide the first one

    def refresh(self) -> None:
        """Find new shards of other processes; raises CacheError if the folder is unreadable."""
        for found in self._files():
            if found.name in self._known or not _SHARD_NAME.fullmatch(found.name):
                continue
            path = self.folder / found.name
            try:
                entries = _read_header(path)
            except OSError:  # deleted meanwhile, or not readable: its entries are misses
                continue
            self._known.add(found.name)
            if entries is None:
                _delete(path)
            else:
                self._adopt(_Shard(path, entries))

    def has(self, key: str) -> bool:
        """Tell whether a sound entry exists; `get` then returns it, even if another process deletes its file."""
        return self.get(key) is not None

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Read the tensors of a key (shared and mapped: do not write to them), or None.

        The first read checks the entry's checksum; if it is wrong, the whole shard is deleted and encoded again.
        """
        if (pending := self._pending.get(key)) is not None:
            return dict(pending)
        shard = self._index.get(key)
        if shard is None or (file := self._map(shard)) is None:
            return None
        checksum, names = shard.entries[key]
        try:
            entry = {name: file.get_tensor(f"{key}/{name}") for name in names}
        except SafetensorError:  # the file has changed since its header was read
            del file
            self._drop(shard)
            return None
        if key not in shard.sound:
            if _checksum(key, entry) != checksum:
                del entry, file
                self._drop(shard)
                return None
            shard.sound.add(key)
        self._mark_used(shard)
        return entry

    def put(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Add a copy of an entry, which is written later with others; raises CacheError when a write fails.

        It can be read at once, also after a failed write.
        """
        if "/" in key:
            raise ValueError(f"The key {key!r} contains a slash; build it with latent_key, mask_key or text_key.")
        now = monotonic()
        if not self._pending:
            self._pending_since = now
        entry = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        self._pending_bytes += _weight(entry) - _weight(self._pending.get(key, {}))
        self._pending[key] = entry
        if self._pending_bytes > SHARD_BYTES or now - self._pending_since >= SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the pending entries as one shard; raises CacheError, and keeps them, if that fails."""
        if not self._pending or self.in_ram:
            return
        entries = {key: (_checksum(key, tensors), list(tensors)) for key, tensors in self._pending.items()}
        data = safetensors.torch.save(
            {f"{key}/{name}": tensor for key, tensors in self._pending.items() for name, tensor in tensors.items()},
            {"checksums": json.dumps({key: checksum for key, (checksum, _) in entries.items()})},
        )
        shard = _Shard(self.folder / f"shard-{uuid.uuid4().hex}.safetensors", entries, own=True)
        try:
            with written_whole(shard.path) as temporary:
                temporary.write_bytes(data)
            # mapped at once, so that its data stays readable if another process deletes it
            with contextlib.suppress(FileNotFoundError):
                shard.file = _map_file(shard.path)
        except OSError as error:
            raise self._failure(error, len(data)) from error
        if shard.file is None:
            return  # the entries stay pending for the next shard
        self._known.add(shard.path.name)
        self._used.add(shard.path.name)
        self._adopt(shard)
        self._pending, self._pending_bytes = {}, 0

    def prune(self) -> int:
        """Delete the least recently used shards until the folder is within its limit; return the number of freed bytes.

        Shards that this instance has read or written stay, and pending entries count. If that is not enough, shards of
        which it needs less than half are compacted. Leftovers of a crash are deleted too, other files are not touched.
        Raises CacheError if the folder cannot be read or written.
        """
        sweep([self.folder])
        freed = 0
        if self.limit:
            shards = self._stats(_SHARD_NAME)
            excess = sum(size for _, size, _ in shards) - self.limit
            excess += 0 if self.in_ram else self._pending_bytes
            for _, size, path in sorted(shards):
                if freed < excess and path.name not in self._used and _delete(path):
                    freed += size
            if freed < excess and not self.in_ram:
                freed += self._compact(excess - freed)
        return freed

    def _compact(self, excess: int) -> int:
        """Move the used entries of mostly unused shards into new shards; return the number of freed bytes."""
        old: list[tuple[_Shard, int]] = []
        for shard in {id(shard): shard for shard in self._index.values() if not shard.own}.values():
            if not shard.sound or len(shard.sound) == len(shard.entries):
                continue
            used = {key: self.get(key) for key in shard.sound if self._index.get(key) is shard}
            with contextlib.suppress(OSError):  # deleted by another process
                size = shard.path.stat().st_size
                waste = size - sum(_weight(entry) for entry in used.values() if entry is not None)
                if sum(freed for _, freed in old) < excess and 2 * waste > size:
                    for key, entry in used.items():
                        if entry is not None:
                            self.put(key, entry)
                    old.append((shard, waste))
        if old:
            self.flush()
        for shard, _ in old:
            self._forget(shard)
            shard.file = None  # a mapped file keeps its space until the process ends, on Windows for ever
        return sum(waste for shard, waste in old if _delete(shard.path))

    def size(self) -> int:
        """Count the bytes of all shards on disk, of all processes; raises CacheError if the folder is unreadable."""
        return sum(size for _, size, _ in self._stats(_SHARD_NAME))

    def _adopt(self, shard: _Shard) -> None:
        """Add a shard's entries to the index; entries that are mapped already keep their shard."""
        own = shard.path.name in self._used
        for key in shard.entries:
            known = self._index.get(key)
            if own or known is None or known.file is None:
                self._index[key] = shard

    def _map(self, shard: _Shard) -> safe_open | None:
        """Map a shard's file at its first use; None, and its entries are misses, if that fails."""
        if shard.file is None:
            try:
                shard.file = _map_file(shard.path)
            except OSError:  # deleted by another process, or no longer readable
                self._forget(shard)
            except SafetensorError:
                self._drop(shard)
        return shard.file

    def _mark_used(self, shard: _Shard) -> None:
        """Make a shard the most recently used, once."""
        if shard.path.name not in self._used:
            self._used.add(shard.path.name)
            # a read-only folder, or deleted after it was mapped: only the order of deletion suffers
            with contextlib.suppress(OSError):
                os.utime(shard.path)

    def _drop(self, shard: _Shard) -> None:
        """Delete a damaged shard; entries that were read from it stay mapped and readable."""
        shard.file = None if not shard.sound else shard.file  # Windows deletes nothing that is mapped
        _delete(shard.path)
        self._forget(shard)

    def _forget(self, shard: _Shard) -> None:
        """Remove the entries that were not read yet from the index."""
        for key in shard.entries.keys() - shard.sound:
            if self._index.get(key) is shard:
                del self._index[key]

    def _files(self) -> list[os.DirEntry[str]]:
        """List the folder; a missing folder is empty."""
        try:
            with os.scandir(self.folder) as found:
                return list(found)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failure(error) from error

    def _stats(self, name: re.Pattern[str]) -> list[tuple[int, int, Path]]:
        """List (last use in nanoseconds, bytes, path) of the files whose names match."""
        stats = []
        for found in self._files():
            if name.fullmatch(found.name):
                try:
                    stat = found.stat()
                except OSError:  # deleted by another process since it was listed
                    continue
                stats.append((stat.st_mtime_ns, stat.st_size, self.folder / found.name))
        return stats

    def _failure(self, error: OSError, needed: int = 0) -> CacheError:
        return CacheError(f"Encoded pictures cannot be cached: {describe_disk_error(error, self.folder, needed)}")


class MicroBatchCache(Cache):
    """A cache of one micro-batch, in RAM: it reads and writes no file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, in_ram=True)

    def refresh(self) -> None:
        """Find nothing: entries of the folder are not used."""


def _read_header(path: Path) -> dict[str, tuple[str, list[str]]] | None:
    """Read checksum and tensor names of a shard's entries by key, None if it is damaged; raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return None
        text = file.read(length)
    try:
        header = parse_json(text)
        checksums = parse_json(header.pop("__metadata__")["checksums"])
        entries: dict[str, tuple[str, list[str]]] = {key: (checksum, []) for key, checksum in checksums.items()}
        end = 0
        for full_name, tensor in header.items():
            key, _, name = full_name.partition("/")
            entries[key][1].append(name)
            end = max(end, tensor["data_offsets"][1])
    # the bytes may be anything: no text, no JSON, JSON of another structure
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return entries if 8 + length + end == size else None


def _map_file(path: Path) -> safe_open:
    """Map a shard; raises OSError when it cannot be opened, SafetensorError when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # torch opens the file again, and it may have been deleted in between
        if path.exists():
            raise OSError(str(error)) from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error


def _checksum(key: str, tensors: dict[str, Tensor]) -> str:
    """Compute the CRC-32 over key, names, dtypes, shapes and bytes."""
    total = zlib.crc32(key.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"/{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _weight(entry: dict[str, Tensor]) -> int:
    """Estimate the bytes of an entry in a shard."""
    return sum(tensor.nbytes + _HEADER_BYTES for tensor in entry.values())


def _delete(path: Path) -> bool:
    """Delete a file; tell whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a mapped file on Windows, or a read-only folder
        return False
    return True
