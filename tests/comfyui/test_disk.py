"""What the page has written, on a disk that fails at any operation: a sentence, and nothing unfinished for good."""

from __future__ import annotations

import base64
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
from PIL import Image
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

    monkeypatch.setattr(folders, "lora_file", lambda name, *_: tmp_path / "loras" / f"{name}.safetensors")
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


def png(level: int) -> str:
    data = io.BytesIO()
    Image.new("L", (8, 6), level).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.parametrize("change", ["new folder", "mask", "earlier mask", "settings", "caption", "undo", "redo"])
def test_a_full_disk_at_any_write_leaves_pictures_masks_and_captions_whole(
    comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What is there is as before or as asked for, and the same question again does what it says."""
    import folder_paths
    from aiohttp import web

    from lora_atelier.nodes import picture_routes, routes
    from lora_atelier.nodes.comfyui import folders, server
    from lora_atelier.trainer_core.data.edits import Journal, Rewritten, content_of, fingerprint_of

    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path / "input"))
    monkeypatch.setattr(folders, "earlier_folder", lambda: tmp_path / "earlier")
    folder = tmp_path / "input" / "cats"
    picture, mask, text = folder / "a.png", folder / "a-masklabel.png", folder / "a.txt"
    journal = Journal(tmp_path / "journal")

    def digest() -> str:
        return picture_routes.look_at({"folder": "cats", "picture": "a.png"}, picture)["mask"]

    def turn(way: str) -> None:
        change = journal.last([folder]) if way == "undo" else journal.next([folder])
        if change is not None:
            getattr(journal, way)([folder], change["number"], {})

    def caption(words: bytes) -> None:
        journal.write([Rewritten(text, words, fingerprint_of(content_of(text)))], "text", [folder])

    works: dict[str, Callable[[], Any]] = {
        "new folder": lambda: routes.answer_new({"name": "dogs", "files": ["a.png"]}),
        "mask": lambda: picture_routes.keep_mask({"mask": png(9), "was": digest()}, picture),
        "earlier mask": lambda: picture_routes.undo_mask({"was": digest()}, picture),
        "settings": lambda: picture_routes.set_own(
            {
                "pictures": {"a.png": {"repeats": 3}},
                "read": picture_routes.look_at({"folder": "cats", "picture": "a.png"}, picture)["read"],
            },
            folder,
        ),
        "caption": lambda: caption(b"new"),
        "undo": lambda: turn("undo"),
        "redo": lambda: turn("redo"),
    }

    def asked() -> web.Response:
        def answer() -> web.Response:
            found = works[change]()
            return found if isinstance(found, web.Response) else server.json_answer(found or {})

        return server.answered(answer)

    def state() -> dict[str, bytes]:
        inside = (tmp_path / "input").rglob("*")
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in inside if path.is_file()}

    def begin() -> None:
        for place in ("input", "earlier", "journal"):
            shutil.rmtree(tmp_path / place, ignore_errors=True)
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 6), 7).save(picture)
        for level in (1, 2):
            picture_routes.keep_mask({"mask": png(level), "was": digest() if mask.exists() else ""}, picture)
        caption(b"old")
        caption(b"older")
        if change == "redo":
            turn("undo")

    begin()
    before = state()
    asked()
    after, at, seen = state(), 0, ["begun"]
    assert (after == before) == (change == "new folder")
    while at <= len(seen):
        at += 1
        begin()
        with failing(tmp_path, at) as seen:
            answer = asked()
        assert answer.status == 200 or (answer.status == 409 and b'"error"' in answer.body), (at, seen)
        left = {name: content for name, content in state().items() if not name.endswith(".tmp")}
        assert left in (before, after), (at, seen)
        if change == "settings" and left == after:
            shown = picture_routes.look_at({"folder": "cats", "picture": "a.png"}, picture)
            assert shown["before"] == {}, f"what is written cannot be undone {(at, seen)}"
        if left == before:
            assert asked().status == 200
            assert {name: content for name, content in state().items() if not name.endswith(".tmp")} == after, (
                at,
                seen,
            )
    assert at > (1 if change == "new folder" else 4)
