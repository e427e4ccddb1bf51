"""Remember the prompts in ComfyUI's queue that train, and offer those that the end of a ComfyUI cut off.

Each is a file for as long as it is in the queue. A lock tells which ComfyUI wrote it, so that one that still runs
keeps its own. ComfyUI's queue stays the only one: it is looked at, and the page queues again what a person wants.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import folder_paths
from aiohttp import web
from filelock import FileLock, Timeout
from server import PromptServer

import nodes as comfyui_nodes

from ...trainer_core.common.files import move, written_whole
from ...trainer_core.common.json_files import read_json
from ...trainer_core.common.leftovers import remove
from . import session
from .threads import Busy, in_thread

INTERVAL = 0.2  # seconds between two looks at the queue, while there is a prompt that trains
MOST, LARGEST = 100, 2**20  # prompts that are remembered; bytes of one with its workflow
EVENT = "atelier.pending"  # tells pages that another one has answered
TRAIN = "AtelierTrain"
NODE_KEYS = ("class_type", "inputs", "_meta")  # what a node of a prompt is queued with
SESSION = uuid.uuid4().hex  # begins the names of this ComfyUI's files


def folder() -> Path:
    """The folder of the prompts; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "queue"


# --- what is in the queue ----------------------------------------------------------------------------------


class _Watch:
    """Keeps a file of each prompt in the queue that trains; all of it happens in the server's loop."""

    def __init__(self) -> None:
        self._users: dict[str, str] = {}  # by prompt: who queued it, until it left the queue
        self._files: dict[str, Path] = {}
        self._task: asyncio.Task[None] | None = None
        self._count = 0

    def add(self, prompt: str, user: str) -> None:
        """Remember a prompt that was just queued, if it trains."""
        self._users[prompt] = user
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while self._users:
            users, queued = dict(self._users), {item[1]: item for item in itertools.chain(*_queue())}
            if session.closing():
                return
            with suppress(Busy):  # the next look takes them
                await in_thread(self._take, users, queued)
            await asyncio.sleep(INTERVAL)

    def _take(self, users: dict[str, str], queued: dict[str, Any]) -> None:
        for prompt, user in users.items():
            item, file = queued.get(prompt), self._files.get(prompt)
            if item is None:
                with suppress(PermissionError):  # open elsewhere on Windows: the next look tries again
                    if file is not None:
                        file.unlink(missing_ok=True)
                        del self._files[prompt]
                    del self._users[prompt]
            elif file is None and (len(self._files) >= MOST or not self._write(item, user)):
                del self._users[prompt]

    def _write(self, item: Any, user: str) -> bool:
        """Write a prompt that trains into a file; tell whether it was."""
        number, name, running, extra, outputs = item[:5]
        prompt = _as_queued(running)
        if not any(node["class_type"] == TRAIN for node in prompt.values()):
            return False
        workflow = (extra.get("extra_pnginfo") or {}).get("workflow")
        values = {"user": user, "number": number, "prompt": prompt, "workflow": workflow, "outputs": list(outputs)}
        try:
            text = json.dumps(values, allow_nan=False)
            if len(text) > LARGEST:
                return False
            _hold_lock()
            self._count += 1
            self._files[name] = folder() / f"{SESSION}-{self._count:06}.json"
            with written_whole(self._files[name]) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as problem:  # the run itself needs no such file
            logging.getLogger(__name__).warning("A queued run is not remembered for a restart: %s", problem)
            self._files.pop(name, None)
            return False
        _forget_same(user, prompt)
        return True


def _as_queued(prompt: dict[str, Any]) -> dict[str, Any]:
    """Give the nodes of a prompt without what ComfyUI notes in them while it runs, such as `is_changed`."""
    return {name: {key: node[key] for key in NODE_KEYS if key in node} for name, node in prompt.items()}


_watch = _Watch()
_lock: FileLock | None = None  # held until the process ends


def _hold_lock() -> None:
    """Tell other ComfyUIs that this one runs; raises OSError."""
    global _lock
    if _lock is None:
        folder().mkdir(parents=True, exist_ok=True)
        _lock = FileLock(folder() / f"{SESSION}.lock", thread_local=False)
        _lock.acquire()


def _queue() -> tuple[list[Any], list[Any]]:
    return PromptServer.instance.prompt_queue.get_current_queue_volatile()


def watch_queue() -> None:
    """Look at each prompt that is queued from now on; only while ComfyUI starts."""
    PromptServer.instance.app.middlewares.append(_notice)


@web.middleware
async def _notice(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    response = await handler(request)
    if request.method == "POST" and request.path.removeprefix("/api") == "/prompt" and response.status == 200:
        with suppress(ValueError, KeyError, TypeError):  # answered by another pack, or for a user that does not exist
            _watch.add(json.loads(response.body)["prompt_id"], user_of(request))
    return response


def user_of(request: web.Request) -> str:
    """Name the user of a request as ComfyUI does; raises KeyError for one that does not exist."""
    return PromptServer.instance.user_manager.get_request_user_id(request)


# --- what was cut off --------------------------------------------------------------------------------------


def cut_off(user: str) -> dict[str, dict[str, Any]]:
    """Read a user's prompts that were in the queue of a ComfyUI which has ended, in their order, by name."""
    found = {}
    for path in _left():
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or taken meanwhile
            values = read_json(path, 2 * LARGEST)
            if values["user"] == user and _is_prompt(values):
                found[path.stem] = values
    return dict(sorted(found.items(), key=lambda each: each[1]["number"]))


_looking = threading.Lock()  # one at a time, or each would take the other for a ComfyUI that still runs


def _left() -> list[Path]:
    """List the files of all ComfyUIs that have ended, and delete the locks of those that left none."""
    found = []
    with _looking:
        for lock in folder().glob("*.lock"):
            if lock.stem != SESSION:
                # Held by one that still runs; Windows deletes no lock that is held, and needs no deletion.
                with suppress(Timeout, PermissionError), FileLock(lock, timeout=0):
                    files = list(folder().glob(f"{lock.stem}-*.json"))
                    found += files
                    if not files:
                        lock.unlink(missing_ok=True)
    return sorted(found)[:MOST]


def _is_prompt(values: dict[str, Any]) -> bool:
    nodes = values["prompt"]
    return (
        isinstance(nodes, dict)
        and all(isinstance(each, dict) and isinstance(each.get("class_type"), str) for each in nodes.values())
        and isinstance(values["workflow"], dict | None)
        and isinstance(values["number"], int | float)
        and isinstance(values["outputs"], list)
    )


def describe(values: dict[str, Any]) -> dict[str, Any]:
    """Name the runs of a prompt, and the kinds of its nodes that are not installed any more."""
    nodes = values["prompt"].values()
    names = [inputs.get("name") for inputs in (each.get("inputs") for each in nodes if each["class_type"] == TRAIN)]
    missing = {each["class_type"] for each in nodes} - comfyui_nodes.NODE_CLASS_MAPPINGS.keys()
    return {"runs": [name[:100] if isinstance(name, str) else "LoRA" for name in names], "missing": sorted(missing)}


_taken: dict[str, str] = {}  # files that pages of this ComfyUI queue now -> their users


def take(user: str) -> dict[str, dict[str, Any]]:
    """Give out a user's prompts that can be queued again, each once; raises OSError.

    A file stays, as one of this ComfyUI, until it is dropped: if the page ends before it has queued the prompt, the
    next ComfyUI offers it again.
    """
    _hold_lock()
    found = {}
    for name, values in cut_off(user).items():
        own = folder() / f"{SESSION}-again-{uuid.uuid4().hex}.json"
        if not describe(values)["missing"]:
            with suppress(FileNotFoundError):  # another page was quicker
                move(folder() / f"{name}.json", own)
                _taken[own.stem] = user
                found[own.stem] = values
    return found


def drop(user: str, names: Collection[str]) -> None:
    """Forget some of a user's prompts: dismissed ones, and those that are in the queue again; raises OSError."""
    known = {name for name, owner in _taken.items() if owner == user} | cut_off(user).keys()
    for name in known & set(names):
        remove(folder() / f"{name}.json")
        _taken.pop(name, None)


def _forget_same(user: str, prompt: dict[str, Any]) -> None:
    """Offer no longer what a person has queued again by hand."""
    same: list[str] = []
    try:
        same = [name for name, values in cut_off(user).items() if values["prompt"] == prompt]
        drop(user, same)
    except OSError as problem:  # it is offered once more, and its run goes on from its last save
        logging.getLogger(__name__).warning("A run that was queued again stays on offer: %s", problem)
    if same:
        tell_pages()


def tell_pages() -> None:
    """Tell every page that what was cut off has changed."""
    PromptServer.instance.send_sync(EVENT, {})
