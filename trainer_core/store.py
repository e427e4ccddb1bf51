"""Keep encoded tensors on disk under the hash of everything that decides them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Crop

FORMAT = 1  # raise it whenever the same inputs give other tensors (resampling, encoding, layout)
_MOST_OPEN = 16_384  # mapped entries at a time; Linux allows a process about 65 000 mappings


def _key(**parts: Any) -> str:
    """Return the sha256 of named parts and the format version."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def latent_key(*, picture_digest: str, crop: Crop, vae_id: str, dtype: torch.dtype | str) -> str:
    """Name the latents of one picture at one crop: content, geometry, encoder and precision."""
    return _key(
        kind="latents",
        picture=picture_digest,
        crop=dataclasses.asdict(crop),
        vae=vae_id,
        dtype=str(dtype).removeprefix("torch."),
    )


def mask_key(*, mask_digest: str, crop: Crop, invert: bool) -> str:
    """Name one mask at latent size: content, geometry and whether it is inverted."""
    return _key(kind="mask", mask=mask_digest, crop=dataclasses.asdict(crop), invert=invert)


def text_key(*, caption: str, encoder_id: str, clip_skip: int) -> str:
    """Name the encoding of one final caption by one text encoder."""
    return _key(kind="text", caption=caption, encoder=encoder_id, clip_skip=clip_skip)


class Store:
    """A folder of tensors by key: written atomically, read memory-mapped, safe to share between processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, dict[str, Tensor]] = {}

    def path(self, key: str) -> Path:
        """Return the file of a key, whether it exists or not."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Tell whether a sound entry exists; a broken one is deleted and counts as missing."""
        return self.get(key) is not None

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a key (shared and mapped: do not write to them), or None.

        The first read checks the entry's checksum; a corrupt or truncated file is deleted and is a miss.
        """
        if (entry := self._open.get(key)) is not None:
            return entry
        path = self.path(key)
        try:
            entry = _read(path)
        except FileNotFoundError:
            return None
        except SafetensorError:
            entry = None
        if entry is None:
            path.unlink(missing_ok=True)
            return None
        while len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        self._open[key] = entry
        return entry

    def put(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Write an entry: a temporary file in the same folder, synced, then renamed over the old one."""
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        data = safetensors.torch.save(plain, {"checksum": _checksum(plain)})
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{key}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._open.pop(key, None)


def _read(path: Path) -> dict[str, Tensor] | None:
    """Map an entry, None if its bytes changed; raises FileNotFoundError, or SafetensorError on other formats."""
    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get("checksum")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors if stored == _checksum(tensors) else None


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return the CRC-32 over names, types, shapes and bytes."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _replace(temporary: Path, path: Path) -> None:
    """Rename over the entry; Windows refuses while another process maps an equal one, which then stays."""
    try:
        os.replace(temporary, path)
    except PermissionError:
        if not path.exists():
            raise
