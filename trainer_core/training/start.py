"""From a request to a trained run: plan it, find an earlier one, prepare it, and have it carried out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

from ..common.computed import KEY
from ..common.leftovers import sweep
from ..data.images import DECODER_ERRORS, draw_small
from ..data.plan import Plan
from ..runs import Checkpoint, Choice, RunFolder, choose_run, explain_choice, working_run
from ..runs.detail import names_left_open
from ..runs.log import logged
from .job import Job, Planned
from .joining import joins
from .prepare import (
    check_processes,
    check_settings,
    describe_shares,
    fill_prompts,
    fill_settings,
    log_columns,
    plan_run,
    prepare_run,
    run_preflight,
)
from .result import Result, describe_best, log_folder, reuse
from .saving import describe_stop

CarryOut = Callable[..., Result | None]  # trains a prepared run, see train.py


LEAST = 64 << 20  # bytes of RAM; with less Python may wait for ever for a thread that could not begin


def train_job(job: Job, carry_out: CarryOut) -> Result | None:
    """Plan, prepare and train a run, or find its finished result; None in a process that does not lead.

    carry_out: trains a prepared run.
    """
    bytes(LEAST)  # raises MemoryError, and writes to none of it
    note, callbacks, name = job.callbacks.note, job.callbacks, job.destination.output.stem
    later: list[str] = []  # notes that come after the one on an earlier run
    asked = job.config
    try:
        job, outline = fill_settings(replace(job, callbacks=replace(callbacks, note=later.append)))
        left_open = names_left_open(asked.to_dict(), job.config.to_dict())
        check_settings(job)
        sweep(job.places())
        with job.world.leader_first():  # the others find the hashes of its files
            planned = plan_run(job, outline)
        check_processes(job.world, planned)
        job = fill_prompts(job, planned.plan)
        if not job.world.leads:
            return help_train(job, planned, carry_out)
        config, plan, keys = job.config, planned.plan, planned.keys
        computed = job.source.computes()
        choose = partial(
            choose_run, job.runs, keys, plan.steps, config.existing, joins(config, plan.steps), computed=computed
        )
        choice = choose(later.append)
        if sentence := explain_choice(choice, job.runs, keys, name, planned.inputs, config):
            note(sentence)
    finally:
        for sentence in later:
            note(sentence)
    job = replace(job, callbacks=callbacks)
    if (result := reused(job, choice, plan)) is not None:
        return result
    if sentence := describe_shares(job.world, config.train.accumulate):
        note(sentence)
    ladder = run_preflight(job, planned, choice.run)

    about = {"config": config.to_dict(), "pictures": len(plan.manifest.pictures), "models": planned.models}
    about |= {"inputs": planned.inputs, "open": left_open}
    about |= {KEY: list(computed.numbers)} if computed.numbers else {}
    about["levels"] = asdict(outline.levels)  # what a timestep_distribution of auto stands for
    working = working_run(job.runs, choose, keys, name, plan.steps, note, **about)
    with working as (choice, folder, checkpoint, origin):
        if (result := reused(job, choice, plan)) is not None:  # finished meanwhile
            return result
        job.world.share((folder, checkpoint))
        job.callbacks.run(folder.path, True)
        if checkpoint is not None:
            note(origin)
        if job.workflow is not None:
            folder.keep_workflow(job.workflow)
        keep_picture(folder, plan)
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


def keep_picture(folder: RunFolder, plan: Plan) -> None:
    """Keep a small copy of the first picture that is trained, for lists of runs."""
    pairs = zip(plan.manifest.pictures, plan.concepts, strict=True)
    chosen = next((picture for picture, concept in pairs if concept.role == "train"), None)
    with suppress(*DECODER_ERRORS):  # gone since the scan; what is kept of it is trained all the same
        if chosen:
            folder.keep_picture(lambda path: draw_small(chosen.path, path))


def reused(job: Job, choice: Choice, plan: Plan) -> Result | None:
    """Find the result of a finished run, and say so; None where there is something to train."""
    result = reuse(choice, plan, job.destination, job.config, job.logs)
    if result is not None:
        job.world.share(None)
        job.callbacks.run(result.run, False)
        job.callbacks.note(choice.message)
    return result


def help_train(job: Job, planned: Planned, carry_out: CarryOut) -> None:
    """Compute this process's share of the steps of a run that the leader has chosen, in whose folder it only reads."""
    ladder = run_preflight(job, planned, None)
    chosen: tuple[RunFolder, Checkpoint | None] | None = job.world.share(None)
    if chosen is not None:  # else the leader has found a finished run
        folder, checkpoint = chosen
        carry_out(prepare_run(job, planned, ladder[0], folder), ladder, checkpoint)
