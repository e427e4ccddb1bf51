"""Read the result of a run from its folder: the same whether it was just trained or finished long ago."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..common.smooth import say_loss
from ..common.wording import clock, count
from ..config import RunConfig, run_again
from ..data.fit import KIND, describe_fits
from ..data.plan import Plan
from ..data.scan import PLACE, Index
from ..lora_files.lora import Lora
from ..optim import estimates
from ..runs import LORA, SAMPLES, Checkpoint, Choice, RunFolder
from ..runs.publish import EXPERTS, Destination
from .advice import Figures, advise
from .checkpoint import read_history
from .effect import describe_effect, measure_effect
from .sample_files import are_pictures, draw_samples, put_preview, read_pictures
from .saving import disk_errors_explained, publish
from .state import Run
from .weights import read_versions


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run."""

    path: Path  # the LoRA file
    tensors: Lora  # of the LoRA file, with its metadata
    high: tuple[Path, Lora] | None  # the same of the expert for high noise, where the base model has two
    embeddings: dict[str, Path]  # files of the trained embeddings, by token
    losses: list[float]  # of each step, NaN where it was not finite
    concepts: dict[str, list[float]]  # mean loss of each concept's samples in each step, NaN where there were none
    validation: list[tuple[int, float]]  # (steps finished, loss of the validation pictures)
    best: tuple[int, float] | None  # (step, validation loss) of the best weights, with keep_best or early stopping
    others: tuple[Path, ...]  # files of the run's other weights: last, plain or averaged
    log: Path | None  # folder of the log
    samples: Tensor  # (N, H, W, 3) in 0..1; of the weights in `path`, then of the average or the plain ones
    plan: Plan
    run: Path  # the run's folder
    origin: str  # a sentence: trained, resumed, or reused from a finished run
    effect: str  # sentences on what the LoRA changes; "" of a run that was stopped
    advice: list[str]  # sentences on what to try next
    finished: bool  # False: stopped before its end, and can be resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultSource:
    """The places that a result is read from, and its origin."""

    folder: RunFolder
    checkpoint: Checkpoint
    plan: Plan
    destination: Destination
    config: RunConfig
    origin: str
    log: Path | None


def finish(run: Run, checkpoint: Checkpoint, origin: str, log: Path | None, *, stopped: bool) -> Result:
    """Mark the run as finished unless it was stopped, publish its LoRA, draw the last samples, return the result.

    If drawing fails, the run is finished and its LoRA published all the same.
    """
    effect = None if stopped else {**measure_effect(run), "noise_scale": run.noise_scale.estimate()}
    if not stopped:
        report_fits(run)
        run.folder.finish({"step": checkpoint.step, "effect": effect})
    with disk_errors_explained(run.destination.output.parent, lambda: size_of_lora(checkpoint)):
        copies = publish(run, checkpoint, f"-stopped-at-{checkpoint.step}" if stopped else "")
    try:
        paths = draw_samples(run)
    except BaseException:
        then = "to resume" if stopped else "to draw its samples"
        run.callbacks.note(
            f"The LoRA is saved as {copies[0].path}, the run in {checkpoint.path}; {run_again()} {then}."
        )
        raise
    sample = run.config.sample
    if not stopped:
        samples = {"of": sample.digest(), "files": [path.name for path in paths]}
        run.folder.finish({"step": checkpoint.step, "effect": effect, "samples": samples})
        run.record("finished", step=checkpoint.step)
        if paths:
            put_preview(run, copies[0].path, paths[0])
    source = ResultSource(
        folder=run.folder,
        checkpoint=checkpoint,
        plan=run.plan,
        destination=run.destination,
        config=run.config,
        origin=origin,
        log=log,
    )
    return read_result(source, paths, stopped=stopped)


def report_fits(run: Run) -> None:
    """Name the pictures with higher losses than others, and keep all comparisons by content, for Dataset Preview."""
    fits, pictures = run.fits.fits(), run.plan.manifest.pictures
    if sentence := describe_fits([(pictures[i].name, " ".join(pictures[i].lines), fit) for i, fit in fits.items()]):
        run.callbacks.note(sentence)
    with Index(run.encoded.cache.folder / PLACE) as index:
        for i, fit in fits.items():
            index.keep(pictures[i].digest, KIND, asdict(fit))


def size_of_lora(checkpoint: Checkpoint) -> int:
    """Sum the bytes of a save's LoRA files and their embeddings."""
    return sum(known["size"] for name, known in checkpoint.files.items() if name.startswith((LORA, "words/")))


def reuse(choice: Choice, plan: Plan, destination: Destination, config: RunConfig, logs: Path | None) -> Result | None:
    """Read the result of the chosen run; None if it is not finished, or lacks samples that are asked for."""
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
    source = ResultSource(
        folder=run,
        checkpoint=checkpoint,
        plan=plan,
        destination=destination,
        config=config,
        origin=choice.message,
        log=log,
    )
    return read_result(source, paths, stopped=False)


def read_result(source: ResultSource, samples: Sequence[Path], *, stopped: bool) -> Result:
    """Read the result from a save; copy its LoRA files to the destination if they are missing there."""
    checkpoint, plan, sample = source.checkpoint, source.plan, source.config.sample
    history, saved = read_history(checkpoint), read_versions(checkpoint)
    effect = None if stopped else (source.folder.result() or {}).get("effect")
    kind = f"-stopped-at-{checkpoint.step}" if stopped else ""
    copies = source.destination.publish(source.folder, saved, checkpoint.step, plan.epochs_after(checkpoint.step), kind)
    beside = saved[0].path.stem.removesuffix(EXPERTS[0]) + EXPERTS[1]
    high = next((number for number, each in enumerate(saved) if each.path.stem == beside), 0)
    return Result(
        path=copies[0].path,
        tensors=_read(saved[0].path),
        high=(copies[high].path, _read(saved[high].path)) if high else None,
        embeddings=copies[0].embeddings,
        losses=history["losses"].tolist(),
        concepts={name: losses.tolist() for name, losses in history["concepts"].items()},
        validation=history["validation"],
        best=history["best"],
        others=tuple(copy.path for number, copy in enumerate(copies) if number not in (0, high)),
        log=source.log,
        samples=read_pictures(samples) if samples else torch.empty(0, sample.height, sample.width, 3),
        plan=plan,
        run=source.folder.path,
        origin=source.origin,
        effect=describe_effect(effect),
        advice=[] if stopped else advise(figures_of(source.config, history, effect)),
        finished=not stopped,
    )


def figures_of(config: RunConfig, history: dict[str, Any], effect: Any) -> Figures:
    """Collect what a run has measured; effect: as its folder tells it, which may be of another program."""
    told, train = effect if isinstance(effect, dict) else {}, config.train
    moved, scale = told.get("prediction"), told.get("noise_scale")
    scale = [each for each in scale if isinstance(each, float)] if isinstance(scale, list | tuple) else []
    return Figures(
        losses=history["losses"].tolist(),
        validation=history["validation"],
        prediction=moved if isinstance(moved, float) else None,
        noise_scale=(scale[0], scale[1], scale[2]) if len(scale) == 3 and all(map(math.isfinite, scale)) else None,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        epochs=train.epochs,
        keeps_best=bool(train.keeps_by),
        rated=not estimates(config.optimizer) and any(config.optimizer.part_rates),
    )


def describe_result(result: Result, seconds: float) -> str:
    """Summarise a result in a few lines, and how a prompt writes each trained word."""
    path, losses = result.path, result.losses
    skipped = sum(not math.isfinite(loss) for loss in losses)
    left_out = f", {skipped} of them without an update" if skipped else ""
    lines = [
        result.origin,
        f"Saved as {path}",
        f"{count(losses, 'step')}{left_out}, {say_loss(losses)}; {clock(seconds)} this time",
    ]
    if result.effect:
        lines.append(result.effect)
    if result.advice:
        lines.append(f"To try next: {' '.join(result.advice)}")
    if result.high:
        lines.insert(2, f"For high noise, of MODEL_HIGH: {result.high[0]}")
    if result.others:
        lines.append(f"Also saved, but not in the outputs: {', '.join(other.name for other in result.others)}")
    for word, file in result.embeddings.items():
        lines.append(f"In prompts write {word} as embedding:{file.parent.name}/{file.stem}")
    if result.log:
        lines.append(f"Log in {result.log}")
    lines.append(f"Run in {result.run}")
    return "\n".join(lines)


def log_folder(config: RunConfig, logs: Path | None, run: RunFolder) -> Path | None:
    """Folder of a run's log; None when it writes none."""
    return logs / run.path.name if logs is not None and config.train.log != "none" else None


def describe_best(result: Result) -> str:
    """Describe the step of the lowest validation loss and the files; "" if no best weights are kept."""
    if result.best is None:
        return ""
    (_, start), *_ = result.validation
    (steps, loss), at = result.best, len(result.losses)
    gain = "" if loss < start else f" (before the first step it was {start:.4f}: nothing was gained)"
    found = f"The validation loss was lowest after step {steps}: {loss:.4f}{gain}."
    if steps == at:
        return found
    return f"{found} The LoRA is the one of that step; the one of step {at} is {result.others[-1].name}."


def _read(path: Path) -> Lora:
    """Read a LoRA file of ours; the tensors are copies, since the file may vanish."""
    with safe_open(path, framework="pt") as file:  # one without layers, too
        return Lora({name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {})  # noqa: SIM118
