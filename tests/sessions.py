"""Sessions that something goes wrong in: a tiny scene, moments at which it happens, and a server that forks.

The server runs every session in a process of its own that is forked from it, so that what all share is there already.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import warm
from PIL import Image
from prepared import without_estimates
from safetensors.torch import save_file
from tiny_runs import run as train
from tiny_runs import tiny_config

from lora_atelier.trainer_core import runs as run
from lora_atelier.trainer_core import train as training
from lora_atelier.trainer_core.common import tensor_tree as state
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, RunConfig
from lora_atelier.trainer_core.lora_files import write as export
from lora_atelier.trainer_core.runs import publish
from lora_atelier.trainer_core.training import prepare, saving, validate
from lora_atelier.trainer_core.training import result as results

CLOCK = 1_700_000_000.0  # what time.time says in sessions whose files are compared byte for byte


def make_scene(folder: Path) -> RunConfig:
    """Write a base model as small as the code allows and a few pictures; return a run with all that can go wrong."""
    from diffusers import AutoencoderTiny, UNet2DConditionModel
    from tiny_models import tiny_text_encoder

    from lora_atelier.trainer_core.models.sd.names import tiny_vae_names, unet_ldm_names

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=64,
        attention_head_dim=8,
    ).state_dict()
    vae = AutoencoderTiny().state_dict()
    unet_names, vae_names = unet_ldm_names(unet, 1), tiny_vae_names(vae)
    tensors = {f"model.diffusion_model.{unet_names[k]}": v for k, v in unet.items()}
    text = {k.removeprefix("text_model."): v for k, v in tiny_text_encoder().state_dict().items()}
    tensors |= {f"cond_stage_model.transformer.text_model.{k}": v for k, v in text.items()}
    tensors |= {f"first_stage_model.{vae_names[k]}": v for k, v in vae.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / "tiny.safetensors")
    noise = torch.Generator().manual_seed(7)
    for name, count in (("things", 2), ("held", 1)):
        (folder / name).mkdir()
        for i in range(count):
            values = torch.randint(0, 256, (64, 64, 3), generator=noise, dtype=torch.uint8)
            Image.fromarray(values.numpy()).save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text(f"thing, number {i}", encoding="utf-8")
    captions = CaptionConfig(dropout=0.2, shuffle=True)
    return tiny_config(
        folder / "tiny.safetensors",
        ConceptConfig(folder=str(folder / "things"), flip=True, captions=captions),
        ConceptConfig(folder=str(folder / "held"), role="validation"),
        existing={"on_existing": "resume"},
        # Few layers: most of a save's time goes by the tensor.
        lora={"exclude": ("*attn2*", "*to_[kv]", "*to_out*"), "dropout": 0.1},
        optimizer={"learning_rate": 1e-2, "ema_decay": 0.9},
        train={"batch_size": 1, "accumulate": 2, "seed": 5, "validate_every": 2, "keep_best": True},
        memory={"checkpointing": "0"},
        sample={"prompts": ("a thing",), "steps": 1, "width": 32, "height": 32},
        saves={"save_every": 1, "save_unit": "steps", "keep_every": 2, "publish": True, "sample_every": 2},
    )


@contextmanager
def prepared_once() -> Iterator[None]:
    """Leave out the estimates of sessions, and do the work of collecting garbage on what they make alone."""
    gc.collect()
    gc.freeze()  # each run collects what has become unreachable, and all that was imported need not be looked at
    with without_estimates():
        yield


@dataclass
class Moments:
    """Counts what a session does, by operation and by what it is part of, and calls `act` at each moment."""

    # (number, operation, part, file, "before" or "half"): may raise, or end the process. "half": of what was written.
    act: Callable[[int, str, str, str, str], None]
    count: int = 0
    parts: list[str] = field(default_factory=lambda: ["the rest"])

    def at(self, operation: str, file: object, work: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        """Do something that is a moment."""
        number, self.count = self.count, self.count + 1
        self.act(number, operation, self.parts[-1], str(file), "before")
        result = work()
        if half is not None:
            self.act(number, operation, self.parts[-1], str(file), "half")
        return result

    def part(self, name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Name what happens inside a function."""

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            self.parts.append(name if isinstance(name, str) else name(**options))
            try:
                return function(*args, **options)
            finally:
                self.parts.pop()

        return inside

    def operation(self, name: str, function: Callable[..., Any], *, half: bool = False) -> Callable[..., Any]:
        """Make the calls of a function moments."""

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            file = args[1] if name in ("replace", "save_file") else args[0]
            return self.at(name, file, lambda: function(*args, **options), (lambda: None) if half else None)

        return counted

    @contextmanager
    def watched(self, root: Path) -> Iterator[Moments]:
        """Count what is done to files below `root` for the length of a `with` block."""
        plain_open = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set("wax+") & set(mode) or root not in Path(file).parents:
                return plain_open(file, mode, *args, **options)
            return self.at("open", file, lambda: plain_open(file, mode, *args, **options), lambda: None)

        parts: list[tuple[Any, str, str | Callable[..., str]]] = [
            (saving.Saving, "_save", lambda asked: "an asked save" if asked else "a periodic save"),
            (training, "save", "the final save"),
            (training, "save_interrupted", "the save of what there is"),
            (saving, "draw_samples", "samples"),
            (results, "draw_samples", "the last samples"),
            (training, "finish", "the result"),
            (publish.Destination, "publish", "publishing"),
            (run.RunFolder, "finish", "result.json"),
            (run.RunFolder, "prune", "pruning"),
            (run.RunFolder, "log", "the log"),
            (prepare, "encode_plan", "encoding"),
            (prepare, "scan", "scanning"),
            (training, "step", "a step"),
            (validate, "validation_loss", "validation"),
            (run.choose, "new_run", "the folder"),
        ]
        with ExitStack() as stack:
            for place, name, part in parts:
                stack.enter_context(mock.patch.object(place, name, self.part(part, getattr(place, name))))
            for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
                stack.enter_context(mock.patch.object(os, name, self.operation(name, getattr(os, name))))
            for module in (state, export):
                counted = self.operation("save_file", module.save_file, half=True)
                stack.enter_context(mock.patch.object(module, "save_file", counted))
            stack.enter_context(mock.patch.object(builtins, "open", opened))
            stack.enter_context(mock.patch.object(io, "open", opened))
            yield self


def session(config: RunConfig, folder: Path, notes: list[str] | None = None, **options: Any) -> Any:
    """Train as the node does, everything below one folder; return the result. notes: gets what the person reads."""
    output = folder / "loras" / "lora.safetensors"
    return train(config, folder, output=output, note=[].append if notes is None else notes.append, **options)


def left_behind(result: Any) -> dict[str, Any]:
    """Return all that a run gives, by name: files byte for byte, losses, samples, as texts."""
    files = {path.name: path.read_bytes().hex() for path in (result.path, *result.others)}
    tensors = {name: tensor.numpy().tobytes().hex() for name, tensor in sorted(result.tensors.items())}
    course = [result.losses, result.concepts, result.validation, result.best]
    return {"files": files, "tensors": tensors, "course": repr(course), "samples": repr(result.samples.tolist())}


def essence(result: Any) -> dict[str, Any]:
    """List the results of a finished run without its files' bytes, which hold dates."""
    assert result.finished
    return {name: value for name, value in left_behind(result).items() if name != "files"}


def forked(job: dict[str, Any], config: RunConfig) -> int:
    """Run one session in a process of its own, which may be killed; return how it ended, below 0 by which signal."""
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        with ExitStack() as stack:
            stack.callback(os._exit, 1)  # a traceback is printed by the hook, and nothing of the parent's runs here
            stack.push(_print_traceback)
            if room := job.get("room"):
                import resource  # not on Windows

                # bytes that the process may take, as by ulimit -v
                now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
            _session_of(job, config)
            os._exit(0)
    if job.get("after") is not None:
        time.sleep(max(0.0, job["after"] - (time.monotonic() - began)))
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def _print_traceback(*error: Any) -> None:
    if error[0] is not None:
        traceback.print_exception(*error)


def _session_of(job: dict[str, Any], config: RunConfig) -> None:
    folder, kill, seen, began = Path(job["folder"]), job.get("kill"), [], time.monotonic()

    def act(number: int, operation: str, part: str, file: str, when: str) -> None:
        if when == "before":
            seen.append((operation, part, "half" if operation in ("save_file", "open") else "before"))
        if kill and number == kill[0] and when == kill[1]:
            if when == "half" and operation == "save_file":
                os.truncate(file, os.path.getsize(file) // 2)
            elif when == "half":
                with open(os.open(file, os.O_WRONLY | os.O_APPEND), "ab") as cut:
                    cut.write(b'{"event": "st')
            os.kill(os.getpid(), kill[2])

    moments = Moments(act)
    steps: list[int] = []

    def step(report: Any) -> None:
        steps.append(report.step)
        moments.at("step", "", lambda: None)

    def asked() -> tuple[str, ...]:
        return ("save", "sample") if steps[-1:] == [3] else ()

    check = functools.partial(moments.at, "check", "", lambda: None)
    os.environ["TZ"] = "UTC"
    with mock.patch.object(time, "time", lambda: job["clock"]), moments.watched(folder):
        result = session(config, folder, check=check, step=step, asked=asked)
    answer = {"moments": seen, "left": left_behind(result), "steps": steps, "how": result.origin}
    answer["seconds"] = time.monotonic() - began
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def serve(asked: Connection, config: RunConfig) -> None:
    """Run the sessions that are asked for, one after another, and tell how each process ended; None ends the server."""
    warm.end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    # What the first session of a process loads and imports is there in each process that is forked afterwards.
    with tempfile.TemporaryDirectory() as folder, without_estimates():
        session(config, Path(folder))
    os.fsync = os.fstat  # as in conftest.py: no test cuts the power
    with prepared_once():
        while (job := asked.recv()) is not None:
            asked.send(forked(job, config))
