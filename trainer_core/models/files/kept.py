"""Keep model files in memory between hashing and loading, so that each is read from the disk once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import psutil
from torch import Tensor

from ...common.files import file_digest
from .safetensors_file import FileHeader, is_readable, opened, read_header, read_whole

SHARE = 0.5  # of the free RAM for a kept file; a larger one is read twice


class KeptFiles:
    """The tensors of safetensors files between hashing and loading."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[FileHeader, dict[str, Tensor]]] = {}

    @property
    def size(self) -> int:
        """Bytes of all kept tensors."""
        return sum(tensor.nbytes for _, tensors in self._files.values() for tensor in tensors.values())

    def digest(self, path: Path) -> str:
        """Compute the sha256 of a file, and keep the tensors of a safetensors file that fits into RAM."""
        if not is_readable(path.name) or path.stat().st_size > SHARE * psutil.virtual_memory().available:
            return file_digest(path)
        header = read_header(path)
        digest = hashlib.sha256()
        with opened(header):
            tensors = read_whole(header, digest.update)
        self._files[path] = header, tensors
        return digest.hexdigest()

    def take(self, header: FileHeader) -> dict[str, Tensor]:
        """Remove and return the tensors of a file; {} for a file that is not kept or has changed since."""
        kept, tensors = self._files.pop(header.path, (header, {}))
        return tensors if kept.stamp == header.stamp and kept.ranges == header.ranges else {}

    def clear(self) -> None:
        """Drop all files."""
        self._files.clear()
