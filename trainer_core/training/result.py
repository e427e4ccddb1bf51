"""What a run leaves behind, read from its folder: the same whether it was just trained or finished long ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..config import RunConfig, SampleConfig
from ..data.plan import Plan
from ..runs import SAMPLES, Checkpoint, Choice, RunFolder
from ..runs.publish import Destination
from .checkpoint import read_course
from .sample_files import are_pictures, draw_samples, read_pictures
from .saving import publish
from .state import Run
from .weights import read_versions


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
    how: str  # a sentence: trained, resumed, or reused from a finished run
    finished: bool  # False: stopped before its end, and can be resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a result is read from, and what is reported with it."""

    folder: RunFolder
    checkpoint: Checkpoint
    plan: Plan
    destination: Destination
    sample: SampleConfig
    how: str
    log: Path | None


def finish(run: Run, checkpoint: Checkpoint, how: str, log: Path | None, *, stopped: bool) -> Result:
    """Write down what came of the run unless it was stopped, draw the last samples, and return it.

    Whatever happens while these are drawn, the run is finished, and its LoRA is where people look for it.
    """
    if not stopped:
        run.folder.finish({"step": checkpoint.step})
    copies = publish(run, checkpoint, f"-stopped-at-{checkpoint.step}" if stopped else "")
    try:
        paths = draw_samples(run)
    except BaseException:
        then = "to continue" if stopped else "to draw its samples"
        run.callbacks.note(
            f"The LoRA is saved as {copies[0].path}, the run in {checkpoint.path}. Press Run again {then}."
        )
        raise
    sample = run.config.sample
    if not stopped:
        samples = {"of": sample.digest(), "files": [path.name for path in paths]}
        run.folder.finish({"step": checkpoint.step, "samples": samples})
        run.record("finished", step=checkpoint.step)
    source = Source(
        folder=run.folder,
        checkpoint=checkpoint,
        plan=run.plan,
        destination=run.destination,
        sample=sample,
        how=how,
        log=log,
    )
    return read_result(source, paths, stopped=stopped)


def reuse(choice: Choice, plan: Plan, destination: Destination, config: RunConfig, logs: Path | None) -> Result | None:
    """Return what the run that was found has left behind, None where it is not finished.

    None as well when samples are wanted that it has not drawn, or not any more.
    """
    run, checkpoint = choice.run, choice.finished
    if run is None or checkpoint is None:
        return None
    sample, samples = config.sample, (run.result() or {}).get("samples", {})
    paths = []
    if sample.prompts:
        paths = [run.path / SAMPLES / Path(name).name for name in samples.get("files", ())]
        if samples.get("of") != sample.digest() or not paths or not are_pictures(paths):
            return None
    log = log_folder(config, logs, run)
    source = Source(
        folder=run,
        checkpoint=checkpoint,
        plan=plan,
        destination=destination,
        sample=sample,
        how=choice.message,
        log=log,
    )
    return read_result(source, paths, stopped=False)


def read_result(source: Source, samples: Sequence[Path], *, stopped: bool) -> Result:
    """Read the result from a save, its LoRA files copied to the destination where they are not there yet."""
    checkpoint, plan, sample = source.checkpoint, source.plan, source.sample
    course, saved = read_course(checkpoint), read_versions(checkpoint)
    kind = f"-stopped-at-{checkpoint.step}" if stopped else ""
    copies = source.destination.publish(source.folder, saved, checkpoint.step, plan.epochs_after(checkpoint.step), kind)
    return Result(
        path=copies[0].path,
        tensors={name: tensor.clone() for name, tensor in load_file(saved[0].path).items()},  # a file may vanish
        embeddings=copies[0].embeddings,
        losses=course["losses"].tolist(),
        concepts={name: losses.tolist() for name, losses in course["concepts"].items()},
        validation=course["validation"],
        best=course["best"],
        others=tuple(copy.path for copy in copies[1:]),
        log=source.log,
        samples=read_pictures(samples) if samples else torch.empty(0, sample.height, sample.width, 3),
        plan=plan,
        run=source.folder.path,
        how=source.how,
        finished=not stopped,
    )


def log_folder(config: RunConfig, logs: Path | None, run: RunFolder) -> Path | None:
    """Return where the log of a run is, None when it writes none."""
    return logs / run.path.name if logs is not None and config.train.log != "none" else None


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
