"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from .common.callbacks import Callbacks, Norms
from .config import MemoryConfig, RunConfig
from .memory import attention_kernel, choose_dtype, give_back, kept_activations, room_for_programs
from .memory.messages import out_of_memory_after, out_of_memory_again, out_of_memory_explained
from .models import Source, source_of
from .optim.schedule import lr_factor
from .runs import Checkpoint, choose_run, working_run
from .runs.log import logged
from .runs.publish import Destination
from .training.batch import Read, read_batch
from .training.conditioning import stop_learning, text_learns
from .training.prepare import (
    Job,
    check_settings,
    log_columns,
    look_ahead,
    other_steps,
    plan_run,
    prepare_run,
    resume_run,
    settle,
)
from .training.result import Result, describe_best, finish, log_folder, reuse
from .training.saving import Saving, describe_stop, disk_errors_explained, keep, save
from .training.state import Run
from .training.step import (
    Numbers,
    Passes,
    describe_step,
    limit,
    predict_frozen,
    report_step,
    update,
    with_memory,
)
from .training.validate import check_prediction, measure

NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run,
OVERFLOW_LIMIT = 20  # and in float16, where the scale that fits is found by trying: half as much at each


@disk_errors_explained()
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
    source: Source | None = None,
) -> Result:
    """Train a LoRA, or resume or reuse an earlier run of it, and copy its file to `output`.

    output: where the LoRA goes; its stem is the run's name, and another number is added when the name is taken. cache:
    folder of encoded pictures and captions, kept below cache_limit bytes (0 = any size). verify: a last word on each
    LoRA file, raises to refuse it. logs: folder in which the run's log, if it writes one, gets a folder of its own.
    embeddings: folder for trained embeddings, by default output's. runs: folder of run folders, by default beside
    output. source: where the base model comes from, by default the files of config.base_model. Everything wrong with
    the input raises ValueError before a model is loaded. When the run is stopped or fails, its state is saved in its
    folder, and its LoRA copied beside `output`, before the exception leaves.
    """
    device = torch.device(device)
    job = Job(
        config=config,
        source=source or source_of(config.base_model),
        device=device,
        dtype=choose_dtype(config.base_model.precision, device),
        cache=cache,
        cache_limit=cache_limit,
        runs=runs or output.parent / "runs",
        logs=logs,
        destination=Destination(output=output, embeddings=embeddings or output.parent, saves=config.saves),
        callbacks=callbacks or Callbacks(),
        verify=verify,
    )
    note = job.callbacks.note
    check_settings(job)
    planned = plan_run(job)
    plan, keys = planned.plan, planned.keys

    choice = choose_run(job.runs, keys, plan.steps, config.existing, other_steps(config, plan.steps))
    if (result := reuse(choice, plan, job.destination, config, logs)) is not None:
        note(choice.message)
        return result
    ladder = look_ahead(job, planned, choice.run)

    about = {"config": config.to_dict(), "pictures": len(plan.manifest.pictures), "models": planned.models}
    working = working_run(job.runs, choice, keys, output.stem, plan.steps, note, **about)
    with working as (folder, checkpoint, how):
        if checkpoint is not None:
            note(how)
        log = log_folder(config, logs, folder)
        columns = log_columns(config, planned.outline, plan)
        with logged(job.callbacks, config.train.log, log, columns) as heard:
            try:
                run = prepare_run(replace(job, callbacks=heard), planned, ladder[0], folder)
            except BaseException as error:
                if not isinstance(error, Exception):  # a Cancel
                    note(describe_stop(checkpoint, plan))
                raise
            result = carry_out(run, ladder, checkpoint, choice.finished, how, log)
    if sentence := describe_best(result):
        note(sentence)
    return result


def carry_out(
    run: Run,
    ladder: list[MemoryConfig],
    checkpoint: Checkpoint | None,
    end: Checkpoint | None,
    how: str,
    log: Path | None,
) -> Result:
    """Train a prepared run, save it, and return its result; its models are freed afterwards.

    ladder: as for `train`. checkpoint: the one to resume from. end: the run's last one, where only samples are missing.
    """
    device, memory = run.device, run.config.memory
    try:
        with run.network.attached(), attention_kernel(memory.attention, device), room_for_programs(memory.compile):
            try:
                with out_of_memory_explained(lambda: (run.at, run.memory)):
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(device)  # count neither encoding nor other programs
                    settle(run, ladder[0])
                    if checkpoint is not None:
                        resume_run(run, checkpoint)
                    train(run, ladder)
                if checkpoint is None or end is None or end.step != run.at:
                    checkpoint = save(run, stays=True, at_end=True)
            except BaseException:
                keep(run)
                raise
            return finish(run, checkpoint, how, log, stopped=not run.finished)
    finally:
        run.base.free()
        run.network.release()  # an exception's traceback may keep this frame, and must not keep the weights
        give_back(device)


def train(run: Run, ladder: list[MemoryConfig]) -> None:
    """Take the steps of the plan that are left, on an attached network; the run keeps count.

    ladder: the memory settings to work with, then those to fall back on when memory runs out.
    """
    plan, config, callbacks = run.plan, run.config, run.callbacks
    ladder, saving, began_at = list(ladder), Saving(run), run.at
    read = run.reader(learning=True)
    stopped: dict[str, float] = {}  # learning rates of parts that have stopped
    not_finite: list[str] = []  # the last steps without an update
    if run.at == 0:
        for sentence in check_prediction(run, read):
            callbacks.note(sentence)
    measure(run)
    while not run.finished:
        step, began = run.at, time.perf_counter()
        if stop_learning(run.network, config, run.base, plan, step, stopped):
            read = run.reader(learning=text_learns(run.network, config, run.base, stopped))
        factor = lr_factor(step, plan.steps, config.scheduler)
        for group in run.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if step == began_at:  # when the optimizer takes its memory, and the update may have to be undone
            saving.remember()
        numbers, norms = take_step(run, read, ladder, saving, first=step == began_at)
        report_step(run, numbers, norms, stopped, began)

        not_finite = [] if numbers.finite else [*not_finite, describe_step(run, step, numbers)]
        if len(not_finite) == (OVERFLOW_LIMIT if run.scaler.is_enabled() else NOT_FINITE_LIMIT):
            saving.go_back()
            raise RuntimeError(
                f"Loss or gradient was not finite {len(not_finite)} times in a row, so the run went back to step "
                f"{run.at} and stopped: {'; '.join(not_finite[-NOT_FINITE_LIMIT:])}. Lower the learning rate, look at "
                "these pictures, or use float32 or bfloat16 precision."
            )
        measure(run)
        asked = callbacks.asked()
        saving.after_step(asked)
        if "stop" in asked and run.at < plan.steps:
            callbacks.note(f"Stopped and kept after step {run.at} of {plan.steps}. Press Run again to continue.")
            break
    if sentence := run.noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        callbacks.note(sentence)


def take_step(
    run: Run, read: Read, ladder: list[MemoryConfig], saving: Saving, *, first: bool
) -> tuple[Numbers, Norms | None]:
    """Take the next step; out of memory, once more with the next settings of the ladder.

    The settings that did not do are taken off the ladder. Raises RuntimeError when the next ones do not either, or when
    memory ran out in an update that cannot be undone: only the first one can.
    """
    for again in (False, True):
        passes = with_memory(gradients, run, read)
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
        run.callbacks.note(out_of_memory_again(run.at + 1, ladder[0]))
    raise RuntimeError(out_of_memory_after(run.at + 1, run.memory))


def gradients(run: Run, read: Read) -> Passes:
    """Take the forward and backward passes of the next step; again, where one could not be compiled."""
    try:
        return forward_and_backward(run, read)
    except RuntimeError as error:
        if not run.programs.end_for(error):
            raise
    run.optimizer.zero_grad(set_to_none=True)
    return forward_and_backward(run, read)


def forward_and_backward(run: Run, read: Read) -> Passes:
    """Accumulate the gradients of a step over its micro-batches: the mean loss of all of its samples."""
    base, objective, device = run.base, run.objective, run.device
    micro_batches = run.plan.step(run.at)
    count = sum(len(micro_batch.samples) for micro_batch in micro_batches)
    passes = Passes(loss=torch.zeros((), device=device))
    models = (base.denoiser, *(text.model for text in base.text_encoders))
    for number, micro_batch in enumerate(micro_batches, 1):
        run.callbacks.check()
        run.network.set_micro_batch(micro_batch.index)
        batch = read_batch(run.encoded, micro_batch, run.plan, run.config)  # latents, masks, weights
        draws = objective.draw(batch, device)  # levels, noise, noised, target
        with kept_activations(run.memory, models, device):
            conditions = run.conditions(micro_batch.samples, read)
            prediction = base.predict(draws.noised, draws.levels, conditions)
        frozen = predict_frozen(run, micro_batch, draws, conditions) if draws.needs_frozen else None
        losses = objective.loss(prediction, draws, frozen)
        loss = losses.sum() / count
        run.scaler.scale(loss).backward()
        passes.add(micro_batch, draws, losses, loss, run)
        if number == len(micro_batches) // 2:
            run.noise_scale.halfway(len(passes.concepts), run.scaler.get_scale)
    run.network.set_micro_batch(None)
    return passes


def limit_and_update(run: Run, passes: Passes, saving: Saving) -> tuple[Numbers, Norms | None]:
    """Clip the gradients and update the weights; keep the state before an update that is left out as not finite."""
    numbers = limit(run, passes)
    if not numbers.finite:
        saving.remember()
    norms = update(run, numbers)
    if numbers.finite:
        saving.forget()
    return numbers, norms
