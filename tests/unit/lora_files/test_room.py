"""Small factors with an endless product: every tool refuses it before it is made; Cancel is heard."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import large_layers
import pytest
import torch
from bounded import bounded
from large_layers import KINDS, OF_WEIGHT, SMALL, TOOLS
from safetensors.torch import save_file

from lora_atelier.trainer_core.commands import main as command
from lora_atelier.trainer_core.common import side_by_side
from lora_atelier.trainer_core.common.cancel import NoLongerWanted, cancellable, look
from lora_atelier.trainer_core.lora_files import room
from lora_atelier.trainer_core.lora_files.room import CHECKED, DECOMPOSED, MERGED

REFUSED = "has impossible shapes|takes .* of RAM|depends? on the model|has another shape in the model"
SIDES = [(2**20, 2**20), (2**22, 2**22), (2**20, 2**10)]  # 2^40, 2^44, 2^30 numbers
NEVER_WHOLE = ("LoRA", "Tucker")


class Cancel(Exception):
    pass


@bounded(60)
@pytest.mark.parametrize("kind", SMALL)
def test_an_endless_product_is_refused_by_every_tool(kind: str) -> None:
    weight = torch.zeros(4, 8)
    for rows, columns in SIDES:
        small = 1 if kind in ("LoHa", "LoHa Tucker", "DoRA") else 0
        made = SMALL[kind](rows, columns, small) if small else SMALL[kind](rows, columns)  # type: ignore[call-arg]
        tensors = {f"a.{ending}": tensor for ending, tensor in made.items()}
        for name, tool in TOOLS.items():
            if kind == "GLoRA" and name in ("save", "inspect"):  # nothing is made of its factors without a weight
                continue
            with pytest.raises(ValueError, match=REFUSED):
                tool(tensors, lambda _: weight)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NEVER_WHOLE])
def test_what_is_free_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is free every tool says so, and does nothing."""
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    weight = torch.zeros(64, 128)
    for name, tool in TOOLS.items():
        if kind in OF_WEIGHT and name not in ("inspect", "resize", "recipe"):
            continue
        with pytest.raises(ValueError, match=r"^a.* takes 0\.0 GB of RAM, and 0\.0 GB are free; close"):
            tool(large_layers.given(kind, 64, 128), lambda _: weight)


@pytest.mark.parametrize("side", [2**10, 2**20, 2**22])
def test_the_shell_asks_the_same(side: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a.lokr_w1": torch.zeros(side, 1), "a.lokr_w2": torch.zeros(1, side)}
    if side == 2**10:
        tensors = {f"a.lokr_w{number}": torch.zeros(side, side) for number in (1, 2)}
    save_file(tensors, path := tmp_path / "x.safetensors")
    for words in (["inspect"], ["resize", "--rank", "4", "--to", "y"], ["merge", str(path), "--to", "y"]):
        assert command(["lora", words[0], str(path), *words[1:]]) == 2
        said = capsys.readouterr().err
        assert said == "a in x.safetensors has impossible shapes; get the LoRA again.\n"


def uncuttable(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let a decomposition begin, and not end before it may."""
    begun, may_end, svd = threading.Event(), threading.Event(), torch.linalg.svd

    def slow(*args, **kwargs):  # type: ignore[no-untyped-def]
        begun.set()
        may_end.wait(60)
        return svd(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "svd", slow)
    return begun, may_end


@pytest.mark.parametrize("tool", ["inspect", "resize", "recipe", "merge ties", "merge svd"])
def test_cancel_is_heard_while_one_call_computes(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = uncuttable(monkeypatch)
    pressed: list[float] = []

    def check() -> None:
        if begun.is_set():
            pressed.append(time.monotonic())
            raise Cancel

    kind = "LoRA" if tool == "merge svd" else "LoHa"
    with cancellable(check), pytest.raises(Cancel), torch.no_grad():
        TOOLS[tool](large_layers.given(kind, 64, 128), lambda _: torch.zeros(1))
    assert time.monotonic() - pressed[0] < 1 + side_by_side.GRACE
    may_end.set()


def test_what_is_dropped_ends_at_its_next_look() -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @side_by_side.cancelled_at_once
    def work() -> None:
        begun.set()
        may_go_on.wait(60)
        try:
            look()
        except NoLongerWanted:
            ended.set()
            raise

    def check() -> None:
        if begun.is_set():
            raise Cancel

    with cancellable(check), pytest.raises(Cancel):
        work()
    may_go_on.set()
    assert ended.wait(60)


def test_errors_and_results_come_out_of_the_thread() -> None:
    @side_by_side.cancelled_at_once
    def work(number: int) -> tuple[int, bool]:
        return 10 // number, torch.is_grad_enabled()

    assert work(5) == (2, False)
    with pytest.raises(ZeroDivisionError):
        work(0)


def test_layers_in_other_threads_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    at_work, most = [], []

    def layer(number: int) -> None:
        with room.room_for("a", 60):
            at_work.append(number)
            most.append(len(at_work))
            time.sleep(0.01)
            at_work.remove(number)

    monkeypatch.setattr(side_by_side.torch, "get_num_threads", lambda: 4)
    assert len(list(side_by_side.side_by_side(layer, range(6)))) == 6
    assert set(most) == {1}


def allowed(tool: str, kind: str) -> float:
    """Bytes for a number of a layer's change."""
    if tool == "save":
        return CHECKED
    each = DECOMPOSED if tool == "merge orthogonal" else MERGED
    return 2 * each if tool.startswith("merge") else DECOMPOSED


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_bounds_are_those_of_real_memory(tool: str, kind: str) -> None:
    if kind in OF_WEIGHT and tool not in ("inspect", "resize", "recipe"):
        return
    program = str(Path(large_layers.__file__))
    folder = str(Path(program).parent)
    done = subprocess.run(
        [sys.executable, program, tool, kind, "1024", "8192"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
    )
    used = float(done.stdout.split()[0])
    assert used <= allowed(tool, kind), f"{tool} of {kind} takes {used} bytes for each number"
