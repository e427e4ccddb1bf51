"""What a run leaves behind, read from its folder: the same whether it was just trained or finished long ago."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .config import SampleConfig
from .outcome import Run, Shelf, read_versions
from .plan import Plan
from .run import SAMPLES, Checkpoint, RunFolder
from .saving import are_pictures, draw_samples, publish, read_course, read_pictures


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
    run: Path  # the run's folder
    how: str  # a sentence: trained, gone on with, or taken from a finished run
    finished: bool  # False: stopped before its end, and can be gone on with


def finish(run: Run, checkpoint: Checkpoint, how: str, log: Path | None, *, stopped: bool) -> Result:
    """Write down what came of the run unless it was stopped, draw the last samples, and return it.

    Whatever happens while these are drawn, the run is finished, and what it has learned is where it is looked for.
    """
    if not stopped:
        run.folder.finish({"step": checkpoint.step})
    copies = publish(run, checkpoint, f"-stopped-at-{checkpoint.step}" if stopped else "")
    try:
        paths = draw_samples(run)
    except BaseException:
        then = "to go on" if stopped else "and only its samples are drawn"
        run.callbacks.note(f"What was learned is in {copies[0].path} and in {checkpoint.path}. Queue again {then}.")
        raise
    if not stopped:
        samples = {"of": run.config.sample.digest(), "files": [path.name for path in paths]}
        run.folder.finish({"step": checkpoint.step, "samples": samples})
        run.record("finished", step=checkpoint.step)
    return read_result(run.folder, checkpoint, run.plan, run.shelf, paths, run.config.sample, how, log, stopped=stopped)


def taken(
    folder: RunFolder,
    checkpoint: Checkpoint,
    plan: Plan,
    shelf: Shelf,
    config: SampleConfig,
    how: str,
    log: Path | None,
) -> Result | None:
    """Return what a finished run has left behind, None when samples are wanted that it does not have."""
    samples = (folder.result() or {}).get("samples", {})
    paths = []
    if config.prompts:
        paths = [folder.path / SAMPLES / Path(name).name for name in samples.get("files", ())]
        if samples.get("of") != config.digest() or not paths or not are_pictures(paths):
            return None
    return read_result(folder, checkpoint, plan, shelf, paths, config, how, log, stopped=False)


def read_result(
    folder: RunFolder,
    checkpoint: Checkpoint,
    plan: Plan,
    shelf: Shelf,
    samples: list[Path],
    config: SampleConfig,
    how: str,
    log: Path | None,
    *,
    stopped: bool,
) -> Result:
    """Return what a save holds, its LoRA files copied to the shelf where they are not there yet."""
    course, saved = read_course(checkpoint), read_versions(checkpoint)
    kind = f"-stopped-at-{checkpoint.step}" if stopped else ""
    copies = shelf.publish(folder, saved, checkpoint.step, plan.epochs_after(checkpoint.step), kind)
    return Result(
        path=copies[0].path,
        tensors={name: tensor.clone() for name, tensor in load_file(saved[0].path).items()},  # a file may vanish
        embeddings=copies[0].words,
        losses=course["losses"].tolist(),
        concepts={name: losses.tolist() for name, losses in course["concepts"].items()},
        validation=course["validation"],
        best=course["best"],
        others=tuple(copy.path for copy in copies[1:]),
        log=log,
        samples=read_pictures(samples) if samples else torch.empty(0, config.height, config.width, 3),
        plan=plan,
        run=folder.path,
        how=how,
        finished=not stopped,
    )


def describe_best(result: Result) -> str:
    """Say when the validation loss was lowest, and where the other weights are; empty where nobody asked."""
    if result.best is None:
        return ""
    (_, start), *_ = result.validation
    (steps, loss), at = result.best, len(result.losses)
    gain = "" if loss < start else f" (before the first step it was {start:.4f}: nothing was gained)"
    found = f"The validation loss was lowest after step {steps}: {loss:.4f}{gain}."
    if steps == at:
        return found
    return f"{found} The LoRA is the one of that step; the one of step {at} is {result.others[-1].name}."
