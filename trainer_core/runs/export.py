"""Copy the LoRA of a save under another name, or pack a run's LoRA, settings and samples for other people."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from ..common.values import is_object, is_words
from ..common.wording import names
from ..config import TrainConfig, setting
from ..config.rows import decides
from .detail import sample_files, settings_of
from .folder import FILES, LORA, Checkpoint, RunFolder

LONGEST_PARTS = 200  # bytes of a file's ending and of a token, together
LONGEST_NAME = 255  # bytes of a name in a zip, as file systems take
LONGEST_TITLE = 100  # of these the title's: it stands twice in a path, of which Windows takes 259 letters
MOST_NAMED = 20  # steps in a message
OF_PICTURES = ("pictures", "captions", "masks", "control pictures")  # of `manifest_parts`
LARGEST = 20 * 10**9  # bytes of the LoRA files of a save


def save_to_export(run: RunFolder, step: int | None) -> Checkpoint:
    """Find the save, or the sampled step, with a LoRA, by default the last one; raises ValueError without one."""
    found = run.loras()
    wanted = (run.result() or {}).get("step") if step is None else step
    for checkpoint in found:
        if checkpoint.step == wanted or wanted is None:
            return checkpoint
    if not found:
        raise ValueError(f"The run {run.path.name} has no LoRA to export.")
    steps = names((str(checkpoint.step) for checkpoint in reversed(found)), MOST_NAMED)
    raise ValueError(f"The run {run.path.name} has no LoRA of step {wanted}; it has LoRAs of the steps {steps}.")


def sound_files(run: RunFolder, checkpoint: Checkpoint) -> list[tuple[str, Path, dict[str, Path]]]:
    """List a save's LoRA files: ending of the name, file, and the embeddings by token; ValueError if one is damaged."""
    problem = checkpoint.problem(FILES)
    listed = [] if problem else checkpoint.lora_files()
    names = [name for each in listed for name in (each.path, *each.words.values())]
    if sum(checkpoint.files[name]["size"] for name in names) > LARGEST:
        problem = f"its files are larger than {LARGEST / 1e9:.0f} GB"
    parts = [len(Path(each.path).stem.encode()) + len(token.encode()) for each in listed for token in ("", *each.words)]
    if max(parts, default=0) > LONGEST_PARTS:
        problem = "the names of its files are too long"
    if problem := problem or (checkpoint.problem(*names) if names else "it holds no LoRA"):
        raise ValueError(f"The save of step {checkpoint.step} of {run.path.name} is not exported: {problem}.")
    return [
        (
            Path(each.path).stem.removeprefix(LORA),
            checkpoint.path / each.path,
            {token: checkpoint.path / word for token, word in each.words.items()},
        )
        for each in listed
    ]


def lora_of_each_save(run: RunFolder) -> list[tuple[int, Path]]:
    """List the LoRA files of a run by the steps of its saves and samples; raises ValueError for a damaged one."""
    return sorted((save.step, sound_files(run, save)[0][1]) for save in run.loras())


def loras_of_seeds(run: RunFolder, runs: Iterable[RunFolder]) -> list[tuple[int, Path]]:
    """List the LoRA files of a run and of others that differ from it by their seed alone, by their seeds.

    runs: where others are looked for. Of runs with one seed the first counts. Runs that tell no inputs are passed over,
    and so are runs that are not finished. Raises ValueError for fewer than two, and for a damaged one.
    """
    found: dict[int, Path] = {}
    own_seed, own = _apart_from_seed(run)
    split = False  # another seed trained on other pictures, and nothing else differs
    for each in (run, *runs):
        seed, other = _apart_from_seed(each)
        if own is None or each.result() is None:
            continue
        if other == own and seed not in found:
            found[seed] = sound_files(each, save_to_export(each, None))[0][1]
        split |= seed != own_seed and _held_out(own) == _held_out(other) is not None
    if len(found) < 2 and split:
        raise ValueError(
            f"{run.path.name} and the runs of its other seeds trained on different pictures, as "
            f"{setting('train.validation_share')} holds out others for each seed; put the pictures of validation into "
            f"a concept whose {setting('concepts.role')} is validation, set {setting('train.validation_share')} to 0, "
            "and train them again."
        )
    if len(found) < 2:
        raise ValueError(
            f"{run.path.name} has {len(found)} finished run of its settings; train it with another "
            f"{setting('train.seed')}, and nothing else changed."
        )
    return sorted(found.items())


def _held_out(own: Any) -> Any:
    """Leave the pictures out of what decides a run whose seed chooses which are trained; None for any other run."""
    if own is None or not own[1]["validation_share"]:
        return None
    return {part: digest for part, digest in own[0].items() if part not in OF_PICTURES}, own[1]


def _apart_from_seed(run: RunFolder) -> tuple[int, Any]:
    """Split what decides a run into its seed and all else; None where it does not tell."""
    inputs, config = run.about.get("inputs"), run.about["config"]
    train = config.get("train")
    if not is_words(inputs) or not inputs or not is_object(train) or not isinstance(train.get("seed"), int):
        return 0, None
    try:
        known = TrainConfig.from_dict(train)  # one of an earlier version may lack settings
    except ValueError:
        return 0, None
    parts = {name: digest for name, digest in inputs.items() if name != "train"}
    left = {"seed"} if known.keeps_by else {"seed", "validate_every"}  # measuring alone changes nothing
    counted = {each.name for each in dataclasses.fields(TrainConfig) if decides(each) != "nothing"} - left
    return known.seed, (parts, {name: value for name, value in known.to_dict().items() if name in counted})


def export_save(
    run: RunFolder, checkpoint: Checkpoint, to: Path, words: Path, *, overwrite: bool = False
) -> list[Path]:
    """Copy the LoRA files of a save to `to` and its embeddings into `words`; compare and list the copies.

    overwrite: replace files of these names if they are of the same run. Raises ValueError if nothing can be copied, and
    OSError of the disk.
    """
    from safetensors import SafetensorError  # imported here, so that other commands need not wait for torch

    from ..lora_files.write import copy_lora, embedding_path, has_layers, run_of

    copies: dict[Path, Path] = {}
    for ending, lora, embeddings in sound_files(run, checkpoint):
        path = to.with_name(f"{to.stem}{ending}.safetensors")
        if has_layers(lora) or not embeddings:
            copies[path] = lora
        copies |= {embedding_path(words, path.stem, token): word for token, word in embeddings.items()}
    taken = [path for path in copies if path.exists()]
    if taken and not overwrite:
        raise ValueError(f"{taken[0].name} exists already; choose another name.")
    if others := [path for path in taken if run_of(path) != run.keys.run]:
        raise ValueError(
            f"{others[0].name} is not of the run {run.path.name}, so it is not replaced; choose another name."
        )
    for path, source in copies.items():
        try:
            copy_lora(source, path)
        except SafetensorError as error:  # raised for a full disk
            raise ValueError(f"{path.name} could not be written: {error}") from error
    return list(copies)


def write_archive(run: RunFolder, checkpoint: Checkpoint, file: IO[bytes]) -> str:
    """Write a zip of a save's LoRA files, the run's settings and its samples; return its name without ending.

    Nothing in it names a place of this machine. Raises ValueError for a damaged save, and OSError of the disk.
    """
    from ..lora_files.write import has_layers  # here, so that other commands need not wait for torch

    files = sound_files(run, checkpoint)
    endings = [(ending, lora, "") for ending, lora, words in files if has_layers(lora) or not words]
    endings += [
        (f"{ending}-{token}", word, "embeddings/") for ending, _, words in files for token, word in words.items()
    ]
    longest = LONGEST_NAME - len(".safetensors") - max(len(ending.encode()) for ending, *_ in endings)
    longest = min(longest, LONGEST_TITLE)
    name = re.sub(r"[^A-Za-z0-9 .()-]+", "_", f"{run.title() or run.path.name}-step-{checkpoint.step}")[-longest:]
    settings: dict[str, Any] = {"steps": run.steps, "saved after step": checkpoint.step, **settings_of(run)}
    with zipfile.ZipFile(file, "w") as archive:  # not compressed: neither weights nor pictures get smaller
        for ending, path, folder in endings:
            archive.write(path, f"{name}/{folder}{name}{ending}.safetensors")
        archive.writestr(f"{name}/settings.json", json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
        for sample in sample_files(run):
            archive.write(sample, f"{name}/samples/{sample.name}")
    return name
