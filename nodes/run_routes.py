"""Answer the page of runs: the list, one run with its pictures and its workflow, and what people do with a run.

A run's folder may be a stranger's. Names in questions are compared with those of folders and saves, and are never part
of a path; answers are bounded, and hold no path of the machine.
"""

from __future__ import annotations

import asyncio
import functools
import io
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from PIL import Image

from ..trainer_core.common.sample_names import FORMATS
from ..trainer_core.common.values import is_count
from ..trainer_core.common.wording import bytes_of, say
from ..trainer_core.config import plain_folder, plain_name
from ..trainer_core.workflow.settings import split_name
from .comfyui import folders, server
from .comfyui.server import Refused
from .comfyui.session import NO_PROMPTS
from .comfyui.threads import in_thread

MOST_RUNS = 5000  # in a list
MOST_STEPS = 10_000  # saves in a question
MOST_KEPT = 20  # copies that a question names
SIDE = 128  # pixels: the longest side of a thumbnail
BLOCK = 2**20  # bytes of a zip that are sent at once
LARGEST_SAMPLE, MOST_PIXELS = 2**26, 2**25  # bytes and pixels of a sample
SOON = 5.0  # seconds to wait for another change
_changing = threading.Lock()  # one change at a time
_packing = asyncio.Semaphore(2)  # zips that are made or sent
_drawing = threading.BoundedSemaphore(4)  # samples that are in memory at once


def register_run_routes() -> None:
    """Add the routes to the server."""
    server.add_route("/atelier/runs", answer_runs)
    server.add_route("/atelier/runs/{run}", on_a_run(detail))
    server.add_route("/atelier/runs/{run}/live", on_a_run(live))
    server.add_route("/atelier/runs/{run}/workflow", on_a_run(workflow))
    server.add_route("/atelier/runs/{run}/thumbnail", on_a_run(thumbnail))
    server.add_download("/atelier/runs/{run}/export/{step}", answer_export)
    server.add_question("/atelier/runs/ask", changing(ask))
    server.add_question("/atelier/runs/rename", changing(rename))
    server.add_question("/atelier/runs/publish", changing(publish))
    server.add_question("/atelier/runs/delete", changing(delete))


def on_a_run(answer: Callable[[Path, web.Request], web.Response]) -> Callable[[web.Request], web.Response]:
    """Make a route that answers about the run that the address names."""
    return lambda request: answer(find_run(request.match_info["run"]), request)


def changing(change: Callable[[Path, dict[str, Any]], Any]) -> Callable[[web.Request, Any], web.Response]:
    """Make a route that changes the run that a question names, one at a time."""

    def answer(_: web.Request, question: Any) -> web.Response:
        if not isinstance(question, dict) or not isinstance(question.get("run"), str):
            raise Refused("The question is no JSON object that names a run.", 400)
        if not _changing.acquire(timeout=SOON):  # not for ever: whoever waits holds a thread
            raise Refused(say("Another run is being changed; try again after that."), 503)
        try:
            return server.json_answer(change(find_run(question["run"]), question))
        finally:
            _changing.release()

    return answer


def find_run(name: str) -> Path:
    """Find the run whose folder has a name."""
    from ..trainer_core.runs import run_paths  # here, so that ComfyUI starts fast

    for path in run_paths(folders.runs_folder()):
        if path.name == name:
            return path
    raise Refused(say("There is no such run; it may have been deleted."), 404)


# --- what is shown -----------------------------------------------------------------------------------------


def answer_runs(_: web.Request) -> web.Response:
    """Answer with {runs: what is known of each, the one that changed last first, more: how many are left out}."""
    return server.json_answer(listed())


def listed() -> dict[str, Any]:
    """Describe all runs; a run that did not change is not read again."""
    from ..trainer_core.runs import run_paths, signature  # here, so that ComfyUI starts fast

    shelves, paths = tuple(folders.shelves()), run_paths(folders.runs_folder())
    found = []
    for path in paths[:MOST_RUNS]:
        known = signature(path)
        read = _described if known is None else _remembered
        found.append(read(path, shelves, known))
    return {"runs": sorted(found, key=lambda run: (-run["changed"], run["run"])), "more": len(paths) - len(found)}


def _described(path: Path, shelves: tuple[Path, ...], _: object) -> dict[str, Any]:
    from ..trainer_core.runs import describe

    # Of what a run has many, the list tells how many; the page of one run has them all.
    return {name: len(value) if isinstance(value, list) else value for name, value in describe(path, shelves).items()}


_remembered = functools.lru_cache(maxsize=MOST_RUNS)(_described)


def detail(path: Path, request: web.Request) -> web.Response:
    """Answer with the description of a run, its settings, samples, saves, files and curves."""
    from ..trainer_core.runs import describe_in_detail

    return server.json_answer(describe_in_detail(path, folders.shelves()))


def live(path: Path, request: web.Request) -> web.Response:
    """Answer with what `follow` tells of a run; seen: the bytes of its log that the page knows of."""
    from ..trainer_core.runs.follow import follow

    seen = request.query.get("seen", "0")
    if not (seen.isdecimal() and len(seen) <= 15):
        raise Refused("seen must be a number of bytes.", 400)
    _refuse_link(path)
    return server.json_answer(follow(path, int(seen)))


def workflow(path: Path, request: web.Request) -> web.Response:
    """Answer with {workflow: the one that trained the run}."""
    found = opened(path).workflow()
    if found is None:
        raise Refused(say("This run keeps no workflow."), 404)
    return server.json_answer({"workflow": found})


def thumbnail(path: Path, request: web.Request) -> web.Response:
    """Answer with a small picture of a run's last sample, drawn anew: no byte of its file gets into a page."""
    from ..trainer_core.data.images import DECODER_ERRORS
    from ..trainer_core.runs import thumbnail_of

    file = thumbnail_of(opened(path))
    if file is None:
        raise Refused("This run has no samples.", 404)
    changed, known = int(file.stat().st_mtime), request.if_modified_since
    if known is not None and changed <= known.timestamp():
        return web.Response(status=304)
    try:
        picture = drawn_small(file)
    except DECODER_ERRORS as problem:
        raise Refused(f"{file.name} is no picture that can be shown.", 415) from problem
    answer = web.Response(body=picture, content_type="image/webp", headers={"Cache-Control": "no-cache"})
    answer.last_modified = changed
    return answer


def drawn_small(file: Path) -> bytes:
    """Draw a sample, of a clip its first frame, in at most SIDE x SIDE pixels as WebP; raises DECODER_ERRORS."""
    with _drawing, Image.open(file, formats=FORMATS) as picture:
        if file.stat().st_size > LARGEST_SAMPLE or picture.width * picture.height > MOST_PIXELS:
            raise ValueError("too large")
        small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    small.save(data, format="WEBP", quality=85)
    return data.getvalue()


async def answer_export(request: web.Request) -> web.StreamResponse:
    """Answer with a zip of a run's LoRA, settings and samples; step: of the save, or "last"."""
    if _packing.locked():
        return server.json_answer({"error": say("Two runs are being packed; download after that.")}, status=503)
    async with _packing:
        with tempfile.TemporaryFile(dir=folders.temp_folder()) as file:
            answer = await in_thread(server.answered, lambda: _pack(request, file))
            if answer.status != 200:
                return answer
            response = web.StreamResponse(headers=answer.headers)
            response.content_length = file.seek(0, io.SEEK_END)
            file.seek(0)
            with suppress(ConnectionError):  # the client has gone
                await response.prepare(request)
                while block := await in_thread(file.read, BLOCK):
                    await response.write(block)
            return response


def _pack(request: web.Request, file: Any) -> web.Response:
    from ..trainer_core.runs.export import save_to_export, write_archive

    run, step = opened(find_run(request.match_info["run"])), request.match_info["step"]
    if step != "last" and not (step.isdecimal() and len(step) <= 12):
        raise Refused("step must be a number, or last.", 400)
    name = write_archive(run, save_to_export(run, None if step == "last" else int(step)), file)
    headers = {"Content-Disposition": f'attachment; filename="{name}.zip"', "Content-Type": "application/zip"}
    return web.Response(headers=headers)


# --- what people do ----------------------------------------------------------------------------------------


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Ask {run, what: a word of SAID} of the process that trains the run, whichever it is, and say what it will do."""
    from ..trainer_core.runs import asked

    what, run = question.get("what"), opened(path)
    if not isinstance(what, str) or what not in asked.SAID:
        raise Refused(f"what must be one of {', '.join(asked.SAID)}.", 400)
    if not run.at_work():
        raise Refused(say("No process trains {0} now; it may have just ended.", run.title() or run.about["name"]))
    sample = run.about["config"].get("sample")
    if what == "sample" and not (isinstance(sample, dict) and sample.get("prompts")):
        raise Refused(NO_PROMPTS)
    asked.ask(path, what)
    return {"said": asked.SAID[what]}


def rename(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Give a run the title in {run, title}, "" for none, and say so."""
    if not isinstance(title := question.get("title"), str):
        raise Refused("title must be a text.", 400)
    run = opened(path)
    run.rename(title)
    return {"said": say("The run is called {0} now.", run.title() or run.about["name"]), "title": run.title()}


def publish(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Copy the LoRA of the save in {run, step, name} into models/loras, and say where; name may hold folders."""
    from ..trainer_core.runs.export import export_save, save_to_export
    from ..trainer_core.runs.publish import remember_copies

    step, name = step_of(question.get("step")), question.get("name")
    if not isinstance(name, str):
        raise Refused("name must be a text.", 400)
    parts = split_name(name)
    name, folder = plain_name(parts["file_name"]), plain_folder(parts["folder"])
    to = folders.lora_file(name, folder, "write another folder into its name")
    run = opened(path)
    copies = export_save(run, save_to_export(run, step), to, folders.embeddings_folder())
    remember_copies(run, copies)
    server.announce_lora()
    return {"said": say("Saved in models/loras: {0}.", ", ".join(copy.name for copy in copies))}


def delete(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Delete the saves of the steps in {run, steps, agreed}, or the whole run without steps.

    agreed: the bytes that a person has been told; without it, or where they changed, nothing is deleted, and the answer
    is {bytes: to agree to, kept: copies of it in other folders, newest: whether its newest save goes, left: the step
    that it then resumes after}.
    """
    from ..trainer_core.runs.clean import delete_run, delete_saves, saves_of, size_of
    from ..trainer_core.runs.folder import RunFolder

    steps = question.get("steps")
    if steps is not None and not (isinstance(steps, list) and 0 < len(steps) <= MOST_STEPS):
        raise Refused("steps must be a list of saves, or null for the whole run.", 400)
    _refuse_link(path)
    if RunFolder(path=path, about={}).at_work():
        raise Refused(say("This run is in training; delete it after that."))
    run = None if steps is None else opened(path)
    doomed = [] if run is None else saves_of(run, [step_of(step) for step in steps or ()])
    size = size_of(path) if run is None else sum(each.size for each in doomed)
    if question.get("agreed") != size:
        return {"bytes": size, "kept": _kept(path), **_rest(run, {each.path for each in doomed})}
    if run is None:
        delete_run(path)
    else:
        delete_saves(run, [step_of(step) for step in steps or ()])
    return {"said": say("Deleted; {0} are free again.", bytes_of(size))}


def _kept(path: Path) -> list[str]:
    """List the copies of a run's files in ComfyUI's folders of LoRAs and embeddings that are still there."""
    from ..trainer_core.runs.catalogue import published_files, relative_name
    from ..trainer_core.runs.folder import RunFolder

    shelves = folders.shelves()
    files = map(Path, published_files(RunFolder(path=path, about={})))
    ours = (file for file in files if any(file.is_relative_to(shelf) for shelf in shelves))
    return [relative_name(file, shelves) for file in ours if file.is_file()][:MOST_KEPT]


def _rest(run: Any, doomed: set[Path]) -> dict[str, Any]:
    """Describe what a run keeps without some of its saves; run: None where all of it goes."""
    if run is None or run.saves()[0] not in doomed:
        return {"newest": False, "left": None}
    left = [checkpoint.step for checkpoint in run.checkpoints() if checkpoint.path not in doomed]
    return {"newest": True, "left": left[0] if left else None}


def opened(path: Path) -> Any:
    """Open the run in a folder; a link to another folder is refused."""
    from ..trainer_core.runs import open_run

    _refuse_link(path)
    return open_run(path)


def _refuse_link(path: Path) -> None:
    from ..trainer_core.runs.folder import is_elsewhere

    if is_elsewhere(path, path.parent):
        raise Refused(f"{path.name} is a link to another folder; nothing is done there.")


def step_of(step: Any) -> int:
    if not is_count(step):
        raise Refused("step must be the step of a save.", 400)
    return step
