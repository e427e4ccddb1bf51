"""The files of Stable Diffusion: a checkpoint or a diffusers folder, and separate files for some parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.computed import Computed
from ...config import BaseModelConfig
from ..files.kept import KeptFiles
from ..files.safetensors_file import version
from .family import TEXT_FILES, VAE_FILE
from .load import check_base_model, given_files, load_base_model
from .model import StableDiffusion
from .outline import outline_autoencoder, outline_base_model
from .remarks import remarks
from .text import find_tokenizer


class StableDiffusionFiles:
    """The files of a model of Stable Diffusion; implements `Source`."""

    def __init__(self, config: BaseModelConfig) -> None:
        self.config = config
        self.name = Path(config.path).name
        self._kept = KeptFiles()
        self._outlined: list[tuple[int, ...]] = []  # versions of the files that were outlined last
        self._unused: StableDiffusion | None = None  # their outline, given back

    def check(self) -> None:
        """Raise ValueError for files that are not a trainable Stable Diffusion model, from their headers alone."""
        check_base_model(self.config)

    def outline(self, dtype: torch.dtype = torch.float32) -> StableDiffusion:
        """Build UNet and text encoders without weights."""
        versions, unused, self._unused = self._versions(), self._unused, None
        if unused is not None and unused.dtype == dtype and versions == self._outlined:
            return unused
        self._outlined = versions  # read before the files
        with torch.inference_mode(False):  # a node is run in it, and the outline goes on to the training
            return outline_base_model(self.config, dtype)

    def take_back(self, outline: Any) -> None:
        """Keep an outline for the next who asks; a folder's is built anew, as any of its files may have changed."""
        self._unused = outline if all(self._outlined) else None

    def _versions(self) -> list[tuple[int, ...]]:
        files = (Path(self.config.path), *given_files(self.config).values())
        return [version(file) if file.is_file() else () for file in files]

    def outline_autoencoder(self) -> nn.Module:
        """Build the autoencoder without weights."""
        return outline_autoencoder(self.config)

    def load(
        self, dtype: torch.dtype, amend: Callable[[StableDiffusion], None] | None = None, *, in_file: bool = False
    ) -> StableDiffusion:
        """Load the model to the CPU, frozen, offline; in_file: but for the UNet's matrices."""
        if in_file:  # memory is what lacks
            self._kept.clear()
        try:
            return load_base_model(self.config, dtype, amend, self._kept, in_file=in_file)
        finally:
            self._kept.clear()

    def digest(self, path: Path) -> str:
        """Compute the sha256 of a file; its content stays in memory for `load` if it fits."""
        return self._kept.digest(path)

    @property
    def cached_bytes(self) -> int:
        """Bytes of file content in memory for `load`."""
        return self._kept.size

    def remarks(self) -> list[str]:
        """List warnings about the files."""
        return remarks(self.config)

    def files(self) -> dict[str, Path]:
        """Map roles to the files and folders that determine the model's results."""
        config = self.config
        given = {name: getattr(config, name) for name in ("path", VAE_FILE, *TEXT_FILES)}
        tokenizer = find_tokenizer(config.tokenizer, Path(config.path))
        return {role: Path(path) for role, path in given.items() if path} | {"tokenizer": tokenizer}

    def identities(self) -> dict[str, str]:
        """Nothing: the files are all."""
        return {}

    def computes(self) -> Computed:
        """Nothing: the files tell all."""
        return Computed()
