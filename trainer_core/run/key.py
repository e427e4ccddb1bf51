"""What a run is the same by: everything that decides the trained weights, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..scan import Index

FORMAT = 1  # of run folders and of their keys; raise it whenever the same key would give other weights
SHOWN = 12  # characters of a key in names
MODEL_ENDINGS = (".safetensors", ".json", ".txt")  # of files in a diffusers folder or a tokenizer's that decide


class Keys(NamedTuple):
    """By what runs are told apart."""

    run: str  # two runs of one key have the same result
    course: str  # two runs of one course take the same steps; they differ in length or in the form of their file


def build_keys(config: RunConfig, models: Mapping[str, str], pictures: str) -> Keys:
    """Return a run's keys. models: digest of each model file by its role. pictures: digest of the manifest.

    Of the configuration only what decides the weights counts: no names and places, no intervals of saves, samples and
    logs, nothing that memory settings change (rounding at most).
    """
    values = config.to_dict()
    for part in ("saves", "existing", "sample", "memory"):
        del values[part]
    train, lora = values["train"], values["lora"]
    del train["log"]
    if not config.train.keeps_by:
        del train["validate_every"]
    for place, names in (
        (values["base_model"], ("path", "vae", "text_encoder", "text_encoder_2", "tokenizer")),
        (lora, ("start",)),
        *((beneath, ("path",)) for beneath in lora["beneath"]),
        *((concept, ("folder",)) for concept in values["dataset"]["concepts"]),
        *((concept["captions"], ("file",)) for concept in values["dataset"]["concepts"]),
        *((concept["masks"] or {}, ("folder",)) for concept in values["dataset"]["concepts"]),
    ):
        for name in names:  # what lies there counts, by its digest
            place.pop(name, None)
    if config.existing.on_existing == "fork":
        values["fork"] = [config.existing.fork_run, config.existing.fork_step]
    values |= {"format": FORMAT, "models": dict(models), "pictures": pictures}
    whole = _digest(values)
    del train["steps"], train["epochs"], train["save_dtype"], lora["bake"]
    return Keys(run=whole, course=_digest(values))


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def model_digests(config: RunConfig, tokenizer: Path, index: Index) -> dict[str, str]:
    """Return the sha256 of every file that the base model and the LoRAs of a run are read from, by role and name.

    A file of many gigabytes is read once; the index knows it from then on as long as size and times stay.
    """
    from ..scan import File  # here, so that runs are listed without all that reads pictures

    roles = list(_model_files(config, tokenizer))
    files = []
    for _, path in roles:
        status = path.stat()
        mtime, ctime = status.st_mtime_ns, status.st_ctime_ns
        files.append(File(path=path, name=str(path), size=status.st_size, mtime_ns=mtime, ctime_ns=ctime))
    found = {role: digest for (role, _), digest in zip(roles, index.digests(files, any_size=True), strict=True)}
    for role, path in roles:
        if not found[role]:
            raise ValueError(f"{path} cannot be read to its end; see that its disk answers, or get the file again.")
    return found


def _model_files(config: RunConfig, tokenizer: Path) -> Iterator[tuple[str, Path]]:
    base = config.base_model
    given = {name: getattr(base, name) for name in ("path", "vae", "text_encoder", "text_encoder_2")}
    given |= {"tokenizer": str(tokenizer), "start": config.lora.start}
    given |= {f"beneath {number}": beneath.path for number, beneath in enumerate(config.lora.beneath)}
    for role, place in given.items():
        path = Path(place)
        if place and path.is_dir():
            found = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in MODEL_ENDINGS)
            yield from ((f"{role}/{file.relative_to(path).as_posix()}", file) for file in found if file.is_file())
        elif place:
            yield role, path
