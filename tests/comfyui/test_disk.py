"""What the page has written, on a disk that fails at any operation: a sentence, and nothing unfinished for good."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from run_folders import make_run

from lora_atelier.trainer_core.common.leftovers import sweep
from lora_atelier.trainer_core.runs import RunFolder

CHANGES = ("replace", "fsync", "mkdir", "unlink", "rmdir")


@contextmanager
def failing(root: Path, at: int) -> Iterator[list[str]]:
    """Let the operation of a number fail of those that change something below a folder; yield all so far."""
    seen: list[str] = []

    def faulty(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *given: Any, **named: Any) -> Any:
            mode = given[0] if given and isinstance(given[0], str) else named.get("mode", "r")
            writes = name != "open" or set("wax+") & set(mode)
            if writes and (isinstance(path, int) or str(path).startswith(str(root))):
                seen.append(name)
                if len(seen) == at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return function(path, *given, **named)

        return call

    with ExitStack() as stack:
        for place, name in [*((os, name) for name in CHANGES), (builtins, "open"), (io, "open")]:
            stack.enter_context(mock.patch.object(place, name, faulty(name, getattr(place, name))))
        yield seen


@pytest.fixture
def run(comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run, in a folder that holds all that the page has written."""
    from lora_atelier.nodes.comfyui import allowed, folders, server

    monkeypatch.setattr(folders, "lora_file", lambda name, folder: tmp_path / "loras" / f"{name}.safetensors")
    monkeypatch.setattr(folders, "embeddings_folder", lambda: tmp_path / "words")
    monkeypatch.setattr(folders, "shelves", lambda: [tmp_path / "loras"])
    monkeypatch.setattr(allowed, "list_file", lambda: tmp_path / "user" / "allowed.txt")
    monkeypatch.setattr(server, "announce_lora", lambda: None)
    monkeypatch.setattr(folders, "temp_folder", lambda: tmp_path)
    return make_run(tmp_path / "runs", "moss", saves=(2, 4), finished=4)


CHANGED = ["rename", "unname", "publish", "delete a save", "delete", "allow", "import"]


@pytest.mark.parametrize("change", CHANGED)
def test_a_disk_that_fails_at_any_write_of_the_page_gets_a_sentence(
    run: RunFolder, tmp_path: Path, change: str
) -> None:
    from lora_atelier.nodes import importing, routes, run_routes
    from lora_atelier.nodes.comfyui import server

    def delete(path: Path, **question: Any) -> dict[str, Any]:
        return run_routes.delete(path, {**question, "agreed": run_routes.delete(path, question)["bytes"]})

    works: dict[str, Callable[[Path], Any]] = {
        "rename": lambda path: run_routes.rename(path, {"title": "x"}),
        "unname": lambda path: run_routes.rename(path, {"title": ""}),
        "publish": lambda path: run_routes.publish(path, {"step": 2, "name": "x"}),
        "delete a save": lambda path: delete(path, steps=[2]),
        "delete": delete,
        "import": lambda _: importing._bring({"a.toml": b"[x]"}),
    }
    whole = tmp_path / "whole"
    shutil.copytree(run.path, whole)
    at, seen = 0, ["begun"]
    while at <= len(seen):
        at += 1
        shutil.rmtree(run.path, ignore_errors=True)
        for place in ("loras", "words", "user"):
            shutil.rmtree(tmp_path / place, ignore_errors=True)
        shutil.copytree(whole, run.path)
        if change == "unname":
            run.rename("before")
        with failing(tmp_path, at) as seen:
            if change == "allow":
                answer = server.answered(lambda: routes.answer_allow({"folder": str(whole)}))
            else:
                answer = server.answered(lambda: server.json_answer(works[change](run.path)))
        assert answer.status in (200, 409), (at, seen)
        assert answer.status == 200 or b'"error"' in answer.body
        sweep({path.parent for path in tmp_path.rglob(".*.tmp")})  # as the next run does
        assert not [*tmp_path.rglob(".*.tmp")], (at, seen)
    assert at > 1
