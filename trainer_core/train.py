"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .common.access import ANYWHERE, Access
from .common.callbacks import Callbacks
from .common.cancel import cancellable
from .common.world import ALONE, World
from .config import MemoryConfig, RunConfig, run_again
from .memory import attention_kernel, begin_peak, choose_dtype, empty_cache, room_for_programs, tensor_float
from .memory.messages import out_of_memory_explained
from .models import Source, differentiable, session, source_of
from .optim import limit_gradients
from .optim.schedule import factor_on
from .runs import Checkpoint
from .runs.asked import Paused
from .runs.publish import Destination
from .training.batch import ReadConditioning, read_batch
from .training.calibrate import calibrate
from .training.compiling import linked_compiled, settle_programs
from .training.compute import settle_compute
from .training.conditioning import freeze_stopped, text_is_trained
from .training.guard import Guard, looked_at
from .training.in_file import Reading
from .training.job import Job
from .training.prepare import apply_memory, resume_run
from .training.result import Result, finish
from .training.saving import Saving, disk_errors_explained, save, save_interrupted, size_of_save
from .training.start import train_job
from .training.state import Run
from .training.step import Passes, StepNumbers, measured, micro_batches_of, parameters_of, report_step
from .training.validate import check_prediction, fell, measure, plateau_factor


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
        return train_job(job, carry_out)


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
            session(run.base, device),
            run.network.attached(),
            attention_kernel(memory.attention, device),
            tensor_float(memory.tf32),
            room_for_programs(memory.compile),
            linked_compiled(run),
        ):
            try:
                with out_of_memory_explained(lambda: (run.at, run.memory)):
                    begin_peak(device)  # count neither encoding nor other programs
                    apply_memory(run, ladder[0])
                    if checkpoint is not None:
                        resume_run(run, checkpoint)
                    looked_at(run, ladder, settle_compute)
                    if checkpoint is None:
                        looked_at(run, ladder, calibrate)
                    looked_at(run, ladder, settle_programs)
                    train(run, ladder)
                if not run.world.leads:
                    return None
                if checkpoint is None or end is None or end.step != run.at:
                    with disk_errors_explained(run.folder.path, lambda: size_of_save(run)):
                        checkpoint = save(run, stays=True, at_end=True)
            except BaseException as problem:
                if run.world.leads:
                    save_interrupted(run, problem)
                raise
            return finish(run, checkpoint, origin, log, stopped=not run.finished)
    finally:
        run.base.free()
        if run.live is not None:
            run.live.free()
        run.programs.free()
        run.network.release()  # a traceback may keep this frame alive, but not the weights
        empty_cache(device)


def train(run: Run, ladder: list[MemoryConfig]) -> None:
    """Train the remaining steps of the plan, on an attached network.

    ladder: the memory settings in use, then the fallbacks for when memory runs out.
    """
    plan, config, note = run.plan, run.config, run.callbacks.note
    saving = Saving(run)
    guard = Guard(run, ladder, saving)
    read = run.reader(training=True)
    stopped: dict[str, float] = {}  # learning rates (0) of frozen parts
    if run.at == 0 and run.world.leads:
        for sentence in check_prediction(run, read):
            note(sentence)
        saving.before_first_step()
    measure(run)
    reading = Reading(run)
    while not run.finished:
        began, numbers = time.perf_counter(), None
        # Captions are kept once text encoders and words stopped; a plateau may bring other weights of these back.
        if freeze_stopped(run.network, config, run.base, plan, run.at, stopped) or fell(run):
            read = run.reader(training=text_is_trained(run.network, config, run.base, stopped))
        # A function of the step and the measurements, so that a resumed run needs no state of a scheduler.
        factor = factor_on(run.curve, run.at, config.scheduler) * plateau_factor(run)
        for group in run.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        # The block swallows an attempt that is to be repeated, and `numbers` stays None.
        while numbers is None:  # again with less memory, where that runs out
            with guard.attempt() as keep:
                numbers = keep(step(run, read))
        report_step(run, numbers, stopped, began)
        if run.at == reading.first + 2 and not run.finished and (sentence := reading.sentence()):
            note(sentence)
        guard.check()
        measure(run)
        asked = run.asked()
        if run.world.leads:
            saving.after_step(asked)
        if "pause" in asked and not run.finished:
            raise Paused
        if "stop" in asked and run.at < plan.steps:
            note(f"Stopped and kept after step {run.at} of {plan.steps}; {run_again()} to resume.")
            break
    if sentence := reading.sentence():
        note(sentence)
    if sentence := run.noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        note(sentence)


def step(run: Run, read: ReadConditioning) -> StepNumbers:
    """Take a step: the gradients of the mean loss of its samples, clipped, and an update of the weights by them.

    A loss or gradient that is not finite updates nothing.
    """
    base, network, objective, scaler = run.base, run.network, run.objective, run.scaler
    passes, parameters = Passes(loss=torch.zeros((), device=run.device)), parameters_of(run)
    whole = run.plan.step(run.at)
    factor = objective.reduction_factor(whole[0].step_samples, len(whole))
    # A failed attempt may have left some; the guard has cleared those of the network alone.
    for term in objective.terms:
        term.forget_gradients()

    for micro_batch in micro_batches_of(run):  # of this process; of pairs both ends
        # Clean latents, masks, weights.
        batch = read_batch(run.encoded, micro_batch, run.plan, run.config, objective.terms)
        draws = objective.draw(batch, run.device)  # levels, noise, noised latents, target
        network.set_times(draws.levels / len(objective.path), base.parts[0].prefix)
        share = micro_batch.step_samples
        with differentiable(base, draws.noised.shape):
            seen = run.passing(micro_batch.samples, draws, read, micro_batch.index)
            prediction = seen.predict()
            losses = objective.loss(prediction, seen)  # of each sample; terms have moved the target
            # Divided by the samples of the whole step: unequal micro-batches give the gradient of one large batch.
            loss, weighed = (each.sum() / share for each in (losses, objective.weigh(losses, draws)))
            # Reports show `loss`; what weighs it further shapes the gradient alone.
            if weighed.requires_grad:  # else only words are trained, and no caption here has one
                scaler.scale(weighed * factor).backward()
            for apart in objective.apart(seen):  # what should stay as it was, with a backward pass of its own
                more = apart.sum() / share
                if more.requires_grad:
                    scaler.scale(more * factor).backward()
                losses, loss = losses.detach() + apart.detach(), loss.detach() + more.detach()
        passes.add(micro_batch, draws, losses.detach(), loss.detach(), run)
    passes.total(run)  # of all processes

    run.updating = True  # from here on a failure can only be undone
    # Gradients are clipped at their true size, not at that of the scaled loss.
    moves = any(parameter.grad is not None for parameter in parameters)
    if moves:
        scaler.unscale_(run.optimizer)
    numbers = measured(run, passes, limit_gradients(parameters, run.config.optimizer), moves=moves)
    if numbers.finite:
        # The scaler unscales the run's optimizer alone, so a term divides its own gradients.
        for term in objective.terms:
            term.update(scaler.get_scale())
        if moves:
            scaler.step(run.optimizer)
        network.embeddings.keep_norms()
        if most := run.config.lora.scale_weight_norms:
            numbers.norms = network.limit_norms(most)
    return numbers
