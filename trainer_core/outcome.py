"""What a run has come to: its weights as they are, their average, the best ones, and the files of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .callbacks import Callbacks
from .config import RunConfig
from .encode import Encoded
from .export import build_metadata, save_embeddings, save_lora, unused_path
from .models import BaseModel
from .networks import Network
from .networks.bake import bake_network
from .optim import Ema, take_average
from .plan import Plan
from .validate import Best


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves behind."""

    path: Path  # the LoRA file that the tensors are in
    tensors: dict[str, Tensor]  # as they are in the file
    embeddings: dict[str, Path]  # the file of each word that was learned
    losses: list[float]  # of each step, NaN where it was not finite
    concepts: dict[str, list[float]]  # mean loss of each concept's samples in each step, NaN where there were none
    validation: list[tuple[int, float]]  # (steps finished, loss of the validation pictures)
    best: tuple[int, float] | None  # where the best weights were asked for: (their step, their validation loss)
    others: tuple[Path, ...]  # files of the weights that `path` does not hold: last, plain or averaged ones
    log: Path | None  # folder of the log
    samples: Tensor  # (N, H, W, 3) in 0..1; where there is an average too, those of `path` before those of the other
    plan: Plan


@dataclass(kw_only=True)
class Run:
    """What the steps of a run work with, and what has happened so far."""

    base: BaseModel
    network: Network
    plan: Plan
    encoded: Encoded
    config: RunConfig
    device: torch.device
    callbacks: Callbacks
    started: float  # seconds since the epoch
    continued: Mapping[str, Any] | None = None  # what is told of the file that is continued
    losses: list[float] = field(default_factory=list)  # of each step, NaN where it was not finite
    concepts: dict[str, list[float]] = field(default_factory=dict)  # of each step, NaN where it had no sample of one
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps finished, loss)
    optimizer: Any = None
    ema: Ema | None = None  # the running average of the weights
    best: Best | None = None  # where it is asked for
    at: int = 0  # steps finished


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One set of weights that a run has come to."""

    ending: str  # of its file's name
    weights: Callable[[], AbstractContextManager[Any]]  # lets the network have them
    steps: int  # after which they were reached
    measured: bool = False  # it is these that validation measures


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """One version of a run in files."""

    path: Path
    tensors: dict[str, Tensor]  # as they are in the file
    words: dict[str, Path]  # the file of each word that was learned

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the LoRA's file and those of its words."""
        return self.path, *self.words.values()


def versions(run: Run) -> list[Version]:
    """Return what a run has come to; the first is what it gives to others."""
    take_average(run.optimizer)
    found = [Version(ending="", weights=nullcontext, steps=run.at, measured=True)]
    if run.ema is not None:
        found.append(Version(ending="-ema", weights=run.ema.swapped, steps=run.at))
        if run.config.optimizer.ema_output == "average":
            found = [replace(found[1], measured=True), replace(found[0], measured=False)]
    if run.best is None or run.best.steps == run.at:
        return found
    weights = functools.partial(_holding, run.network, run.best.weights)
    best = Version(ending="", weights=weights, steps=run.best.steps, measured=True)
    return [best, *(replace(version, ending=version.ending or "-last") for version in found)]


@contextmanager
def _holding(network: Network, weights: dict[str, Tensor]) -> Iterator[None]:
    """Let a network have other weights for the length of a `with` block, and exactly its own afterwards."""
    kept = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(weights)
    try:
        yield
    finally:
        network.load_state_dict(kept)


def save_run(
    run: Run, output: Path, words: Path | None = None, verify: Callable[[Path], None] | None = None
) -> list[Saved]:
    """Write a finished run's LoRA files in the order of `versions`, and say which are the best weights.

    The last weights beside the best ones are kept in float32, as what one would go on from. words: folder of the
    words that are learned, by default output's. verify: as for save_lora.
    """
    output, train, saved = unused_path(output), run.config.train, []
    for version in versions(run):
        path = unused_path(output.with_name(f"{output.stem}{version.ending}.safetensors"))
        exact = version.ending == "-last"
        dtype, bake = "float32" if exact else train.save_dtype, run.config.lora.bake
        saved.append(_save(run, version, path, words, dtype, verify, bake))
    if run.best is not None:
        run.callbacks.note(_describe_best(run, run.best, saved))
    return saved


def save_stopped(run: Run, output: Path, words: Path | None = None) -> list[Saved]:
    """Write what a run that does not finish has learned, in float32; words: as for save_run."""
    saved = []
    for version in versions(run):
        kind = f"-stopped-at-{run.at}{version.ending.removeprefix('-last')}"
        kind = f"-best-at-{version.steps}" if version.steps < run.at else kind
        path = unused_path(output.with_name(f"{output.stem}{kind}.safetensors"))
        saved.append(_save(run, version, path, words, "float32"))
    return saved


def _save(
    run: Run,
    version: Version,
    path: Path,
    folder: Path | None,
    dtype: str,
    verify: Callable[[Path], None] | None = None,
    bake: bool = False,
) -> Saved:
    loss = dict(run.validation).get(version.steps) if version.measured else None
    about = {"steps": version.steps, "validation_loss": loss, "started": run.started, "start": run.continued}
    metadata = build_metadata(run.config, run.plan, run.base, name=path.stem, **about)
    if version.ending == "-ema":
        metadata["atelier.average"] = "ema"
    with version.weights():
        tensors = run.network.tensors()
        if bake:
            tensors, sentence = bake_network(run.network, run.config.train.seed)
            run.callbacks.note(sentence)
        stored = save_lora(path, tensors, metadata, dtype, verify)
        vectors = run.network.embeddings.tensors()
        words = save_embeddings(folder or path.parent, path.stem, vectors, run.base.family, metadata)
        return Saved(path=path, tensors=stored, words=words)


def _describe_best(run: Run, best: Best, saved: list[Saved]) -> str:
    """Say when the validation loss was lowest, and where the other weights are."""
    (_, start), *_ = run.validation
    gain = "" if best.loss < start else f" (before the first step it was {start:.4f}: nothing was gained)"
    found = f"The validation loss was lowest after step {best.steps}: {best.loss:.4f}{gain}."
    if best.steps == run.at:
        return found
    return f"{found} The LoRA is the one of that step; the one of step {run.at} is {saved[-1].path.name}."
