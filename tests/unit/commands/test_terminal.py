"""What a shell sees of a run: one live line, plain lines, or events; and how a signal stops it."""

import io
import json
import math
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import pytest

from lora_atelier.trainer_core.commands.layout import layout
from lora_atelier.trainer_core.commands.terminal import ENDING, Screen, Stop, TerminalProgress, stopping
from lora_atelier.trainer_core.common.callbacks import StepReport
from lora_atelier.trainer_core.common.command_line import run_command
from lora_atelier.trainer_core.runs import Keys
from lora_atelier.trainer_core.runs.folder import new_run


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def step(number: int, steps: int = 1000, loss: float = 0.5) -> StepReport:
    """Report a step."""
    return StepReport(
        step=number, steps=steps, loss=loss, grad_norm=1, learning_rates={"unet": 1e-4}, updated=True, seconds=0.5,
        epoch=1.5,
    )  # fmt: skip


def shown(stream: io.StringIO, *, as_json: bool = False) -> TerminalProgress:
    return TerminalProgress(Screen(stream, as_json=as_json))


def test_a_terminal_has_one_live_line_that_notes_do_not_cut():
    stream = Terminal()
    progress = shown(stream)
    with stopping(progress.screen) as stop:
        callbacks = progress.callbacks(stop)
        callbacks.step(step(1))
        callbacks.note("A note.\nOf two lines.")
        callbacks.step(step(10))
    assert "\x1b" not in stream.getvalue()  # an older console of Windows prints it as text
    cleared = f"\r{' ' * (shutil.get_terminal_size().columns - 1)}\r"
    parts = stream.getvalue().split(cleared)
    assert (
        parts[0].startswith("step 1 of 1000  ") and "\n" not in parts[0] and parts[0].endswith("loss 0.5000 (1 step)")
    )
    assert parts[1].startswith("A note.\nOf two lines.\nstep 10 of 1000  ")


def test_a_file_gets_a_line_for_each_hundredth():
    stream = io.StringIO()
    callbacks = shown(stream).callbacks(Stop(Screen(stream, as_json=False)))
    for number in range(1, 1001):
        callbacks.step(step(number))
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, *range(10, 1001, 10)] and "\x1b" not in stream.getvalue()


def test_programs_get_every_step_as_json():
    stream = Terminal()
    callbacks = shown(stream, as_json=True).callbacks(Stop(Screen(stream, as_json=False)))
    callbacks.phase("encoding", 1, 3)
    callbacks.step(step(3, loss=math.nan))
    callbacks.validation(3, 0.25)
    callbacks.samples(3, [Path("a.png")])
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["phase", "step", "validation", "note", "samples"]
    assert events[0] == {"event": "phase", "phase": "encoding", "done": 1, "total": 3}
    assert events[1] | {"step": 3, "steps": 1000, "loss": None, "rate": {"unet": 1e-4}, "epoch": 1.5} == events[1]


def test_names_of_files_cannot_steer_the_terminal():
    stream = io.StringIO()
    shown(stream).note("a\x1b[2Jb")
    assert stream.getvalue() == "a\\x1b[2Jb\n"


def test_another_model_than_the_runs_is_told(tmp_path):
    run = new_run(
        tmp_path, Keys(run="a" * 64, course="a" * 64), "cat", 5, config={}, models={"path": "here", "vae": "v"}
    )
    stream = io.StringIO()
    progress = TerminalProgress(Screen(stream, as_json=False), {"path": "there", "vae": "v"})
    progress.callbacks(Stop(progress.screen)).run(run.path, True)
    assert stream.getvalue() == "The path of the model is another file than the run's (sha256 there).\n"
    assert [event["event"] for event in run.events()] == ["begun", "note"]


def test_the_second_signal_ends_at_once():
    before = {number: signal.getsignal(number) for number in ENDING}
    with stopping(Screen(io.StringIO(), as_json=False)) as stop:
        stop.check()
        signal.raise_signal(signal.SIGINT)
        assert all(signal.getsignal(number) == signal.SIG_DFL for number in ENDING)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert {number: signal.getsignal(number) for number in ENDING} == before


def test_files_go_where_the_page_puts_them(tmp_path):
    comfy, file = tmp_path / "ComfyUI", tmp_path / "run.toml"
    places = layout(None, comfy, file)
    assert places.runs == comfy / "output" / "atelier" / "runs" and places.loras == comfy / "models" / "loras"
    assert places.cache == comfy / "user" / "__atelier" / "cache"
    run = comfy / "output" / "atelier" / "runs" / "cat-1"
    run.mkdir(parents=True)
    assert layout(None, comfy, run) == places
    away = layout(tmp_path / "out", comfy, run)
    assert away.runs == tmp_path / "out" / "atelier" / "runs" and away.loras == tmp_path / "out" / "loras"
    copied = tmp_path / "cat-1"
    copied.mkdir()
    assert (
        layout(None, None, copied).runs == tmp_path
        and layout(None, None, copied).loras == Path("output/loras").absolute()
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ],
)
def test_a_command_that_gets_no_memory_says_so(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def command(_: object) -> int:
        raise error

    assert run_command(command, Namespace()) == 2
    assert capsys.readouterr().err.startswith("Out of memory: no more RAM is free")
