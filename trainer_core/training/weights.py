"""The sets of weights that a run saves (last, averaged, best), and the LoRA file of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.files import write_json
from ..config import RunConfig
from ..lora_files.bake import bake_network
from ..lora_files.metadata import build_metadata, timesteps
from ..lora_files.write import of_experts, peft_tensors, save_embeddings, save_lora
from ..networks import Network
from ..optim import averaged
from ..runs import FILES, LORA, Checkpoint
from ..runs.folder import LoraFiles
from ..runs.publish import Saved
from .state import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One set of weights of a run."""

    ending: str  # of its file's name
    weights: Callable[[], AbstractContextManager[Any]]  # puts them into the network for a `with` block
    steps: int  # finished when they were reached
    measured: bool = False  # validation measures these


def versions(run: Run) -> list[Version]:
    """List the sets of weights that a run can save; the first one goes to the other nodes."""
    last = functools.partial(averaged, run.optimizer)
    found = [Version(ending="", weights=last, steps=run.at, measured=True)]
    if run.ema is not None:
        found.append(Version(ending="-ema", weights=run.ema.swapped, steps=run.at))
        if run.config.optimizer.ema_output == "average":
            found = [replace(found[1], measured=True), replace(found[0], measured=False)]
    if run.best is None or run.best.steps == run.at:
        return found
    weights = functools.partial(_with_weights, run.network, run.best.weights)
    best = Version(ending="", weights=weights, steps=run.best.steps, measured=True)
    return [best, *(replace(version, ending=version.ending or "-last") for version in found)]


@contextmanager
def _with_weights(network: Network, weights: dict[str, Tensor]) -> Iterator[None]:
    """Load other weights into a network for a `with` block, then restore its own exactly."""
    kept = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(weights)
    try:
        yield
    finally:
        network.load_state_dict(kept)


def write_versions(run: Run, folder: Path, *, at_end: bool) -> None:
    """Write the LoRA files of a run into the folder of a save, each verified.

    The last weights beside the best ones are in float32, so that they can be continued. at_end: bake, which would take
    too long at each save. Raises ValueError for a file that differs from the weights or that `verify` refuses.
    """
    written = [files for version in versions(run) for files in _write(run, version, folder, at_end=at_end)]
    write_json(folder / FILES, {"files": [asdict(files) for files in written]})


def read_versions(checkpoint: Checkpoint) -> list[Saved]:
    """List the LoRA files of a save, in the order of `versions`; none if its LoRA could not be written."""
    folder = checkpoint.path
    return [
        Saved(
            path=folder / each.path,
            embeddings={token: folder / name for token, name in each.words.items()},
            steps=each.steps,
        )
        for each in checkpoint.lora_files()
    ]


def _write(run: Run, version: Version, folder: Path, *, at_end: bool) -> list[LoraFiles]:
    """Write the LoRA file of a version, or one for each expert of the base model."""
    loss = dict(run.validation).get(version.steps) if version.measured else None
    about = {"steps": version.steps, "validation_loss": loss, "start": run.continued}
    about |= {"started": run.folder.about["created"], "run_key": run.folder.keys.run}
    about |= {"models": run.folder.about.get("models", {})}
    metadata = build_metadata(run.config, run.plan, run.base, name=run.folder.about["name"], **about)
    if version.ending == "-ema":
        metadata["atelier.average"] = "ema"
    written, experts = [], run.base.experts
    with version.weights():
        tensors = run.network.tensors()
        if at_end and run.config.lora.bake:
            tensors, sentence = bake_network(run.network, run.config.train.seed)
            run.callbacks.note(sentence)
        names = {trained.name: trained.comfy for trained in run.network.chosen}
        for number, own in enumerate(of_experts(tensors, experts) if experts else [tensors]):
            ending = version.ending
            if experts:
                ending += f"-{experts[number].name}"
                metadata["modelspec.timestep_range"] = timesteps(
                    run.config.objective, run.base.levels.sides[number:][:1]
                )
            path = folder / f"{LORA}{ending}.safetensors"
            own = peft_tensors(own, names) if run.config.lora.names == "peft" else own
            save_lora(path, own, metadata, _dtype(run.config, version), run.verify)
            vectors = run.network.embeddings.tensors()
            words = save_embeddings(folder / "words", path.stem, vectors, run.base.parts, metadata)
            places = {token: word.relative_to(folder).as_posix() for token, word in words.items()}
            written.append(LoraFiles(path=path.name, words=places, steps=version.steps))
    return written


def _dtype(config: RunConfig, version: Version) -> str:
    return "float32" if version.ending == "-last" else config.train.save_dtype
