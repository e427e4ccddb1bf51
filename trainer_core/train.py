"""The whole algorithm, top to bottom, in the order it happens; what a step computes is in `step.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .callbacks import Callbacks, Norms, StepReport
from .config import MemoryConfig, RunConfig
from .existing import learning_rates
from .log import logged
from .memory import attention_kernel, choose_dtype, describe, give_back, out_of_memory, room_for_programs
from .models import Conditioning
from .noise import alphas_cumprod
from .optim import averaged, learning_rate
from .outcome import Run, Shelf
from .plan import Plan
from .prepare import (
    check_places,
    check_precision,
    check_settings,
    log_columns,
    look_ahead,
    other_steps,
    plan_run,
    prepare_run,
    set_up,
    settle,
)
from .result import Result, describe_best, finish, log_folder, taken
from .run import Checkpoint, choose_run, working_run
from .saving import Saving, describe_stop, disk_told, keep, save
from .scan import names
from .schedule import lr_factor
from .step import Numbers, Passes, accumulate_gradients, limit, update, with_memory
from .texts import embedding_stops, text_reader, text_stops
from .validate import better, check_prediction, early_end, validation_loss

NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run,
OVERFLOW_LIMIT = 20  # and in float16, where the scale that fits is found by trying: half as much at each
TO_LOWER = "lower batch_size (raise accumulate by the same factor) or the resolution, or keep weights as float8 or nf4."


@disk_told()
def train_lora(
    config: RunConfig,
    output: Path,
    cache: Path,
    device: torch.device | str = "cpu",
    callbacks: Callbacks | None = None,
    verify: Callable[[Path], None] | None = None,
    cache_limit: int = 0,
    logs: Path | None = None,
    embeddings: Path | None = None,
    runs: Path | None = None,
) -> Result:
    """Train a LoRA, or take or go on with what an earlier run has learned, and copy its file to `output`.

    output: where the LoRA goes; its stem is the run's name, and another number is added when the name is taken. cache:
    folder of the store, which is kept below cache_limit bytes (0 = any size). verify: a last word on each LoRA file,
    raises to refuse it. logs: folder in which the run's log, if it writes one, gets a folder of its own. embeddings:
    folder for words that are learned, by default output's. runs: folder of run folders, by default beside output.
    Everything wrong with the input raises ValueError before a model is loaded. When the run is stopped or fails, what
    was learned is saved in its folder, and its LoRA copied beside `output`, before the exception leaves.
    """
    device, callbacks, runs = torch.device(device), callbacks or Callbacks(), runs or output.parent / "runs"
    shelf = Shelf(output=output, words=embeddings or output.parent, saves=config.saves)
    check_settings(config, shelf, logs, device)
    dtype = choose_dtype(config.base_model.precision, device)
    check_precision(config, dtype)
    planned = plan_run(config, cache, callbacks)
    plan, keys = planned.plan, planned.keys

    choice = choose_run(runs, keys, plan.steps, config.existing, other_steps(config, plan.steps))
    if (result := taken(choice, plan, shelf, config, logs)) is not None:
        callbacks.note(choice.sentence)
        return result
    check_places(config, plan, runs, choice.own, shelf)
    ladder = look_ahead(config, planned, dtype, device, callbacks.note)

    about = {"config": config.to_dict(), "pictures": len(plan.manifest.pictures), "models": planned.models}
    working = working_run(runs, choice, keys, output.stem, plan.steps, callbacks.note, **about)
    with working as (folder, checkpoint, how):
        if checkpoint is not None:
            callbacks.note(how)
        parts = {"callbacks": callbacks, "folder": folder, "shelf": shelf, "verify": verify}
        try:
            run = prepare_run(config, plan, cache, cache_limit, dtype, device, **parts)
        except BaseException as error:
            if not isinstance(error, Exception):  # a Cancel
                callbacks.note(describe_stop(checkpoint, plan))
            raise
        result = carry_out(run, ladder, checkpoint, choice.finished, how, log_folder(config, logs, folder))
    if sentence := describe_best(result):
        callbacks.note(sentence)
    return result


def carry_out(
    run: Run,
    ladder: Sequence[MemoryConfig],
    checkpoint: Checkpoint | None,
    finished: Checkpoint | None,
    how: str,
    log: Path | None,
) -> Result:
    """Train a run whose models are there, save it, and return what it leaves behind; the models are gone afterwards.

    ladder: as for `train`. checkpoint: the save to go on with. finished: the run's end, where only samples are missing.
    """
    config, device, memory = run.config, run.device, run.config.memory
    try:
        with (
            run.network.attached(),
            attention_kernel(memory.attention, device),
            room_for_programs(memory.compile),
        ):
            try:
                with memory_told(run):
                    set_up(run, ladder[0], checkpoint)
                    with logged(run.callbacks, config.train.log, log, log_columns(run), run.losses) as run.callbacks:
                        train(run, ladder)
                if finished is None or finished.step != run.at:
                    checkpoint = save(run, stays=True, at_end=True)
            except BaseException:
                keep(run)
                raise
            assert checkpoint is not None
            return finish(run, checkpoint, how, log, stopped=run.at < run.plan.steps and not run.ended)
    finally:
        run.base.unet, run.base.texts, run.base.vae = None, (), None
        run.network.let_go()  # an exception's traceback may keep this frame, and must not keep the weights
        give_back(device)


def train(run: Run, ladder: Sequence[MemoryConfig]) -> None:
    """Take the steps of the plan that are left, on an attached network that is set up; all is noted in the run.

    ladder: the memory settings to work with, then those to fall back on when memory runs out.
    """
    base, plan, config, device, callbacks = run.base, run.plan, run.config, run.device, run.callbacks
    ladder, saving, began_at = list(ladder), Saving(run), run.at
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    encode = text_reader(base, run.encoded, device, learning=True)
    stopped: dict[str, float] = {}  # learning rates of models that have stopped
    not_finite: list[str] = []  # what was seen at the last steps without an update
    if run.at == 0:
        for sentence in check_prediction(base, run.encoded, encode, plan, config, alphas, device):
            callbacks.note(sentence)
    measure(run, alphas)
    while run.at < plan.steps and not run.ended:
        step, began = run.at, time.perf_counter()
        if stop_learning(run, stopped):
            encode = text_reader(base, run.encoded, device, learning=texts_learn(run, stopped))
        factor = lr_factor(step, plan.steps, config.scheduler)
        for group in run.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if step == began_at:  # when the optimizer takes its memory, and the update may have to be undone
            saving.remember()
        numbers, norms = take_step(run, encode, alphas, ladder, saving, first=step == began_at)
        report_step(run, numbers, norms, stopped, began)

        not_finite = [] if numbers.finite else [*not_finite, describe_step(plan, step, numbers)]
        if len(not_finite) == (OVERFLOW_LIMIT if run.scaler.is_enabled() else NOT_FINITE_LIMIT):
            saving.go_back()
            raise RuntimeError(
                f"Loss or gradient was not finite {len(not_finite)} times in a row, so the run went back to step "
                f"{run.at} and stopped: {'; '.join(not_finite[-NOT_FINITE_LIMIT:])}. Lower the learning rate, look at "
                "these pictures, or use float32 or bfloat16 precision."
            )
        measure(run, alphas)
        asked = callbacks.asked()
        saving.after_step(asked)
        if "stop" in asked and run.at < plan.steps:
            callbacks.note(f"Stopped and kept after step {run.at} of {plan.steps}. Queue again to go on from there.")
            break
    assert run.noise_scale is not None
    if sentence := run.noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        callbacks.note(sentence)


def stop_learning(run: Run, stopped: dict[str, float]) -> bool:
    """Freeze text encoders and words that stop before the next step and add them to `stopped`; tell whether any do."""
    before = len(stopped)
    for prefix, stop in text_stops(run.config.optimizer, run.base, run.plan).items():
        if stop <= run.at and prefix not in stopped:
            run.network.freeze(prefix)
            stopped[prefix] = 0.0
    for word, stop in embedding_stops(run.config.lora.embeddings, run.plan).items():
        if stop <= run.at and f"embedding {word}" not in stopped:
            run.network.embeddings.freeze(word)
            stopped[f"embedding {word}"] = 0.0
    return len(stopped) > before


def texts_learn(run: Run, stopped: dict[str, float]) -> bool:
    """Tell whether anything in the text encoders learns still."""
    rates = learning_rates(run.config.optimizer, run.base) | stopped
    return run.network.embeddings.learning or any(rates[text.kohya] > 0 for text in run.base.texts)


def take_step(
    run: Run,
    encode: Callable[[str], Conditioning],
    alphas: Tensor,
    ladder: list[MemoryConfig],
    saving: Saving,
    *,
    first: bool,
) -> tuple[Numbers, Norms | None]:
    """Take the next step; when memory runs out, once more with the next settings of the ladder.

    The settings that did not do are taken off the ladder. Raises RuntimeError when the next ones do not either, or when
    it ran out in an update that cannot be undone: only the first one can.
    """
    for again in (False, True):
        passes = with_memory(accumulate_gradients, run, encode, alphas, ladder[0])
        moved = with_memory(limit_and_update, run, passes, saving) if passes is not None else None
        if moved is not None:
            return moved
        run.optimizer.zero_grad(set_to_none=True)
        give_back(run.device)
        if passes is not None:
            if not first:
                break
            saving.go_back()
        if again or len(ladder) == 1:
            break
        del ladder[0]
        settle(run, ladder[0])
        run.callbacks.note(f"Memory ran out at step {run.at + 1}; the step is taken again with {describe(ladder[0])}.")
    raise RuntimeError(f"Memory ran out at step {run.at + 1} with {describe(ladder[0])}: {TO_LOWER}")


def limit_and_update(run: Run, passes: Passes, saving: Saving) -> tuple[Numbers, Norms | None]:
    """Make of gradients an update, and keep the state before one that is left out as not finite."""
    numbers = limit(run, passes)
    if not numbers.finite:
        saving.remember()
    norms = update(run, numbers)
    if numbers.finite:
        saving.forget()
    return numbers, norms


@contextmanager
def memory_told(run: Run) -> Iterator[None]:
    """Turn an error that memory ran out in a `with` block into one that says with which settings, and what to lower."""
    ran_out = False
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        ran_out = True
    if ran_out:
        when = f"after step {run.at}" if run.at else "before the first step"
        raise RuntimeError(f"Memory ran out {when} with {describe(run.memory)}: {TO_LOWER}")


def report_step(run: Run, numbers: Numbers, norms: Norms | None, stopped: dict[str, float], began: float) -> None:
    """Report the step that was just taken, and write it into the run's log; began: by time.perf_counter."""
    assert run.noise_scale is not None
    optimizer, device = run.optimizer, run.device
    rates = {group["model"]: learning_rate(optimizer, group) for group in reversed(optimizer.param_groups)}
    report = StepReport(
        step=run.at,
        steps=run.plan.steps,
        loss=run.losses[-1],
        grad_norm=numbers.grad_norm,
        learning_rates=rates | stopped,
        updated=numbers.finite,
        seconds=time.perf_counter() - began,
        epoch=run.plan.epochs_after(run.at),
        masked_area=numbers.masked_area,
        norms=norms,
        concepts=numbers.concepts,
        noise_scale=run.noise_scale.record(*numbers.noise),
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
    run.record("step", step=report.step, loss=report.loss, grad_norm=report.grad_norm, lr=rates, s=report.seconds)
    run.callbacks.step(report)


def describe_step(plan: Plan, step: int, numbers: Numbers) -> str:
    """Say what was seen at a step, 0 and up, and on which pictures."""
    pictures = {sample.picture for micro_batch in plan.step(step) for sample in micro_batch.samples}
    seen = names([plan.manifest.pictures[number].name for number in sorted(pictures)])
    return f"step {step + 1} (loss {numbers.loss:.4g}, gradient norm {numbers.grad_norm:.4g}) on {seen}"


def measure(run: Run, alphas: Tensor) -> None:
    """Measure the validation loss if that is due and not done, and end the run if it has not fallen for long."""
    base, plan, config, device, callbacks = run.base, run.plan, run.config, run.device, run.callbacks
    every, at = config.train.validate_every, run.at
    if not plan.validation or not (at == plan.steps or (at % every == 0 if every else at == 0)):
        return
    if not run.validation or run.validation[-1][0] != at:  # else measured before the run was cut off
        average = run.ema if config.optimizer.ema_output == "average" else None
        # Other weights than those that training's reader may remember captions of.
        with average.swapped() if average else averaged(run.optimizer):
            read = text_reader(base, run.encoded, device, learning=True)
            loss = validation_loss(base, run.encoded, read, plan, config, alphas, device, callbacks)
            run.validation.append((at, loss))
            if config.train.keeps_by:
                run.best = better(run.best, run.validation, run.network)
        run.record("validation", step=at, loss=loss)
        callbacks.validation(at, loss)
    if sentence := early_end(config.train, run.validation, plan.steps):
        callbacks.note(sentence)
        run.ended = True
