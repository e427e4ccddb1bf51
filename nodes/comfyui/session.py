"""Run a training inside ComfyUI's process: its device, the buttons of Train LoRA, and ComfyUI's end."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import comfy.model_management
import torch
from server import PromptServer

from ...trainer_core.common.devices import kept_random_state, kind_of
from ...trainer_core.common.wording import OUT_OF_RAM, is_out_of_ram, say
from ...trainer_core.memory import free_bytes, total_bytes
from ...trainer_core.runs.asked import Paused

SLACK = 0.5  # GB that a card may lack of its nominal size
SAID = {  # what can be asked of a run, and what is answered
    "pause": say("The run pauses and frees the memory. Press Continue, or Run, to go on from the same step."),
    "stop": say("The run stops after this step; the next nodes get the LoRA so far."),
    "save": say("The run will be saved after this step."),
    "sample": say("Samples will be drawn after this step."),
}
NO_PROMPTS = say("There are no prompts to draw; set sample_prompts of Saves & Samples before the next run.")
PATIENCE = 60.0  # seconds that ComfyUI's end waits for a run to be saved
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # SIGHUP: terminal closed


@contextmanager
def training_session() -> Iterator[torch.device]:
    """Prepare the process for training and yield the device; restore everything after.

    Running out of memory becomes a RuntimeError that names the setting to lower.
    """
    management, matmul = comfy.model_management, torch.backends.cuda.matmul
    management.unload_all_models()
    management.soft_empty_cache()
    benchmark = torch.backends.cudnn.benchmark
    fp16_sums = getattr(matmul, "allow_fp16_accumulation", None)  # torch < 2.7 has no such switch
    device = management.get_torch_device()
    try:
        with torch.inference_mode(False), kept_random_state(device):
            torch.backends.cudnn.benchmark = False  # its choice of algorithms would differ from run to run
            if fp16_sums:  # --fast: too coarse for gradients
                matmul.allow_fp16_accumulation = False
            yield device
    except Paused as pause:
        raise management.InterruptProcessingException from pause
    except (MemoryError, RuntimeError) as error:
        if is_out_of_ram(error):
            raise RuntimeError(OUT_OF_RAM) from None
        if not management.is_oom(error):
            raise
        raise RuntimeError(
            "Out of memory while Train LoRA prepared the run; lower its resolution, or close other programs that use "
            "the GPU."
        ) from None
    else:  # after a Cancel nothing waits for this memory, and people wait for the queue
        gc.collect()
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if fp16_sums:
            matmul.allow_fp16_accumulation = fp16_sums
        management.soft_empty_cache()


def free_to_train() -> tuple[torch.device, float]:
    """Find the device of runs, and the bytes that are free there once a run has unloaded the other models."""
    management = comfy.model_management
    device = management.get_torch_device()
    if kind_of(device).shares_ram:  # what leaves it is in RAM
        return device, free_bytes(device)
    loaded = [each for each in management.current_loaded_models if each.device == device]
    return device, free_bytes(device) + sum(each.model_loaded_memory() for each in loaded)


def gigabytes() -> float:
    """Find the memory of the GPU that runs use, in GB as cards are sold; 0 without one."""
    device = comfy.model_management.get_torch_device()
    total = total_bytes(device)
    return round(total / 2**30 + SLACK, 1) if total else 0.0


# --- buttons -----------------------------------------------------------------------------------------------


class Buttons:
    """The buttons pressed since the last step of a run. The server's thread presses, the worker's takes."""

    def __init__(self, node_id: str, draws: bool) -> None:
        self.node_id = node_id
        self.draws = draws  # it has prompts for samples
        self._lock = threading.Lock()
        self._pressed: set[str] = set()

    def press(self, what: str) -> None:
        """Remember a button until it is taken."""
        with self._lock:
            self._pressed.add(what)

    def take(self) -> Collection[str]:
        """Take all pressed buttons but "pause", which `check` answers."""
        with self._lock:
            pressed, self._pressed = self._pressed - {"pause"}, self._pressed & {"pause"}
        return pressed

    def check(self) -> None:
        """Raise ComfyUI's exception of a Cancel if the person cancelled the prompt, Paused if "pause" was pressed."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        if "pause" in self._pressed:
            raise Paused


_current: Buttons | None = None  # of the run at work; ComfyUI's worker runs one node at a time
_kept: Counter[str] = Counter()  # by a run's name: how often it was stopped and kept


@contextmanager
def buttons_enabled(node_id: str, *, draws: bool) -> Iterator[Buttons]:
    """Enable the buttons of a node while it trains; yield them."""
    global _current
    _current = buttons = Buttons(node_id, draws)
    try:
        yield buttons
    finally:
        _current = None


def at_work() -> bool:
    """Tell whether a run is at work in this ComfyUI."""
    return _current is not None


def ask(what: str, node_id: str | None) -> str:
    """Request one of SAID of the current run and return the answer; raises ValueError if that is impossible.

    node_id: the node's id in the prompt; None = whichever trains.
    """
    current = _current
    if current is None:
        raise ValueError(say("No LoRA is being trained now."))
    if node_id not in (None, current.node_id):
        raise ValueError(say("This node is not training; another Train LoRA is."))
    if what == "sample" and not current.draws:
        raise ValueError(NO_PROMPTS)
    current.press(what)
    return SAID[what]


def count_kept(name: str) -> None:
    """Count that a run of this name was stopped and kept."""
    _kept[name] += 1


def kept(name: str | None) -> int:
    """How often runs of a name were stopped and kept since ComfyUI started; None = of any name."""
    return _kept.total() if name is None else _kept[name]


# --- the end of ComfyUI ------------------------------------------------------------------------------------

_closing = threading.Event()  # ComfyUI ends, and its run is being saved


def closing() -> bool:
    """Tell whether ComfyUI ends, so that no person has cancelled the prompts that end now."""
    return _closing.is_set()


@contextmanager
def saved_when_comfyui_ends() -> Iterator[None]:
    """Let ComfyUI, when it is closed, first cancel and save the run in here, for at most PATIENCE seconds.

    ComfyUI ends at once on a signal to end, and on Ctrl+C as soon as its main thread does: the worker that trains is
    not waited for. A second signal, or a second Ctrl+C, does end it at once.
    """
    loop = PromptServer.instance.loop
    exiting, over = threading.Event(), threading.Event()
    taken: list[int] = []  # signals that are answered here; this and `received` belong to the loop's thread
    received: list[int] = []

    def take_signals() -> None:
        # Replace only the default handler, which ends the process at once. A handler of other code stays: if it ends
        # Python normally, at_exit saves the run. Windows has no such signals.
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    loop.add_signal_handler(number, on_signal, number)
                    taken.append(number)

    def give_back_signals() -> None:
        while taken:
            loop.remove_signal_handler(taken.pop())

    def on_signal(number: int) -> None:
        give_back_signals()
        received.append(number)
        cancel()
        loop.call_later(PATIENCE, signal.raise_signal, number)

    def on_over() -> None:
        give_back_signals()
        for number in received:
            signal.raise_signal(number)

    def at_exit() -> None:
        exiting.set()
        give_back_signals()
        cancel()
        over.wait(PATIENCE)

    def cancel() -> None:
        _closing.set()
        logging.getLogger(__name__).info(
            "ComfyUI is closing; LoRA Atelier saves the run first. Close again to end at once."
        )
        comfy.model_management.interrupt_current_processing()

    loop.call_soon_threadsafe(take_signals)
    atexit.register(at_exit)
    try:
        yield
    finally:
        atexit.unregister(at_exit)
        over.set()
        if exiting.is_set():
            threading.Event().wait()  # for ever: a thread that computes while Python ends makes it crash
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_over)
