"""Every operation on the disk fails, once and for good: as SQLite tests its own."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sessions
from safetensors import SafetensorError
from tiny_runs import change

from lora_atelier.trainer_core.common import tensor_tree
from lora_atelier.trainer_core.config import RunConfig
from lora_atelier.trainer_core.data.cache import CacheError
from lora_atelier.trainer_core.lora_files import write
from lora_atelier.trainer_core.runs import find_runs

CHANGES = ("replace", "fsync", "mkdir", "unlink", "rmdir", "open")  # of os; files are opened by io.open, too
ENDINGS = r"[0-9a-f]{8,}|[0-9]+"  # of names, which differ from run to run
# Where an unfinished file's folder stays behind in an unfinished save: nothing else here leaves one in a save.
NESTED = ("rmdir", "loras/runs/lora-*/checkpoints/.*-*-*.tmp/.*-*-*.tmp")


class Faulty:
    """A disk that counts what is asked of it below a folder, and fails at the n-th time: once, or from then on."""

    def __init__(self, root: Path, at: int | None = None, *, lasting: bool = False) -> None:
        self.root, self.at, self.lasting = str(root), at, lasting
        self.seen: list[tuple[str, str]] = []  # operation and kind of file, of all operations so far

    def ask(self, operation: str, path: object) -> None:
        """Count an operation; raise the disk's error where it is to fail."""
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if not name.startswith(self.root) or name.endswith(("lock", "owner.json")):
            return
        number = len(self.seen)
        kind = re.sub(ENDINGS, "*", os.path.relpath(name, self.root))
        self.seen.append((operation, kind))
        if self.at is not None and (number == self.at or (self.lasting and number > self.at)):
            if operation == "save_file":
                raise SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    def asked(self, operation: str, function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
        """Make the calls of a function operations; place: of the path among the arguments."""

        def call(*args: Any, **options: Any) -> Any:
            self.ask(operation, self.names.get(args[0]) if operation == "fsync" else args[place])
            result = function(*args, **options)
            if operation == "open":
                self.names[result] = args[0]
            return result

        return call

    @contextmanager
    def mounted(self) -> Iterator[Faulty]:
        """Ask this disk for the length of a `with` block."""
        self.names: dict[int, Any] = {}
        plain = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            self.ask("read" if mode in ("r", "rb") else "write", file)
            return plain(file, mode, *args, **options)

        with ExitStack() as stack:
            for name in CHANGES:
                changed = self.asked(name, getattr(os, name), 1 if name == "replace" else 0)
                stack.enter_context(mock.patch.object(os, name, changed))
            for module in (tensor_tree, write):
                saved = self.asked("save_file", module.save_file, 1)
                stack.enter_context(mock.patch.object(module, "save_file", saved))
            for place in ("builtins.open", "io.open"):
                stack.enter_context(mock.patch(place, opened))
            yield self


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[RunConfig]:
    """Give a run with as few operations as a run of all parts has."""
    scene = sessions.make_scene(tmp_path_factory.mktemp("io") / "scene")
    plain = change(
        scene,
        train={"steps": 2, "accumulate": 1, "validate_every": 0, "keep_best": False},
        optimizer={"ema_decay": 0.0},
        saves={"sample_every": 0, "publish": False, "keep_every": 0},
        dataset={"concepts": scene.dataset.concepts[:1]},
    )
    with sessions.prepared_once():
        yield plain


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
def test_any_operation_on_the_disk_may_fail(small, tmp_path, lasting, pytestconfig):
    counting = Faulty(tmp_path / "whole")
    with counting.mounted():
        whole = sessions.essence(sessions.session(small, tmp_path / "whole"))
    places = {place: number for number, place in enumerate(counting.seen)}  # the last of each kind and place
    assert len(places) > 40 and {operation for operation, _ in places} >= {"read", "write", "save_file", "fsync"}
    wrong = []
    # Else a tenth, each in one of the two ways: an operation on a kind of file has others beside it.
    first, step = (0, 1) if pytestconfig.getoption("thorough") else (10 * lasting, 20)
    chosen = dict(list(places.items())[first::step]) | ({} if lasting else {NESTED: places[NESTED]})
    for place, number in chosen.items():
        folder, notes = tmp_path / f"run-{number}", []
        with Faulty(folder, number, lasting=lasting).mounted():
            try:
                sessions.session(small, folder, notes)
            except (RuntimeError, ValueError, CacheError) as error:
                text = str(error)
                if str(folder) not in text or "Errno" in text or not text.endswith("."):
                    wrong.append((place, text))
        for run in find_runs(folder / "loras" / "runs"):
            if any(checkpoint.problem() for checkpoint in run.checkpoints()):
                wrong.append((place, "a save is damaged"))
        if sessions.essence(sessions.session(small, folder)) != whole:
            wrong.append((place, "another result"))
        if list(folder.rglob(".*.tmp")):
            wrong.append((place, "leftovers"))
        shutil.rmtree(folder)
    assert not wrong
