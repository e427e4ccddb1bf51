"""What a run has come to: its weights as they are, their average, the best ones, and the files of each."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .callbacks import Callbacks
from .config import MemoryConfig, RunConfig, SavesConfig, fill_name, plain_name
from .encode import Encoded
from .export import copy_lora, is_copy, is_ours, save_embeddings, save_lora, word_path
from .files import check_writable, file_digest, write_json
from .gradient_noise import NoiseScale
from .memory import Programs, Stream
from .metadata import build_metadata
from .models import BaseModel
from .networks import Network
from .networks.bake import bake_network
from .optim import Ema, averaged
from .plan import Plan
from .run import FILES, LORA, PUBLISHED, Checkpoint, RunFolder, read_json
from .validate import Best

MOST_BYTES_OF_FILES = 250  # of a name in UTF-8; most file systems take 255


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
    folder: RunFolder
    shelf: Shelf
    verify: Callable[[Path], None] | None = None  # a last word on a LoRA's file
    stream: Stream = field(init=False)  # brings weights that wait in RAM
    continued: Mapping[str, Any] | None = None  # what is told of the file that is continued
    losses: list[float] = field(default_factory=list)  # of each step, NaN where it was not finite
    concept_names: Mapping[int, str] = field(init=False)  # by number
    concepts: dict[str, list[float]] = field(init=False)  # losses of each step, NaN where it had no sample of one
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps finished, loss)
    optimizer: Any = None
    scaler: Any = None
    noise_scale: NoiseScale | None = None
    ema: Ema | None = None  # the running average of the weights
    best: Best | None = None  # where it is asked for
    at: int = 0  # steps finished
    ended: bool = False  # early, for good
    saves: int = 0  # so far
    sampling_failed: bool = False  # and it was said
    log_failed: bool = False  # and it was said
    programs: Programs | None = None  # the UNet's compiled blocks
    memory: MemoryConfig = field(init=False)  # the settings it works with now
    moving: bool = False  # an update is on its way: weights and state do not belong together now

    def __post_init__(self) -> None:
        self.stream = Stream(self.device)
        self.memory = self.config.memory
        self.concept_names = self.plan.concept_names()
        self.concepts = {name: [] for name in self.concept_names.values()}

    def record(self, event: str, **values: Any) -> None:
        """Add a line to the run's log; a disk that refuses it is told of once, and does not stop the run."""
        try:
            self.folder.log(event, **values)
        except OSError as error:
            if not self.log_failed:
                self.callbacks.note(f"{self.folder.path} cannot be written ({error.strerror}); the run goes on.")
            self.log_failed = True


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
    words: dict[str, Path]  # the file of each word that was learned
    steps: int

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the LoRA's file and those of its words."""
        return self.path, *self.words.values()


def versions(run: Run) -> list[Version]:
    """Return what a run has come to; the first is what it gives to others."""
    last = functools.partial(averaged, run.optimizer)
    found = [Version(ending="", weights=last, steps=run.at, measured=True)]
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


def write_versions(run: Run, folder: Path, *, at_end: bool) -> None:
    """Write the LoRA files of a run, each verified, into the folder of a save, for `read_versions`.

    The last weights beside the best ones are kept in float32, as what one would go on from. at_end: files that are to
    be plain LoRAs become so, which takes too long to do at each save. ValueError for a file that does not hold what
    was trained, or that `verify` refuses.
    """
    write_json(folder / FILES, {"files": [_write(run, version, folder, at_end=at_end) for version in versions(run)]})


def read_versions(checkpoint: Checkpoint) -> list[Saved]:
    """Return the LoRA files of a save, in the order of `versions`; none where its LoRA could not be written."""
    folder, described = checkpoint.path, read_json(checkpoint.path / FILES) or {"files": []}
    return [
        Saved(
            path=folder / each["path"],
            words={token: folder / name for token, name in each["words"].items()},
            steps=each["steps"],
        )
        for each in described["files"]
    ]


def _write(run: Run, version: Version, folder: Path, *, at_end: bool) -> dict[str, Any]:
    loss = dict(run.validation).get(version.steps) if version.measured else None
    about = {"steps": version.steps, "validation_loss": loss, "start": run.continued}
    about |= {"started": run.folder.about["created"], "run_key": run.folder.keys.run}
    about |= {"models": run.folder.about["models"]}
    metadata = build_metadata(run.config, run.plan, run.base, name=run.folder.about["name"], **about)
    if version.ending == "-ema":
        metadata["atelier.average"] = "ema"
    path = folder / f"{LORA}{version.ending}.safetensors"
    with version.weights():
        tensors = run.network.tensors()
        if at_end and run.config.lora.bake:
            tensors, sentence = bake_network(run.network, run.config.train.seed)
            run.callbacks.note(sentence)
        save_lora(path, tensors, metadata, _dtype(run.config, version), run.verify)
        vectors = run.network.embeddings.tensors()
        words = save_embeddings(folder / "words", path.stem, vectors, run.base.family, metadata)
    places = {token: word.relative_to(folder).as_posix() for token, word in words.items()}
    return {"path": path.name, "words": places, "steps": version.steps}


def _dtype(config: RunConfig, version: Version) -> str:
    return "float32" if version.ending == "-last" else config.train.save_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """Where the files of a run are looked for by whoever uses them."""

    output: Path  # the folder of LoRAs, and the run's name as its stem
    words: Path  # the folder of learned words
    saves: SavesConfig

    def publish(self, run: RunFolder, saved: Sequence[Saved], step: int, epoch: float, kind: str = "") -> list[Saved]:
        """Copy the files of the save of a step to the shelf; copies that are there already, unchanged, stay.

        kind: of a run that is not finished, what its names have besides. A number is added where a name is taken,
        unless files are to be overwritten.
        """
        known = read_json(run.path / PUBLISHED) or {}
        endings = [self._ending(each, step, kind) for each in saved]
        keys = [f"{self.output}|{self.saves.file_name}|{step}{ending}" for ending in endings]
        copies = [_published(known.get(key), each) for key, each in zip(keys, saved, strict=True)]
        if all(copy is not None for copy in copies):
            return [copy for copy in copies if copy is not None]
        stems = [self._stem(each, epoch) for each in saved]
        number = self._free_number(saved, stems, endings)
        made = []
        for key, each, stem, ending in zip(keys, saved, stems, endings, strict=True):
            made.append(self._copy(each, f"{stem}{number}{ending}"))
            known[key] = [[str(file), file_digest(file)] for file in made[-1].files]
            write_json(run.path / PUBLISHED, known)
        return made

    def _ending(self, saved: Saved, step: int, kind: str) -> str:
        ending = saved.path.stem.removeprefix(LORA)
        if not kind:
            return ending
        return f"-best-at-{saved.steps}" if saved.steps < step else kind + ending.removeprefix("-last")

    def _stem(self, saved: Saved, epoch: float) -> str:
        now = time.localtime()
        values = {"name": self.output.stem, "step": f"{saved.steps:06}", "epoch": f"{int(epoch):04}"}
        values |= {"date": time.strftime("%Y-%m-%d", now), "time": time.strftime("%H-%M", now)}
        return fill_name(self.saves.file_name, values)

    def _free_number(self, saved: Sequence[Saved], stems: Sequence[str], endings: Sequence[str]) -> str:
        """Return what stands between stems and endings of names that are free: nothing, -2, -3 …"""
        numbers = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))

        def free(number: str) -> bool:
            paths = [self.output.with_name(f"{s}{number}{e}.safetensors") for s, e in zip(stems, endings, strict=True)]
            return all(self._is_free(path, each.path) for each, path in zip(saved, paths, strict=True))

        return next(filter(free, numbers))

    def check_names(self, tokens: Iterable[str]) -> None:
        """Raise ValueError for names that no file can have, of the LoRA or of words that are learned."""
        plain_name(self.output.stem)  # of the run's folder
        values = {"name": self.output.stem, "epoch": "1" * 6, "step": "1" * 7}
        name = fill_name(self.saves.file_name, {**values, "date": "2000-01-01", "time": "00-00"})
        for token in tokens:
            longest = word_path(self.words, f"{name}-stopped-at-1000000-last-99", token).name
            if len(longest.encode()) > MOST_BYTES_OF_FILES:
                raise ValueError(
                    f"The names of the LoRA, {name[:30]}, and of its word {token} are too long for one file; shorten "
                    "the longer one."
                )

    def check_folders(self) -> None:
        """Raise ValueError for folders that take no file."""
        for folder in {self.output.parent, self.words}:
            check_writable(folder)

    def _copy(self, saved: Saved, stem: str) -> Saved:
        path = self.output.with_name(f"{stem}.safetensors")
        words = {token: self._word(file, word_path(self.words, stem, token)) for token, file in saved.words.items()}
        for source, place in [(saved.path, path), *((saved.words[token], word) for token, word in words.items())]:
            if not place.exists() or not is_copy(source, place):
                copy_lora(source, place)
        return Saved(path=path, words=words, steps=saved.steps)

    def _word(self, source: Path, path: Path) -> Path:
        candidates = (path if number == 1 else path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        return next(place for place in candidates if self._is_free(place, source))

    def _is_free(self, path: Path, source: Path) -> bool:
        """Tell whether a file may be put there: over nothing, over its own copy, and where it is told over ours alone.

        A workflow of a stranger that tells so does not replace what others have made.
        """
        return not path.exists() or is_copy(source, path) or (self.saves.overwrite and is_ours(path))


def _published(files: Any, saved: Saved) -> Saved | None:
    """Return the copies of a save's files where they are as they were written, else None."""
    if not files or len(files) != len(saved.files):
        return None
    for path, digest in files:
        if not Path(path).is_file() or file_digest(Path(path)) != digest:
            return None
    path, *words = (Path(path) for path, _ in files)
    return Saved(path=path, words=dict(zip(saved.words, words, strict=True)), steps=saved.steps)
