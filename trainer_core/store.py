"""Keep encoded tensors on disk under the hash of everything that decides them.

The folder holds shards: safetensors files of many entries each, written once and never changed. Every process writes
shards of its own, so that several can share a folder without locks; a shard that vanishes or is damaged only costs
encoding its entries again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import time
import uuid
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Crop

FORMAT = 2  # raise it whenever the same inputs give other tensors (resampling, encoding, layout)
SHARD_BYTES = 32 * 2**20  # a shard is written when more than this is pending,
SHARD_SECONDS = 10.0  # or when its oldest entry has waited this long: about what a crash can cost

_HEADER_BYTES = 256  # what a tensor's name, shape and checksum take in a shard, roughly
_TEMPORARY_SECONDS = 24 * 3600  # a temporary file this old belongs to no living writer
_SHARD_NAME = re.compile(r"shard-[0-9a-f]{32}\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.shard-[0-9a-f]{32}\.tmp")
_FORMAT_1_FOLDER = re.compile(r"[0-9a-f]{2}")
_FORMAT_1_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


class StoreError(RuntimeError):
    """The folder of the store cannot be read or written."""


def _key(**parts: Any) -> str:
    """Return the sha256 of named parts and the format version."""
    text = json.dumps(_plain({"format": FORMAT, **parts}), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    """Write whole floats as integers, in nested values too: 4 and 4.0 are equal and need the same key."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def latent_key(*, picture_digest: str, crop: Crop, background: str, vae_id: str, dtype: torch.dtype | str) -> str:
    """Name the latents of one picture at one crop: content, what shows through it, geometry, encoder, precision."""
    return _key(
        kind="latents",
        picture=picture_digest,
        crop=dataclasses.asdict(crop),
        background=background,
        vae=vae_id,
        dtype=str(dtype).removeprefix("torch."),
    )


def painted_key(
    *, picture_digest: str, mask_digest: str, crop: Crop, background: str, masks: dict[str, Any], vae_id: str
) -> str:
    """Name what an inpainting model is told of a masked picture: as latents are, with mask and how it is read."""
    return _key(
        kind="painted",
        picture=picture_digest,
        mask=mask_digest,
        crop=dataclasses.asdict(crop),
        background=background,
        masks=masks,
        vae=vae_id,
    )


def blank_key(*, size: tuple[int, int], vae_id: str) -> str:
    """Name what an inpainting model is told where all of a picture is painted."""
    return _key(kind="blank", size=size, vae=vae_id)


def mask_key(*, mask_digest: str, crop: Crop, source: str, invert: bool, threshold: float) -> str:
    """Name one mask at latent size: content, geometry, where it is read from and how its grey levels are read."""
    return _key(
        kind="mask",
        mask=mask_digest,
        crop=dataclasses.asdict(crop),
        source=source,
        invert=invert,
        threshold=threshold,
    )


def text_key(*, caption: str, encoder_id: str, clip_skip: int, max_chunks: int) -> str:
    """Name the encoding of one final caption by one text encoder."""
    return _key(kind="text", caption=caption, encoder=encoder_id, clip_skip=clip_skip, max_chunks=max_chunks)


@dataclass(slots=True, eq=False)
class _Shard:
    """A file of entries, mapped when it is first read."""

    path: Path
    entries: dict[str, tuple[str, list[str]]]  # by key: checksum, names of the tensors
    file: safe_open | None = None
    sound: set[str] = field(default_factory=set)  # keys whose checksum was found right
    own: bool = False  # written by this instance, which then needs all of it


class Store:
    """A folder of tensors by key: written atomically, read memory-mapped, safe to share between processes.

    limit: bytes that prune leaves on disk, 0 = no limit. Leaving the store as a context writes what is pending.
    """

    def __init__(self, folder: Path, limit: int = 0) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self._index: dict[str, _Shard] = {}
        self._known: set[str] = set()  # names of the shards whose header was read
        self._used: set[str] = set()  # names of the shards that this instance has read or written
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._pending_bytes = 0
        self._pending_since = 0.0
        self.refresh()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.flush()
        except StoreError:
            if error is None:
                raise
            # what passes is why the work ended; a cache that is not written must not hide it

    def refresh(self) -> None:
        """Find the shards that other processes have written since; raises StoreError on an unreadable folder."""
        for found in self._files():
            if found.name in self._known or not _SHARD_NAME.fullmatch(found.name):
                continue
            path = self.folder / found.name
            try:
                entries = _read_header(path)
            except OSError:  # pruned a moment ago, or not ours to read: its entries are misses
                continue
            self._known.add(found.name)
            if entries is None:
                _delete(path)
            else:
                self._adopt(_Shard(path, entries))

    def has(self, key: str) -> bool:
        """Tell whether a sound entry exists; from then on `get` gives it, even if others prune its file."""
        return self.get(key) is not None

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a key (shared and mapped: do not write to them), or None.

        The first read checks the entry's checksum; a wrong one deletes the whole shard, so that it is rebuilt.
        """
        if (pending := self._pending.get(key)) is not None:
            return dict(pending)
        shard = self._index.get(key)
        if shard is None or (file := self._map(shard)) is None:
            return None
        checksum, names = shard.entries[key]
        try:
            entry = {name: file.get_tensor(f"{key}/{name}") for name in names}
        except SafetensorError:  # the file is another than when its header was read
            self._drop(shard)
            return None
        if key not in shard.sound:
            if _checksum(key, entry) != checksum:
                self._drop(shard)
                return None
            shard.sound.add(key)
        self._mark_used(shard)
        return entry

    def put(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep a copy of an entry and write it with others later; raises StoreError when that fails.

        It can be read at once, and still after a failed write.
        """
        if "/" in key:
            raise ValueError(f"The key {key!r} holds a slash; make it with latent_key, mask_key or text_key.")
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
        """Write the pending entries as one shard; raises StoreError, and keeps them, when that fails."""
        if not self._pending:
            return
        entries = {key: (_checksum(key, tensors), list(tensors)) for key, tensors in self._pending.items()}
        data = safetensors.torch.save(
            {f"{key}/{name}": tensor for key, tensors in self._pending.items() for name, tensor in tensors.items()},
            {"checksums": json.dumps({key: checksum for key, (checksum, _) in entries.items()})},
        )
        shard = _Shard(self.folder / f"shard-{uuid.uuid4().hex}.safetensors", entries, own=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(shard.path, data)
            # mapped at once, so that no other process can prune it away; one may have done so just before
            with contextlib.suppress(FileNotFoundError):
                shard.file = _map_file(shard.path)
        except OSError as error:
            raise self._failure("written", error) from error
        if shard.file is None:
            return  # the entries stay pending for the next shard
        self._known.add(shard.path.name)
        self._used.add(shard.path.name)
        self._adopt(shard)
        self._pending, self._pending_bytes = {}, 0

    def prune(self) -> int:
        """Delete what is least recently used until the folder keeps its limit, and return the bytes that freed.

        What this instance has read or written stays, pending entries count; if that is not enough, shards of which it
        needs less than half are written anew. Files of format 1 and temporary files left by a crash go, too; files of
        others are not touched. Raises StoreError on a folder that cannot be read or written.
        """
        for found in self._files():
            if _FORMAT_1_FOLDER.fullmatch(found.name) and found.is_dir(follow_symlinks=False):
                _remove_format_1(Path(found.path))
        for written, _, path in self._stats(_TEMPORARY_NAME):
            if time.time() - written / 1e9 > _TEMPORARY_SECONDS:
                _delete(path)
        freed = 0
        if self.limit:
            shards = self._stats(_SHARD_NAME)
            excess = sum(size for _, size, _ in shards) + self._pending_bytes - self.limit
            for _, size, path in sorted(shards):
                if freed < excess and path.name not in self._used and _delete(path):
                    freed += size
            if freed < excess:
                freed += self._compact(excess - freed)
        return freed

    def _compact(self, excess: int) -> int:
        """Write what is used of shards that are mostly unused into new ones, and return the bytes that freed."""
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
            shard.file = None  # else the space comes back when this process ends, and on Windows never
        return sum(waste for shard, waste in old if _delete(shard.path))

    def size(self) -> int:
        """Return the bytes of all shards on disk, of every process; raises StoreError on an unreadable folder."""
        return sum(size for _, size, _ in self._stats(_SHARD_NAME))

    def _adopt(self, shard: _Shard) -> None:
        """Take a shard's entries into the index; those that are already mapped stay where they are safe."""
        own = shard.path.name in self._used
        for key in shard.entries:
            known = self._index.get(key)
            if own or known is None or known.file is None:
                self._index[key] = shard

    def _map(self, shard: _Shard) -> safe_open | None:
        """Return a shard's mapped file, mapped at the first time; None, and its entries are misses, if that fails."""
        if shard.file is None:
            try:
                shard.file = _map_file(shard.path)
            except OSError:  # pruned by another process, or not readable any more
                self._forget(shard)
            except SafetensorError:
                self._drop(shard)
        return shard.file

    def _mark_used(self, shard: _Shard) -> None:
        """Make a shard the most recently used, once."""
        if shard.path.name not in self._used:
            self._used.add(shard.path.name)
            # a read-only folder, or pruned after it was mapped: only the order of pruning suffers
            with contextlib.suppress(OSError):
                os.utime(shard.path)

    def _drop(self, shard: _Shard) -> None:
        """Delete a damaged shard; what was read from it stays mapped and readable."""
        _delete(shard.path)
        self._forget(shard)

    def _forget(self, shard: _Shard) -> None:
        """Take the entries that were not read yet out of the index."""
        for key in shard.entries.keys() - shard.sound:
            if self._index.get(key) is shard:
                del self._index[key]

    def _files(self) -> list[os.DirEntry[str]]:
        """List the folder; none is an empty one."""
        try:
            with os.scandir(self.folder) as found:
                return list(found)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failure("read", error) from error

    def _stats(self, name: re.Pattern[str]) -> list[tuple[int, int, Path]]:
        """Return (nanoseconds of last use, bytes, path) of the files of that name."""
        stats = []
        for found in self._files():
            if name.fullmatch(found.name):
                try:
                    stat = found.stat()
                except OSError:  # deleted by another process since it was listed
                    continue
                stats.append((stat.st_mtime_ns, stat.st_size, self.folder / found.name))
        return stats

    def _failure(self, verb: str, error: OSError) -> StoreError:
        return StoreError(
            f"The cache folder {self.folder} cannot be {verb}: {error.strerror or error}; "
            "free space there or choose another place."
        )


def _read_header(path: Path) -> dict[str, tuple[str, list[str]]] | None:
    """Return checksum and tensor names of a shard's entries by key, None if it is damaged; raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return None
        text = file.read(length)
    try:
        header = json.loads(text)
        checksums = json.loads(header.pop("__metadata__")["checksums"])
        entries: dict[str, tuple[str, list[str]]] = {key: (checksum, []) for key, checksum in checksums.items()}
        end = 0
        for full_name, tensor in header.items():
            key, _, name = full_name.partition("/")
            entries[key][1].append(name)
            end = max(end, tensor["data_offsets"][1])
    # any bytes can stand there: no text, no JSON, JSON of other shape, brackets without end
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return entries if 8 + length + end == size else None


def _map_file(path: Path) -> safe_open:
    """Map a shard; raises OSError when it cannot be opened, SafetensorError when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # torch opens the file a second time, and it may have been pruned in between
        if path.exists():
            raise OSError(str(error)) from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error


def _checksum(key: str, tensors: dict[str, Tensor]) -> str:
    """Return the CRC-32 over key, names, types, shapes and bytes."""
    total = zlib.crc32(key.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"/{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _weight(entry: dict[str, Tensor]) -> int:
    """Return about how many bytes an entry takes in a shard."""
    return sum(tensor.nbytes + _HEADER_BYTES for tensor in entry.values())


def _write(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, then rename it; nothing stays behind if that fails."""
    temporary = path.with_name(f".{path.stem}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _delete(path: Path) -> bool:
    """Delete a file and tell whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # Windows deletes no mapped file, a read-only folder none
        return False
    return True


def _remove_format_1(folder: Path) -> None:
    """Delete the entries of format 1, one file each, from a sub-folder, and the sub-folder if that empties it."""
    # another process does the same, or the sub-folder holds files of others: what is left does no harm
    with contextlib.suppress(OSError):
        old = [p for p in folder.iterdir() if _FORMAT_1_NAME.fullmatch(p.name) and p.name.startswith(folder.name)]
        if old and all([_delete(path) for path in old]):
            folder.rmdir()
