"""plan RUN: everything that a run will do, and how long it takes, without training it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.axes import size_text
from ..common.callbacks import Callbacks, StepReport
from ..common.cancel import cancellable
from ..common.command_line import PROGRAM
from ..common.files import written_whole
from ..common.remaining import Remaining
from ..common.wording import bytes_of, clock, count, speed
from ..config import ExistingConfig, RunConfig, SampleConfig, SavesConfig, SchedulerConfig
from ..memory import choose_dtype, free_bytes
from ..models import Source
from ..preflight.guess import find_inputs, fits_memory, guess_settings
from ..preflight.report import manifest_table
from ..runs import Choice, choose_run
from ..runs.publish import Destination
from ..train import train_lora
from ..training.job import Job, Planned
from ..training.joining import joins
from ..training.prepare import check_settings, fill_settings, plan_run, run_preflight
from ..workflow.connecting import Load
from ..workflow.run_file import RunFile, on_this_machine
from .layout import Layout, layout
from .terminal import Screen, TerminalProgress, stopping
from .train import STOPPED, WRONG, add_run, connect_by, device_of, fail, output_of, places_of, read_source

MEASURED = 4  # steps that are taken to measure one; the first is not counted


def main(arguments: Sequence[str], load: Load | None = None) -> int:
    """Tell what a run will do; return the exit status: 2 for wrong input. load: loads linked models."""
    options = build_parser().parse_args(arguments)
    screen = Screen(sys.stdout, as_json=options.json)
    progress = TerminalProgress(screen)
    try:
        run = on_this_machine(read_source(options, connect_by(options, load)), places_of(options))
        places = layout(options.output, options.comfyui, options.run)
        with stopping(screen) as stop:
            try:
                tell_plan(run, places, device_of(options.device), progress.callbacks(stop), screen, options)
            except KeyboardInterrupt:
                return STOPPED + stop.number
    except (OSError, ValueError, RuntimeError) as error:
        return fail(screen, error, WRONG)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    text = "Tell what a run will do: its steps, buckets, crops, memory, and the time by some measured steps."
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} plan", description=text)
    add_run(parser)
    parser.add_argument("--crops", type=Path, metavar="FILE", help="also write each picture's size and crop, as CSV")
    parser.add_argument("--guess", action="store_true", help="also guess settings, by pictures, model and free memory")
    parser.add_argument("--no-time", action="store_true", help="measure no step, which loads the model")
    parser.add_argument("--json", action="store_true", help="write an event in JSON per line, for programs")
    return parser


def tell_plan(
    run: RunFile,
    places: Layout,
    device: torch.device,
    callbacks: Callbacks,
    screen: Screen,
    options: argparse.Namespace,
) -> None:
    """Plan a run as training does before its first step, and tell of it."""
    job = Job(
        config=run.config,
        source=run.open(run.config.base_model),
        device=device,
        dtype=choose_dtype(run.config.base_model.precision, device),
        cache=places.cache,
        cache_limit=0,
        runs=places.runs,
        logs=places.logs,
        destination=Destination(output=output_of(run, places), embeddings=places.embeddings, saves=run.config.saves),
        callbacks=callbacks,
        verify=None,
    )
    with cancellable(callbacks.check):
        job, outline = fill_settings(job)
        check_settings(job)
        planned = plan_run(job, outline)
        run_preflight(job, planned, None)
    choice = choose(job, planned)
    screen.tell("plan", choice.message, **numbers(planned))
    if options.guess:
        guess(run.config, job, planned, screen)
    if options.crops:
        with written_whole(options.crops) as temporary:
            temporary.write_text(manifest_table(planned.plan), encoding="utf-8")
        screen.tell("crops", f"Sizes and crops are in {options.crops}.", file=str(options.crops))
    begun = choice.begin_with[1].step if choice.begin_with else 0
    left = 0 if choice.finished else planned.plan.steps - begun
    if left and not options.no_time:
        measure(job.config, run.open(job.config.base_model), places, device, callbacks, screen, left)


def guess(config: RunConfig, job: Job, planned: Planned, screen: Screen) -> None:
    """Guess settings for a run, and tell each with its reason. config: as a person left it."""
    base, free = planned.outline, free_bytes(job.device)
    fits = None if base.host else fits_memory(job.config, planned.plan, job.device, free)
    for each in guess_settings(find_inputs(config, planned.plan, base.title, base.defaults, fits)):
        screen.tell("guess", each.sentence, **each._asdict())


def choose(job: Job, planned: Planned) -> Choice:
    """Find the earlier run that this one would reuse or resume."""
    steps = planned.plan.steps
    following = joins(job.config, steps)
    return choose_run(job.runs, planned.keys, steps, job.config.existing, following, computed=job.source.computes())


def numbers(planned: Planned) -> dict[str, Any]:
    """Collect the numbers of a plan."""
    plan = planned.plan
    buckets = {size_text(size): len(members) for size, members in plan.buckets().items()}
    return {"steps": plan.steps, "epochs": plan.epochs, "pictures": len(plan.manifest.pictures), "buckets": buckets}


def measure(
    config: RunConfig,
    source: Source,
    places: Layout,
    device: torch.device,
    callbacks: Callbacks,
    screen: Screen,
    left: int,
) -> None:
    """Take a few steps of the run in a folder that is thrown away, and tell how long all take."""
    reports: list[StepReport] = []
    remaining = Remaining()

    def step(report: StepReport) -> None:
        reports.append(report)
        remaining.add(report.step, time.monotonic())  # without the duration of the first one, which does not count

    quiet = Callbacks(phase=callbacks.phase, check=callbacks.check, step=step)
    with tempfile.TemporaryDirectory() as folder:
        train_lora(shortened(config), Path(folder) / "measured.safetensors", places.cache, device, quiet, source=source)
    pace, seconds = remaining.pace or 0.0, remaining.seconds(left) or 0.0
    peak = max((report.peak_memory or 0 for report in reports), default=0)
    said = f"About {clock(seconds)} for {count(left, 'step')}: {speed(pace)}, measured over "
    said += count(len(reports) - 1, "step") + (f", with {bytes_of(peak)} of GPU memory at most." if peak else ".")
    screen.tell("time", said, seconds=seconds, seconds_per_step=pace, peak_memory=peak or None)


def shortened(config: RunConfig) -> RunConfig:
    """Shorten a run to its first steps; what they compute stays, and nothing is saved or drawn on the way."""
    train = config.train.replace(
        steps=MEASURED,
        epochs=0,
        validate_every=0,
        keep_best=False,
        early_stop_patience=0,
        plateau_patience=0,
        log="none",
    )
    return config.replace(
        train=train,
        scheduler=SchedulerConfig(name="constant"),
        sample=SampleConfig(),
        saves=SavesConfig(save_every=0),
        existing=ExistingConfig(on_existing="train again"),
    )
