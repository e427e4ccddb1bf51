"""What a run is asked for, and what is planned of it before its models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common.access import ANYWHERE, Access
from ..common.callbacks import Callbacks
from ..common.world import ALONE, World
from ..config import RunConfig, SamplePicture
from ..data.controls import References
from ..data.plan import Plan
from ..data.scan import PLACE
from ..models import BaseModel, Source
from ..runs import Keys
from ..runs.publish import Destination


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A planned run, before its models are loaded."""

    plan: Plan
    keys: Keys
    inputs: dict[str, str]  # digest of each part of the run's key
    models: dict[str, str]  # sha256 of the files of the base model and of LoRAs, by role
    outline: BaseModel  # on the meta device
    drawn: Mapping[SamplePicture, References] = field(default_factory=dict)  # control pictures of samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request for a run: its settings, its folders, and its callbacks."""

    config: RunConfig
    source: Source
    device: torch.device
    dtype: torch.dtype  # of activations
    cache: Path
    cache_limit: int  # bytes, 0 = any size
    runs: Path
    logs: Path | None
    destination: Destination
    callbacks: Callbacks
    verify: Callable[[Path], None] | None  # raises to refuse a LoRA file
    access: Access = ANYWHERE  # the places that pictures, captions and masks may be read from
    workflow: Mapping[str, Any] | None = None  # of ComfyUI, kept in the run's folder
    world: World = ALONE  # the processes that share the run

    def places(self) -> list[Path]:
        """List the folders that many runs write files into; a run's own folders are cleared when they are locked."""
        destination = self.destination
        return [destination.output.parent, destination.embeddings, self.runs, self.cache, (self.cache / PLACE).parent]
