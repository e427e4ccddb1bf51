"""The files of Stable Diffusion: a checkpoint or a diffusers folder, and separate files for some parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ...common.computed import Computed
from ...config import BaseModelConfig
from ..files.kept import KeptFiles
from .family import TEXT_FILES, VAE_FILE
from .load import check_base_model, load_base_model
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

    def check(self) -> None:
        """Raise ValueError for files that are not a trainable Stable Diffusion model, from their headers alone."""
        check_base_model(self.config)

    def outline(self, dtype: torch.dtype = torch.float32) -> StableDiffusion:
        """Build UNet and text encoders without weights."""
        return outline_base_model(self.config, dtype)

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
