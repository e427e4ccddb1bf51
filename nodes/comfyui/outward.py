"""What a person switched on at this ComfyUI: services that hear of runs, and LoRAs that are published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from aiohttp import web
from server import PromptServer

from ...trainer_core.common.callbacks import Callbacks
from ...trainer_core.common.disk_errors import describe_refusal
from ...trainer_core.common.wording import for_page, say
from .askers import at_the_machine
from .server import Refused, json_answer

if TYPE_CHECKING:
    from ...trainer_core.outward import Outward

PATIENCE = 2.0  # seconds that the end of a run waits for each service
LOST = 3600.0  # seconds after which another try to publish does not wait for the one before
PUBLISHED_EVENT = "atelier.published"
_publishing: dict[str, dict[str, Any]] = {}  # by a run's folder: what is published of it, or has been last
_lock = threading.Lock()
changing = threading.Lock()  # one change of the settings at a time


def settings_file() -> Path:
    """The file of the settings, in a folder for its owner alone; ComfyUI serves nothing from there."""
    from ...trainer_core.outward.settings import FILE, FOLDER

    return Path(folder_paths.get_system_user_directory("atelier")) / FOLDER / FILE


def read() -> Outward:
    """Read the settings; raises ValueError for a damaged file."""
    from ...trainer_core.outward import read_outward  # here, so that ComfyUI starts fast

    return read_outward(settings_file())


def write(outward: Outward) -> None:
    """Write the settings."""
    from ...trainer_core.outward import write_outward

    write_outward(settings_file(), outward)


@contextmanager
def telling(callbacks: Callbacks, name: str) -> Iterator[Callbacks]:
    """Yield callbacks that also tell the services that are switched on; no workflow decides which."""
    from ...trainer_core.outward import Outward, build_senders
    from ...trainer_core.runs import news

    try:
        chosen = read()
    except ValueError as problem:
        callbacks.note(str(problem))
        chosen = Outward()
    senders = build_senders(chosen, settings_file().parent)
    with news.telling(callbacks, senders, name, PATIENCE, chosen.secrets) as told:
        yield told


def only_at_the_machine(request: web.Request) -> web.Response | None:
    """Refuse all but pages that were opened on the machine itself: what they change goes out in its owner's name."""
    if at_the_machine(request):
        return None
    sentence = say(
        "This can be done only on the machine that runs ComfyUI, at its address 127.0.0.1; elsewhere use a shell there."
    )
    return json_answer({"error": sentence}, status=403)


def publish_behind(run: str, call: Callable[[], str]) -> None:
    """Publish something of a run in a thread, and tell every page how it ended; call: returns the address.

    Raises Refused while an earlier try is at work.
    """
    with _lock:
        known = _publishing.get(run, {})
        if known.get("busy") and time.monotonic() - known["since"] < LOST:
            raise Refused(say("This run is being published already; wait until that ends."))
        mine = _publishing[run] = {"busy": True, "since": time.monotonic()}

    def work() -> None:
        try:
            mine["said"] = say("Published at {0}.", call())
        except ValueError as problem:
            mine["error"] = str(problem)
        except OSError as problem:
            mine["error"] = describe_refusal(problem)
        finally:
            mine["busy"] = False
        PromptServer.instance.send_sync(PUBLISHED_EVENT, for_page({"run": run, **published(run)}))

    threading.Thread(target=work, name="atelier-publish", daemon=True).start()


def published(run: str) -> dict[str, Any]:
    """Tell how publishing a run goes, or went: {busy}, with {said} or {error} at its end; {} if nobody tried."""
    known = _publishing.get(run, {})
    return {name: value for name, value in known.items() if name != "since"}
