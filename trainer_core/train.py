"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .common.access import ANYWHERE, Access
from .common.callbacks import Callbacks, Norms
from .common.cancel import cancellable
from .common.leftovers import sweep
from .common.world import ALONE, World
from .config import MemoryConfig, RunConfig
from .data.plan import MicroBatch
from .memory import attention_kernel, choose_dtype, empty_cache, give_back, kept_activations, room_for_programs
from .memory.messages import never_fits, out_of_memory_explained, repeated_with_less
from .models import Source, source_of
from .objective import Draws
from .objective.slider import directions, slider_prompts
from .optim.schedule import factor_on
from .runs import Checkpoint, RunFolder, choose_run, explain_choice, working_run
from .runs.asked import Paused
from .runs.log import logged
from .runs.publish import Destination
from .training.batch import Read, read_batch
from .training.conditioning import freeze_stopped, text_is_trained
from .training.prepare import (
    Job,
    Planned,
    apply_memory,
    check_processes,
    check_settings,
    describe_shares,
    fill_settings,
    joins,
    log_columns,
    plan_run,
    prepare_run,
    resume_run,
    run_preflight,
)
from .training.result import Result, describe_best, finish, log_folder, reuse
from .training.saving import Saving, describe_stop, disk_errors_explained, save, save_interrupted, size_of_save
from .training.state import Run
from .training.step import (
    Numbers,
    Passes,
    catch_out_of_memory,
    check_weights,
    describe_step,
    limit,
    predict_blank,
    predict_frozen,
    predict_slider,
    preservation_losses,
    report_step,
    update,
)
from .training.validate import check_prediction, measure

NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
OVERFLOW_LIMIT = 20  # the same in float16, where each overflow halves the loss scale


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
    access: Access = ANYWHERE,
    workflow: Mapping[str, Any] | None = None,
    world: World = ALONE,
) -> Result | None:
    """Train a LoRA, or resume or reuse an earlier run of it, and copy its file to `output`.

    output: path of the LoRA; its stem is the run's name, and a taken name gets a number. cache: folder of encoded
    pictures and captions, kept below cache_limit bytes (0 = any size). verify: called with each LoRA file, raises
    to refuse it. logs: folder for the run's log, in a subfolder. embeddings: folder for trained embeddings, by
    default output's. runs: folder of run folders, by default beside output. source: of the base model, by default
    the files of config.base_model. access: the places that pictures, captions and masks may be read from. workflow:
    kept in the run's folder. world: the processes that share the run; all call this with the same arguments, the leader
    reports and saves, and the others return None. Wrong input raises ValueError before a model is loaded. When the run
    is stopped or fails, its state is saved in its folder and its LoRA copied beside `output`, then the exception is
    raised, and ProcessFailed in the other processes. A pause asked through the run's folder raises Paused in all.
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
        callbacks=callbacks if callbacks and world.leads else Callbacks(),
        access=access,
        verify=verify,
        workflow=workflow,
        world=world,
    )
    with world.together(), cancellable(job.callbacks.check):
        return train_job(job)


def train_job(job: Job) -> Result | None:
    """Plan, prepare and train a run, or find its finished result; None in a process that does not lead."""
    note, callbacks, name = job.callbacks.note, job.callbacks, job.destination.output.stem
    later: list[str] = []  # notes that come after the one on an earlier run
    try:
        job, outline = fill_settings(replace(job, callbacks=replace(callbacks, note=later.append)))
        config = job.config
        check_settings(job)
        sweep(job.places())
        with job.world.leader_first():  # the others find the hashes of its files
            planned = plan_run(job, outline)
        check_processes(job.world, planned)
        if not job.world.leads:
            return help_train(job, planned)
        plan, keys = planned.plan, planned.keys
        choose = partial(choose_run, job.runs, keys, plan.steps, config.existing, joins(config, plan.steps))
        choice = choose(later.append)
        if sentence := explain_choice(choice, job.runs, keys, name, planned.inputs, config):
            note(sentence)
    finally:
        for sentence in later:
            note(sentence)
    job = replace(job, callbacks=callbacks)
    if (result := reuse(choice, plan, job.destination, config, job.logs)) is not None:
        job.world.share(None)
        job.callbacks.run(result.run, False)
        note(choice.message)
        return result
    if sentence := describe_shares(job.world, config.train.accumulate):
        note(sentence)
    ladder = run_preflight(job, planned, choice.run)

    about = {"config": config.to_dict(), "pictures": len(plan.manifest.pictures), "models": planned.models}
    about["inputs"] = planned.inputs
    about["levels"] = asdict(outline.levels)  # what a timestep_distribution of auto stands for
    working = working_run(job.runs, choose, keys, name, plan.steps, note, **about)
    with working as (choice, folder, checkpoint, origin):
        if (result := reuse(choice, plan, job.destination, config, job.logs)) is not None:  # finished meanwhile
            job.world.share(None)
            job.callbacks.run(result.run, False)
            note(choice.message)
            return result
        job.world.share((folder, checkpoint))
        job.callbacks.run(folder.path, True)
        if checkpoint is not None:
            note(origin)
        if job.workflow is not None:
            folder.keep_workflow(job.workflow)
        log = log_folder(config, job.logs, folder)
        columns: list[str] = []  # known once the network is built, before the first row
        with logged(job.callbacks, config.train.log, log, columns) as callbacks:
            try:
                run = prepare_run(replace(job, callbacks=callbacks), planned, ladder[0], folder)
                columns += log_columns(run)
            except BaseException as error:
                if not isinstance(error, Exception):  # a Cancel
                    note(describe_stop(checkpoint, plan, config.memory))
                raise
            result = carry_out(run, ladder, checkpoint, choice.finished, origin, log)
    if result and (sentence := describe_best(result)):
        note(sentence)
    return result


def help_train(job: Job, planned: Planned) -> None:
    """Compute this process's share of the steps of a run that the leader has chosen, in whose folder it only reads."""
    ladder = run_preflight(job, planned, None)
    chosen: tuple[RunFolder, Checkpoint | None] | None = job.world.share(None)
    if chosen is not None:  # else the leader has found a finished run
        folder, checkpoint = chosen
        carry_out(prepare_run(job, planned, ladder[0], folder), ladder, checkpoint)


def carry_out(
    run: Run,
    ladder: list[MemoryConfig],
    checkpoint: Checkpoint | None,
    end: Checkpoint | None = None,
    origin: str = "",
    log: Path | None = None,
) -> Result | None:
    """Train a prepared run, save it, free its models, and return its result; None if this process does not lead.

    ladder: as for `train`. checkpoint: the one to resume from. end: the last one of a run that lacks only samples.
    """
    device, memory = run.device, run.config.memory
    try:  # steps look for a Cancel by themselves, and a save is never broken off
        with (
            cancellable(None),
            run.base.session(device),
            run.network.attached(),
            attention_kernel(memory.attention, device),
            room_for_programs(memory.compile),
        ):
            try:
                with out_of_memory_explained(lambda: (run.at, run.memory)):
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(device)  # count neither encoding nor other programs
                    apply_memory(run, ladder[0])
                    if checkpoint is not None:
                        resume_run(run, checkpoint)
                    train(run, ladder)
                if not run.world.leads:
                    return None
                if checkpoint is None or end is None or end.step != run.at:
                    with disk_errors_explained(run.folder.path, lambda: size_of_save(run)):
                        checkpoint = save(run, stays=True, at_end=True)
            except BaseException:
                if run.world.leads:
                    save_interrupted(run)
                raise
            return finish(run, checkpoint, origin, log, stopped=not run.finished)
    finally:
        run.base.free()
        if run.live is not None:
            run.live.free()
        run.network.release()  # a traceback may keep this frame alive, but not the weights
        empty_cache(device)


def train(run: Run, ladder: list[MemoryConfig]) -> None:
    """Train the remaining steps of the plan, on an attached network.

    ladder: the memory settings in use, then the fallbacks for when memory runs out.
    """
    plan, config, callbacks = run.plan, run.config, run.callbacks
    ladder, saving, began_at = list(ladder), Saving(run), run.at
    read = run.reader(training=True)
    stopped: dict[str, float] = {}  # learning rates (0) of frozen parts
    not_finite: list[str] = []  # descriptions of the last steps, if their updates were skipped
    if run.at == 0 and run.world.leads:
        for sentence in check_prediction(run, read):
            callbacks.note(sentence)
        saving.before_first_step()
    measure(run)
    while not run.finished:
        step, began = run.at, time.perf_counter()
        if freeze_stopped(run.network, config, run.base, plan, step, stopped):
            read = run.reader(training=text_is_trained(run.network, config, run.base, stopped))
        factor = factor_on(run.curve, step, config.scheduler)
        for group in run.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if step == began_at:  # the optimizer allocates its state in this update, which may run out of memory
            saving.back_up()
        numbers, norms = take_step(run, read, ladder, saving, first=step == began_at)
        report_step(run, numbers, norms, stopped, began)

        not_finite = [] if numbers.finite else [*not_finite, describe_step(run, step, numbers)]
        if len(not_finite) == (OVERFLOW_LIMIT if run.scaler.is_enabled() else NOT_FINITE_LIMIT):
            saving.roll_back()
            raise RuntimeError(
                f"Loss or gradient was not finite {len(not_finite)} times in a row, so the run went back to step "
                f"{run.at} and stopped: {'; '.join(not_finite[-NOT_FINITE_LIMIT:])}. Check these pictures, set "
                "learning_rate of Optimizer lower, or set precision of Load Base Model to float32 or bfloat16."
            )
        measure(run)
        asked = run.asked()
        if run.world.leads:
            saving.after_step(asked)
        if "pause" in asked and not run.finished:
            raise Paused
        if "stop" in asked and run.at < plan.steps:
            callbacks.note(f"Stopped and kept after step {run.at} of {plan.steps}. Press Run again to resume.")
            break
    if sentence := run.noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        callbacks.note(sentence)


def take_step(
    run: Run, read: Read, ladder: list[MemoryConfig], saving: Saving, *, first: bool
) -> tuple[Numbers, Norms | None]:
    """Take the next step; if memory runs out, repeat it once with the next settings of the ladder.

    Removes the failed settings from the ladder. Raises RuntimeError when the next ones fail too, or when memory ran out
    in an update after the first one, which cannot be undone.
    """
    for repeated in (False, True):
        passes = catch_out_of_memory(gradients, run, read)
        updated = catch_out_of_memory(limit_and_update, run, passes, saving) if passes is not None else None
        short = updated is None
        if passes is not None and first and "repeat" in run.world.agree(("repeat",) if short else ()).words:
            updated = None  # in all processes
        if updated is not None:
            if updated[0].finite:
                saving.drop_backup()
            return updated
        run.optimizer.zero_grad(set_to_none=True)
        give_back(run.device)
        if passes is not None:
            if not first:
                break
            saving.roll_back()
        if short:
            if repeated or len(ladder) == 1:
                break
            del ladder[0]
            apply_memory(run, ladder[0])
            run.callbacks.note(repeated_with_less(run.at + 1, ladder[0]))
    raise RuntimeError(never_fits(run.at + 1, run.memory))


def gradients(run: Run, read: Read) -> Passes:
    """Compute the gradients of the next step; repeat its passes without compiling where that failed."""
    passes = None
    try:
        passes = forward_and_backward(run, read)
    except RuntimeError as error:
        if not run.programs.end_for(error):
            raise
    if passes is None:
        run.optimizer.zero_grad(set_to_none=True)
        passes = forward_and_backward(run, read)
    passes.total(run)  # of all processes
    return passes


def forward_and_backward(run: Run, read: Read) -> Passes:
    """Accumulate the gradients of the mean loss of a step's samples, over this process's share of its micro-batches."""
    micro_batches = run.plan.step(run.at)
    factor = run.objective.reduction_factor(micro_batches[0].step_samples, len(micro_batches))
    own, half = run.world.mine(range(len(micro_batches))), len(micro_batches) // 2
    halfway = partial(run.noise_scale.halfway, micro_batches[half].first, run.scaler.get_scale)
    passes, slides = Passes(loss=torch.zeros((), device=run.device)), run.config.objective.slider != "off"
    if run.uncertainty:
        run.uncertainty.forget_gradient()
    for number in own:
        if number == max(half, own[0]):
            halfway()
        for strength, micro_batch in directions(run.config, micro_batches[number]):  # one, of a slider of pairs both
            run.callbacks.check()
            run.encode(micro_batch.samples, slider_prompts(run.config.objective, micro_batch.index) if slides else ())
            run.network.set_micro_batch(micro_batch.index)
            run.network.reverse(strength < 0)
            passes.add(micro_batch, *one_pass(run, micro_batch, read, factor), run)
    if not own or own[-1] < half:
        halfway()
    run.network.set_micro_batch(None)
    run.network.set_times(None, run.base.parts[0].prefix)
    run.network.reverse(False)
    return passes


def one_pass(run: Run, micro_batch: MicroBatch, read: Read, factor: float) -> tuple[Draws, Tensor, Tensor]:
    """Accumulate the gradients of a micro-batch; return its draws, its samples' losses, (B,), and their share.

    factor: of the step's loss before the backward pass.
    """
    base, objective, device, count = run.base, run.objective, run.device, micro_batch.step_samples
    models = (base.denoiser, *(text.model for text in base.text_encoders))
    batch = read_batch(run.encoded, micro_batch, run.plan, run.config)  # latents, masks, weights
    draws = objective.draw(batch, device)  # levels, noise, noised, target
    run.network.set_times(draws.levels / len(objective.path), base.parts[0].prefix)
    with base.passes(draws.noised.shape):
        with kept_activations(run.memory, models, device, written=base.writes_inputs):
            conditions = run.conditions(micro_batch.samples, read)
            prediction = base.predict(draws.noised, draws.levels, conditions)
        needed = draws.needs_frozen or run.config.objective.slider != "off"
        frozen = predict_frozen(run, micro_batch, draws, conditions) if needed else None
        blank = predict_blank(run, micro_batch, draws, read) if run.config.objective.guidance_loss else None
        slid = predict_slider(run, micro_batch, draws, frozen)
        losses = objective.loss(prediction, draws, frozen, blank, slid)
        loss = losses.sum() / count
        weighed = run.uncertainty.weigh(losses, draws.levels).sum() / count if run.uncertainty else loss
        run.scaler.scale(weighed * factor).backward()
        if (preserved := preservation_losses(run, micro_batch, draws, read, models)) is not None:
            extra = preserved.sum() / count
            run.scaler.scale(extra * factor).backward()
            losses, loss = losses.detach() + preserved.detach(), loss.detach() + extra.detach()
    return draws, losses.detach(), loss.detach()


def limit_and_update(run: Run, passes: Passes, saving: Saving) -> tuple[Numbers, Norms | None]:
    """Clip the gradients and update the weights; back up the state before skipping an update that is not finite.

    Raises RuntimeError for an update that makes weights that are not finite.
    """
    numbers = limit(run, passes)
    if not numbers.finite:
        saving.back_up()
    norms = update(run, numbers)
    if numbers.finite:
        check_weights(run, saving)
    return numbers, norms
