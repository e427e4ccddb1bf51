"""train RUN: the same run as the page's, without a page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.command_line import PROGRAM, comfyui_around
from ..common.devices import fastest, kind_of
from ..common.smooth import mean_loss
from ..common.world import ALONE, ProcessFailed, World, joined, own_gpu
from ..config import TrainConfig
from ..outward import Outward, build_senders, read_outward, usual_file
from ..runs.asked import Paused
from ..runs.news import telling
from ..train import train_lora
from ..training.result import Result, describe_result
from ..workflow.connecting import Load, connector
from ..workflow.places import Folders
from ..workflow.read import Connect
from ..workflow.run_file import RunFile, on_this_machine, read_run
from ..workflow.write import workflow_of
from .layout import Layout, layout
from .terminal import Screen, TerminalProgress, stopping

PATIENCE = 10.0  # seconds that the end waits for each service, before the process ends
FAILED, WRONG, ASKED = 1, 2, 3
STOPPED = 128  # and the number of the signal, as shells count
EXIT_CODES = (
    "Exit codes: 0 the run is finished, now or before; 1 it failed while it trained, and what could be saved is saved; "
    "2 wrong input, nothing was trained; 3 stopped or paused in a page, 130 stopped by Ctrl+C, 143 by the system "
    "(SIGTERM), and saved: the same command resumes."
)


def main(arguments: Sequence[str], load: Load | None = None) -> int:
    """Train a run; return the exit status, which EXIT_CODES explains. load: loads linked models, where ComfyUI is."""
    options = build_parser().parse_args(arguments)
    with joined() as world:
        screen = Screen(sys.stdout, as_json=options.json, silent=not world.leads)
        try:
            with world.together():
                run = on_this_machine(read_source(options, connect_by(options, load)), places_of(options))
                places = layout(options.output, options.comfyui, options.run)
                services = services_of(options)
                device = device_of(options.device, world)
        except (OSError, ValueError, ProcessFailed) as error:
            return fail(screen, error, WRONG)
        return train_run(run, places, device, screen, world, services)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    text = "Train a run without a page, in the same folders and with the same result."
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} train", description=text, epilog=EXIT_CODES)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="write an event in JSON per line, for programs")
    parser.add_argument("--notify", action="store_true", help="tell the services that are on in ComfyUI's settings")
    add_outward(parser, "with --notify")
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what names a run and changes it on this machine."""
    add_source(parser, "RUN", "the run: its folder, its run.json, a TOML of the same names, or a saved workflow")
    parser.add_argument("--output", type=Path, help="the output folder; by default the run's, ComfyUI's, or ./output")
    parser.add_argument("--device", default="", help="cuda, cuda:1, xpu, mps or cpu; by default the fastest there is")


def add_outward(parser: argparse.ArgumentParser, when: str) -> None:
    """Add what names the file of settings for services; when: it is read."""
    parser.add_argument(
        "--services", type=Path, metavar="FILE", help=f"{when}: the settings of services, by default ComfyUI's"
    )


def add_source(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add what names a run and its files."""
    parser.add_argument("run", metavar=metavar, type=Path, help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting, as train.steps=500"
    )
    parser.add_argument(
        "--node", default="", metavar="ID", help=f"the {TrainConfig.NODE} of a workflow that has several"
    )
    parser.add_argument("--base-model", type=Path, metavar="FILE", help="where the base model is on this machine")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="ComfyUI's comfy/sd1_tokenizer, or a copy")
    parser.add_argument(
        "--comfyui", type=Path, default=comfyui_around(), metavar="FOLDER", help="ComfyUI; by default the one around"
    )


def connect_by(options: argparse.Namespace, load: Load | None) -> Connect:
    """Build what loads the models that a workflow links, on the device that the options name."""
    return connector(options.comfyui, cpu=device_of(options.device).type == "cpu", load=load)


def read_source(options: argparse.Namespace, connect: Connect) -> RunFile:
    """Read the run that the options name, with their changes."""
    changes = list(options.set)
    if options.base_model:
        changes.append(f"base_model.path={options.base_model.absolute()}")
    return read_run(options.run, places_of(options), changes, options.node, connect)


def places_of(options: argparse.Namespace) -> Folders:
    """Choose where files are looked for."""
    return Folders(options.comfyui.absolute() if options.comfyui else None, options.tokenizer)


def device_of(name: str, world: World = ALONE) -> torch.device:
    """Choose the device: a named one, else the fastest there is; raises ValueError for one that is not there.

    Of several processes each takes a GPU of its own.
    """
    best = fastest()
    if world.size > 1 and name in ("", best.type) and kind_of(best).sends:
        return own_gpu()
    if name:
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # of torch without that kind of device
            raise ValueError(f"There is no device {name:.80}; set --device to cuda, xpu, mps or cpu.") from error
    return best


def services_of(options: argparse.Namespace) -> tuple[Outward, Path]:
    """Read which services hear of runs, and where their libraries write; none unless a person asks for it here."""
    if not options.notify:
        return Outward(), Path()
    file = options.services or usual_file(options.comfyui)
    if not file.is_file():
        raise ValueError(f"There are no settings of services in {file}; name them by --services.")
    return read_outward(file), file.parent


def train_run(
    run: RunFile,
    places: Layout,
    device: torch.device,
    screen: Screen,
    world: World,
    services: tuple[Outward, Path] = (Outward(), Path()),
) -> int:
    """Train a run and show it; return the exit status. services: as `services_of` reads them."""
    progress, began, (outward, folder) = TerminalProgress(screen, run.models), time.monotonic(), services
    senders = build_senders(outward, folder) if world.leads else []
    try:
        with (
            stopping(screen) as stop,
            telling(progress.callbacks(stop), senders, run.name, PATIENCE, outward.secrets) as callbacks,
        ):
            try:
                result = train_lora(
                    run.config,
                    output_of(run, places),
                    places.cache,
                    device,
                    callbacks,
                    logs=places.logs,
                    embeddings=places.embeddings,
                    runs=places.runs,
                    source=run.open(run.config.base_model),
                    workflow=kept_workflow(run),
                    world=world,
                )
            except KeyboardInterrupt:
                if not stop.number:
                    raise
                screen.tell("stopped", signal=stop.number)
                return STOPPED + stop.number
            except Paused:
                screen.tell("stopped", signal=None)
                return ASKED
    except (OSError, ValueError, RuntimeError, ProcessFailed) as error:
        return fail(screen, error, FAILED if progress.began else WRONG)
    if result is None:
        return 0
    report(screen, result, time.monotonic() - began)
    return 0 if result.finished else ASKED


def kept_workflow(run: RunFile) -> Mapping[str, Any] | None:
    """Choose the workflow that the run's folder keeps for the page; None where no workflow has its settings.

    One whose nodes load the models is kept as it is then.
    """
    if run.workflow is not None and not run.changed:
        return run.workflow
    try:
        return workflow_of(run)
    except ValueError:
        return run.workflow


def output_of(run: RunFile, places: Layout) -> Path:
    """Choose the LoRA's file, and make its folder."""
    folder = places.loras / run.config.saves.folder
    for each in (folder, places.embeddings):
        each.mkdir(parents=True, exist_ok=True)
    return folder / f"{run.name}.safetensors"


def report(screen: Screen, result: Result, seconds: float) -> None:
    """Tell of the result."""
    files = {"lora": str(result.path), "run": str(result.run)}
    loss = mean_loss(result.losses) if result.losses else None
    said = describe_result(result, seconds)
    screen.tell(
        "result", said, **files, steps=len(result.losses), finished=result.finished, loss=loss, advice=result.advice
    )


def fail(screen: Screen, error: Exception, status: int) -> int:
    """Tell of an error in one sentence; return the status."""
    sentence = str(error)
    if isinstance(error, OSError) and error.filename:
        sentence = f"{error.filename}: {error.strerror}."
    screen.tell("error", sentence=sentence, status=status)
    if not screen.silent:
        print(sentence, file=sys.stderr)
    return status
