"""The keys that identify a run: hashes of everything that decides the trained weights, and of nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.files import file_digest
from ..config import ObjectiveConfig, RunConfig
from ..config.rows import Decides, decides

if TYPE_CHECKING:
    from ..data.scan import Index
    from ..models import Source
    from ..models.base import LevelDefaults

FORMAT = 1  # of run folders and of their keys; raise it whenever the same key, or a default, gives other weights
SHOWN = 12  # characters of a key in folder names
PARTS = tuple(each.name for each in dataclasses.fields(RunConfig) if decides(each) != "nothing")
# They stand in a key of this format even where nothing is set; a later section only where something is.
ALWAYS = ("base_model", "dataset", "lora", "objective", "optimizer", "scheduler", "train")
MODEL_ENDINGS = (".safetensors", ".json", ".txt")  # of the files that count in a diffusers folder or a tokenizer's


class Keys(NamedTuple):
    """The two hashes that identify a run."""

    run: str  # runs with the same key have the same result
    course: str  # runs with the same course take the same steps; length, planned curve or file format may differ


def build_keys(
    config: RunConfig, models: Mapping[str, str], pictures: str, levels: LevelDefaults | None = None
) -> Keys:
    """Compute a run's keys.

    models: digest of each model file by its role. pictures: digest of the manifest. levels: those of the base model's
    family, by default equally likely ones.

    Only settings that decide the weights count: no names and paths, no intervals of saves, samples and logs, no memory
    settings that change the last bits at most.
    """
    whole = _values(config, models, pictures, levels, ("course", "result"))
    course = _values(config, models, pictures, levels, ("course",))
    return Keys(run=_digest(whole), course=_digest(course))


def build_parts(
    config: RunConfig, models: Mapping[str, str], data: Mapping[str, str], levels: LevelDefaults | None = None
) -> dict[str, str]:
    """Compute a digest of each part of a run's key, to tell people which of them changed; data: of `manifest_parts`."""
    values = _values(config, models, "", levels, ("course", "result"))
    return {**data, **{part: _digest({part: value}) for part, value in values.items() if part in (*PARTS, "models")}}


def _values(
    config: RunConfig,
    models: Mapping[str, str],
    pictures: str,
    levels: LevelDefaults | None,
    deciding: Collection[Decides],
) -> dict[str, Any]:
    """Collect what decides this of a run, by the rows of its settings; a new one changes no key until it is set."""
    changes = config.changes(deciding)
    values: dict[str, Any] = {part: changes.get(part, {}) for part in PARTS if part in ALWAYS or changes.get(part)}
    if not config.train.keeps_by:
        values["train"].pop("validate_every", None)  # only looks, where it does not choose the weights
    values["objective"].pop("timestep_shift", None)  # what acts stands there, whoever chose it
    values["objective"] |= _levels(config.objective, levels)
    connected = values["base_model"].pop("connected", None)
    if connected is not None:
        values["connected"] = connected
    if config.existing.on_existing == "fork":
        values["fork"] = [config.existing.fork_run, config.existing.fork_step]
    return values | {"format": FORMAT, "models": dict(models), "pictures": pictures}


def _levels(config: ObjectiveConfig, family: LevelDefaults | None) -> dict[str, Any]:
    """Describe the distribution that levels are drawn from, whoever chose it; without a shift it has no entry."""
    from ..models.base import LevelDefaults  # imported here, so that lists of runs need no image library
    from ..objective.timesteps import chosen_levels

    chosen = chosen_levels(config, family or LevelDefaults())
    shift = chosen.shift if chosen.by_tokens is None else [*chosen.by_tokens, chosen.token]
    found = {"timestep_distribution": chosen.distribution}
    found |= {} if shift == 1 else {"timestep_shift": shift}
    return found | ({"sides": [list(side) for side in chosen.sides]} if chosen.sides else {})


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def model_digests(config: RunConfig, source: Source, index: Index) -> dict[str, str]:
    """Compute the sha256 of every file of the base model and of existing LoRAs, by role and name.

    The index remembers the digest of a file while its size and times stay. Where weights stay in their file, nothing of
    it is kept in memory. Raises ValueError for an unreadable file.
    """
    from ..data.scan import file_at  # imported here, so that lists of runs need no image library

    roles = list(_model_files(config, source.files()))
    files = [file_at(path) for _, path in roles]
    digest = file_digest if config.memory.offload_weights == "file" else source.digest
    found = dict(zip((role for role, _ in roles), index.digests(files, large=digest), strict=True))
    for role, path in roles:
        if not found[role]:
            raise ValueError(f"{path} cannot be read completely; check the disk, or download the file again.")
    return found | source.identities()


def _model_files(config: RunConfig, model: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield (role, path) of every file that counts; a folder's files one by one."""
    given = dict(model) | ({"start": Path(config.lora.start)} if config.lora.start else {})
    given |= {f"beneath {number}": Path(beneath.path) for number, beneath in enumerate(config.lora.beneath)}
    for role, path in given.items():
        if path.is_dir():
            found = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in MODEL_ENDINGS)
            yield from ((f"{role}/{file.relative_to(path).as_posix()}", file) for file in found if file.is_file())
        else:
            yield role, path
