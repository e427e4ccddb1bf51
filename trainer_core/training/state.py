"""A run in memory: what its steps work with, and what has happened so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common.callbacks import Callbacks
from ..config import MemoryConfig, RunConfig
from ..data.plan import Plan, Sample
from ..memory import Programs, Stream
from ..models import BaseModel
from ..networks import Network
from ..objective import Objective
from ..optim import Ema
from ..optim.noise_scale import NoiseScale
from ..runs import RunFolder
from ..runs.publish import Destination
from .batch import Read, build_conditions
from .conditioning import text_reader
from .encode import Encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The weights of the lowest validation loss so far, as a copy in RAM."""

    steps: int  # finished
    loss: float
    weights: dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Run:
    """What the steps of a run work with, whole from its birth, and what has happened so far."""

    config: RunConfig
    plan: Plan
    base: BaseModel
    encoded: Encoded
    network: Network
    objective: Objective
    optimizer: Any
    scaler: Any  # of float16's gradients
    noise_scale: NoiseScale
    ema: Ema | None  # the running average of the weights, where one is asked for
    memory: MemoryConfig  # the settings it works with now
    stream: Stream  # brings weights that wait in RAM
    programs: Programs  # compiled blocks
    device: torch.device
    callbacks: Callbacks
    folder: RunFolder
    destination: Destination
    verify: Callable[[Path], None] | None  # a last word on a LoRA's file
    continued: Mapping[str, Any] | None  # what files tell of the LoRA that is continued

    at: int = 0  # steps finished
    losses: list[float] = field(default_factory=list)  # of each step, NaN where it was not finite
    concepts: dict[str, list[float]] = field(default_factory=dict)  # losses of each step, NaN without a sample of one
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps finished, loss)
    best: Best | None = None  # where it is asked for
    ended: bool = False  # early, for good
    saves: int = 0  # so far
    moving: bool = False  # an update is on its way: weights and state do not belong together now
    reported: set[str] = field(default_factory=set)  # kinds of problems that a note has told of

    def __post_init__(self) -> None:
        """Begin the losses of each concept."""
        self.concepts = self.concepts or {name: [] for name in self.plan.concept_names().values()}

    @property
    def finished(self) -> bool:
        """Tell whether no step is left."""
        return self.ended or self.at >= self.plan.steps

    def reader(self, *, learning: bool) -> Read:
        """Return a function that turns a caption into its conditioning, from the cache or the text encoders."""
        return text_reader(self.base, self.encoded, self.device, learning=learning)

    def conditions(self, samples: Sequence[Sample], read: Read) -> Any:
        """Join what the model reads of some samples beside their noised latents."""
        return build_conditions(self.base, self.encoded, read, self.plan, samples, self.device)

    def note_once(self, kind: str, sentence: str) -> None:
        """Tell the person of the first problem of a kind."""
        if kind not in self.reported:
            self.callbacks.note(sentence)
        self.reported.add(kind)

    def record(self, event: str, **values: Any) -> None:
        """Add a line to the run's log; a disk that refuses it does not stop the run."""
        try:
            self.folder.log(event, **values)
        except OSError as error:
            self.note_once("log", f"{self.folder.path} cannot be written ({error.strerror}); training continues.")
