"""Add routes to ComfyUI's server, and read what it knows of a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web
from comfy.cli_args import args
from server import PromptServer

from ...insides import missing_in_comfyui
from ...trainer_core.common.disk_errors import describe_refusal
from ...trainer_core.common.wording import for_page, printable, say
from . import askers
from .threads import Busy, in_thread

LARGEST = 2**16  # bytes of a question
MOST_HELD = 2**28  # bytes of the questions that are read and answered at once
PATIENCE = 60.0  # seconds for which a page waits; the work goes on, and who asks the same again waits for it
Answer = Callable[[web.Request], web.Response]
_held = 0  # of those; of the server's loop
_asked: dict[tuple[object, ...], asyncio.Task[web.Response]] = {}  # what is being answered; of the server's loop


class Refused(Exception):
    """A question that gets a sentence, and the status of the answer."""

    def __init__(self, sentence: str, status: int = 409) -> None:
        super().__init__(sentence)
        self.status = status


def add_route(path: str, answer: Answer) -> None:
    """Add a route that answers a page of this ComfyUI, in a thread; only while ComfyUI starts."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        return refusal(request) or await _answer(request, b"", partial(answer, request))

    PromptServer.instance.routes.get(path)(guarded)


def add_download(path: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
    """Add a route that sends a page of this ComfyUI what is not held in memory; only while ComfyUI starts."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        return refusal(request) or await answer(request)

    PromptServer.instance.routes.get(path)(guarded)


def add_question(
    path: str,
    answer: Callable[[web.Request, Any], web.Response],
    largest: int = LARGEST,
    may_ask: Callable[[web.Request], web.Response | None] = lambda _: None,
) -> None:
    """Add a route that answers a question in JSON of a page that holds the token; only while ComfyUI starts.

    largest: bytes of the question. may_ask: refuses more askers than others do.
    """

    async def guarded(request: web.Request) -> web.StreamResponse:
        if refused := refusal(request) or _without_token(request) or may_ask(request):
            return refused
        length = request.content_length
        if length is None or length > largest:
            return json_answer({"error": f"The question is too long; send at most {largest} bytes."}, status=413)
        return await _in_turn(length, partial(read_and_answered, request))

    async def read_and_answered(request: web.Request) -> web.StreamResponse:
        try:
            text = await request.read()
        except ConnectionError:  # the client has gone
            return web.Response(status=400)
        return await _answer(request, text, lambda: answer(request, _parsed(text)))

    PromptServer.instance.routes.post(path)(guarded)


def add_token_route() -> None:
    """Let pages of this server have its token; only while ComfyUI starts."""

    async def answer(request: web.Request) -> web.StreamResponse:
        refused = refusal(request)
        if refused is None and not askers.of_a_page(request):
            refused = json_answer({"error": "Only a page of this ComfyUI gets the token."}, status=403)
        return refused or json_answer({"token": askers.TOKEN})

    PromptServer.instance.routes.post("/atelier/token")(answer)


def refusal(request: web.Request) -> web.Response | None:
    """Refuse a request that comes from no page of this ComfyUI."""
    plain = request.method == "GET" or not request.can_read_body or request.content_type == "application/json"
    if plain and askers.of_this_site(request):  # a page of another site posts no JSON without asking
        return None
    sentence = say(
        "LoRA Atelier answers no page at {0}, as another site may lead that name here; open ComfyUI by its machine's "
        "IP address, such as http://{1}.",
        printable(request.host[:80]),
        askers.address_of(request),
    )
    return json_answer({"error": sentence}, status=403)


def _without_token(request: web.Request) -> web.Response | None:
    if askers.holds_token(request):
        return None
    return json_answer({"error": say("ComfyUI has started again since this page was opened; reload the page.")}, 403)


async def _answer(request: web.Request, text: bytes, answer: Callable[[], web.Response]) -> web.Response:
    """Answer in a thread of the pack; who asks what is being answered gets that answer, and none is begun twice."""
    cases = (request.headers.get(name) for name in ("Comfy-User", "If-Modified-Since"))
    key = (request.method, request.path_qs, askers.at_the_machine(request), *cases, text)
    task = _asked.get(key)
    if task is None:
        task = _asked[key] = asyncio.ensure_future(in_thread(answered, answer))
        task.add_done_callback(lambda _: _asked.pop(key, None))
    await asyncio.wait([task], timeout=PATIENCE)  # which leaves it at work where nobody waits any more
    if not task.done():
        return json_answer({"error": say("This takes long and goes on; ask again in a minute.")}, status=504)
    try:
        found = task.result()
    except Busy:
        return _busy()
    return web.Response(body=found.body, status=found.status, headers=found.headers)  # each is sent once


def _parsed(text: bytes) -> Any:
    """Parse a question; in a thread, as a large one would keep the server's loop."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:  # neither text nor JSON
        raise Refused("The question is not JSON.", 400) from problem


async def _in_turn(length: int, answer: Callable[[], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Answer a question of so many bytes, unless those at work hold as many as may lie in memory."""
    global _held
    if _held + length > MOST_HELD:
        return _busy()
    _held += length
    try:
        return await answer()
    finally:
        _held -= length


def _busy() -> web.Response:
    return json_answer({"error": say("LoRA Atelier answers too many questions now; ask again later.")}, status=503)


def answered(answer: Callable[[], web.Response]) -> web.Response:
    """Call a function; what it refuses, and what the disk does, becomes {error: a sentence}."""
    try:
        return answer()
    except Refused as refusal:
        return json_answer({"error": str(refusal)}, status=refusal.status)
    except (ValueError, RuntimeError) as problem:
        return json_answer({"error": str(problem)}, status=409)
    except OSError as problem:
        return json_answer({"error": describe_refusal(problem)}, status=409)
    except (AttributeError, ImportError) as problem:
        if sentence := missing_in_comfyui(problem):
            return json_answer({"error": sentence}, status=409)
        raise


def json_answer(values: Any, status: int = 200) -> web.Response:
    """Answer a page in JSON; sentences can be said in its language."""
    return web.json_response(for_page(values), status=status)


def announce_lora() -> None:
    """Tell every open page of a new LoRA, so that it reads its lists again."""
    PromptServer.instance.send_sync("atelier.lora_saved", {})


def workflow_of(extra: Any) -> dict[str, Any] | None:
    """Find the workflow of a prompt; None from a script, and where ComfyUI keeps none in files (--disable-metadata)."""
    workflow = extra.get("workflow") if isinstance(extra, dict) and not args.disable_metadata else None
    return workflow if isinstance(workflow, dict) else None
