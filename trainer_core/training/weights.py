"""What a run has come to: its weights as they are, their average, the best ones, and the files of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.files import write_json
from ..config import RunConfig
from ..lora_files.bake import bake_network
from ..lora_files.metadata import build_metadata
from ..lora_files.write import save_embeddings, save_lora
from ..networks import Network
from ..optim import averaged
from ..runs import FILES, LORA, Checkpoint, read_json
from ..runs.publish import Saved
from .state import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One set of weights that a run has come to."""

    ending: str  # of its file's name
    weights: Callable[[], AbstractContextManager[Any]]  # lets the network have them
    steps: int  # after which they were reached
    measured: bool = False  # it is these that validation measures


def versions(run: Run) -> list[Version]:
    """List the sets of weights that a run can save; the first is the one that others get."""
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
            embeddings={token: folder / name for token, name in each["words"].items()},
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
        words = save_embeddings(folder / "words", path.stem, vectors, run.base.parts, metadata)
    places = {token: word.relative_to(folder).as_posix() for token, word in words.items()}
    return {"path": path.name, "words": places, "steps": version.steps}


def _dtype(config: RunConfig, version: Version) -> str:
    return "float32" if version.ending == "-last" else config.train.save_dtype
