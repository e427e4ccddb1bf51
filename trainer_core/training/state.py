"""The state of a run in memory: the objects that its steps use, and its progress."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..common.callbacks import Callbacks
from ..common.world import ALONE, World
from ..config import MemoryConfig, RunConfig
from ..data.fit import PictureLosses
from ..data.plan import Plan, Sample
from ..memory import Programs, Stream
from ..models import BaseModel
from ..networks import Network
from ..objective import Draws, Objective, Pass
from ..optim import Ema
from ..optim.noise_scale import NoiseScale
from ..optim.schedule import Curve
from ..runs import RunFolder
from ..runs.asked import Asked
from ..runs.publish import Destination
from .batch import ReadConditioning, build_conditions
from .conditioning import text_reader
from .encoded import Encoded
from .live import LiveEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The weights of the lowest validation loss so far, as a copy in RAM."""

    steps: int  # finished
    loss: float
    weights: dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Run:
    """A run: the objects that its steps use, all built before the first step, and its progress."""

    config: RunConfig
    plan: Plan
    curve: Curve  # of the learning rate
    base: BaseModel
    encoded: Encoded  # of the whole run, or of the last call of `encode`
    network: Network
    objective: Objective
    optimizer: Any
    scaler: Any  # loss scale of float16
    noise_scale: NoiseScale
    ema: Ema | None  # running average of the weights
    memory: MemoryConfig  # the settings now in use
    stream: Stream  # fetches weights that are kept in RAM
    programs: Programs  # compiled blocks
    device: torch.device
    callbacks: Callbacks
    folder: RunFolder
    destination: Destination
    verify: Callable[[Path], None] | None  # raises to refuse a LoRA file
    continued: Mapping[str, Any] | None  # metadata of the continued LoRA
    world: World = ALONE  # the processes that share its steps
    live: LiveEncoder | None = None  # where nothing that is encoded is kept

    at: int = 0  # steps finished
    losses: list[float] = field(default_factory=list)  # of each step, NaN where it was not finite
    concepts: dict[str, list[float]] = field(default_factory=dict)  # losses of each step, NaN without a sample of one
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps finished, loss)
    best: Best | None = None  # with keep_best or early stopping
    ended: bool = False  # early, as the validation loss did not fall
    saves: int = 0  # so far
    multiplies_in: str | None = None  # how frozen layers multiply: exact, or a format of 8 bits; None: not decided
    exact_blocks: list[str] = field(default_factory=list)  # which multiply exactly nevertheless
    fits: PictureLosses = field(init=False)
    wishes: Asked = field(init=False)  # through the run's folder
    updating: bool = False  # from summed gradients to counted steps: weights, state and counts may not match
    weights_norm: float = 0.0  # sum of the norms of all parameters after the last update
    reported: set[str] = field(default_factory=set)  # kinds of problems already reported

    def __post_init__(self) -> None:
        """Create an empty list of losses for each concept, and begin the watch over each picture."""
        self.wishes = Asked(self.folder.path)
        pictures, objective = self.plan.manifest.pictures, self.config.objective
        self.fits = PictureLosses(
            [picture.digest for picture in pictures],
            [picture.concept for picture in pictures],
            objective.easy_weight,
            objective.odd_pictures == "leave_out",
        )
        self.concepts = self.concepts or {name: [] for name in self.plan.concept_names().values()}

    @property
    def finished(self) -> bool:
        """Tell whether no step is left."""
        return self.ended or self.at >= self.plan.steps

    def encode(self, samples: Sequence[Sample], prompts: Collection[str] = ()) -> None:
        """Encode what passes on some samples read, where nothing is kept; prompts: beside their captions."""
        if self.live is not None:
            self.encoded = self.live.encode(samples, prompts, self.memory)

    def encode_prompts(self) -> None:
        """Encode what samples are drawn with, where nothing is kept."""
        if self.live is not None:
            self.encoded = self.live.encode_prompts(self.config.sample, self.memory)

    def reader(self, *, training: bool) -> ReadConditioning:
        """Build a function that turns a caption into its conditioning; see `text_reader`."""
        return text_reader(self.base, lambda: self.encoded, self.device, training=training)

    def conditions(self, samples: Sequence[Sample], read: ReadConditioning) -> Any:
        """Batch the conditions of samples for the model."""
        return build_conditions(self.base, self.encoded, read, self.plan, samples, self.device)

    def passing(self, samples: Sequence[Sample], draws: Draws, read: ReadConditioning, index: int = 0) -> Pass:
        """Build a pass of some samples with the noise that is drawn for them; index: of their micro-batch."""

        def conditions(captions: Sequence[str], trained: bool) -> Any:
            chosen = [replace(sample, caption=caption) for sample, caption in zip(samples, captions, strict=True)]
            return self.conditions(chosen, read if trained else self.reader(training=True))

        return Pass(
            base=self.base,
            network=self.network,
            draws=draws,
            captions=[sample.caption for sample in samples],
            conditions=conditions,
            memory=self.memory,
            index=index,
            loss=self.config.objective.loss,
            space=self.config.objective.loss_on,
        )

    def note_once(self, kind: str, sentence: str) -> None:
        """Report the first problem of each kind only."""
        if kind not in self.reported:
            self.callbacks.note(sentence)
        self.reported.add(kind)

    def asked(self) -> Collection[str]:
        """Ask the user for wishes after a step, also through the run's folder, and tell all processes.

        Reports once if their weights differ.
        """
        own = {*self.callbacks.asked(), *self.wishes.take()} if self.world.leads else ()
        words, alike = self.world.agree(own, bits_of(self.weights_norm))
        if not alike:
            self.note_once(
                "unlike",
                f"After step {self.at} the weights of the processes differ, although their updates are the same: use "
                "GPUs of one kind, and one version of torch. The LoRA is that of process 0.",
            )
        return words

    def record(self, event: str, **values: Any) -> None:
        """Append a line to the run's log, in the leader; a disk error does not stop the run."""
        if not self.world.leads:
            return
        try:
            self.folder.log(event, **values)
        except OSError as error:
            self.note_once("log", f"{self.folder.path} cannot be written ({error.strerror}); training continues.")


def bits_of(number: float) -> int:
    """Read the 64 bits of a number from 0 on as an integer."""
    return struct.unpack("<q", struct.pack("<d", number))[0]
