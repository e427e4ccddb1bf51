"""Stable Diffusion from the disk: one checkpoint file or a diffusers folder, with other files for some of its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...config import BaseModelConfig
from ..files.kept import KeptFiles
from .family import TEXT_FILES, VAE_FILE
from .load import check_base_model, load_base_model
from .model import StableDiffusion
from .outline import outline_base_model
from .remarks import remarks
from .text import find_tokenizer


class StableDiffusionFiles:
    """The files of a model of Stable Diffusion; implements `Source`."""

    def __init__(self, config: BaseModelConfig) -> None:
        self.config = config
        self.name = Path(config.path).name
        self._kept = KeptFiles()

    def check(self) -> None:
        """Raise ValueError for files that are no model of Stable Diffusion, from their headers alone."""
        check_base_model(self.config)

    def outline(self, dtype: torch.dtype = torch.float32) -> StableDiffusion:
        """Build UNet and text encoders with shapes alone."""
        return outline_base_model(self.config, dtype)

    def load(self, dtype: torch.dtype, amend: Callable[[StableDiffusion], None] | None = None) -> StableDiffusion:
        """Load the model to the CPU, frozen, offline."""
        try:
            return load_base_model(self.config, dtype, amend, self._kept)
        finally:
            self._kept.clear()

    def digest(self, path: Path) -> str:
        """Compute the sha256 of a file; its content is kept in memory for `load`, where there is room."""
        return self._kept.digest(path)

    @property
    def held(self) -> int:
        """Return the bytes in memory that `load` will use."""
        return self._kept.size

    def remarks(self) -> list[str]:
        """Return sentences on what may surprise about the files."""
        return remarks(self.config)

    def files(self) -> dict[str, Path]:
        """Return the files and folders that decide what the model computes, by role."""
        config = self.config
        given = {name: getattr(config, name) for name in ("path", VAE_FILE, *TEXT_FILES)}
        tokenizer = find_tokenizer(config.tokenizer, Path(config.path))
        return {role: Path(place) for role, place in given.items() if place} | {"tokenizer": tokenizer}
