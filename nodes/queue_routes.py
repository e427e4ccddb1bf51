"""Answer the page's questions on runs that the end of ComfyUI cut off: which ones, queue them again, forget them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..trainer_core.common.disk_errors import describe_refusal
from .comfyui import pending, server

LARGEST = 2**16  # bytes of a question


def register_queue_routes() -> None:
    """Add the routes to the server, and remember what is queued from now on."""
    server.add_route("/atelier/pending", answering(listed), "GET")
    server.add_route("/atelier/pending/take", answering(taken))
    server.add_route("/atelier/pending/drop", answering(dropped))
    pending.watch_queue()


def answering(
    answer: Callable[[str, Any], dict[str, Any]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Make a route of the user that asks; pages of other sites are refused."""

    async def route(request: web.Request) -> web.Response:
        if request.method == "POST" and not 0 <= (request.content_length or -1) <= LARGEST:
            return server.json_answer({"error": f"The question is too long; send at most {LARGEST} bytes."}, status=413)
        try:
            user = pending.user_of(request)
            question = await request.json() if request.method == "POST" else None
        except (KeyError, ValueError, RecursionError):
            return server.json_answer({"error": "The question is not JSON, or its user does not exist."}, status=400)
        try:
            return server.json_answer(await asyncio.to_thread(answer, user, question))
        except ValueError as problem:
            return server.json_answer({"error": str(problem)}, status=400)
        except OSError as problem:
            return server.json_answer({"error": await asyncio.to_thread(describe_refusal, problem)}, status=409)

    return route


def listed(user: str, _: Any) -> dict[str, Any]:
    """Answer with {prompts: name, runs and missing kinds of nodes of each}."""
    found = pending.cut_off(user)
    return {"prompts": [{"name": name, **pending.describe(values)} for name, values in found.items()]}


def taken(user: str, _: Any) -> dict[str, Any]:
    """Answer with {prompts: name, prompt, workflow and outputs of each that can be queued}; no other page gets them."""
    found = pending.take(user)
    pending.tell_pages()
    parts = ("prompt", "workflow", "outputs")
    return {"prompts": [{"name": name, **{part: values[part] for part in parts}} for name, values in found.items()]}


def dropped(user: str, question: Any) -> dict[str, Any]:
    """Forget the prompts in {names}; answer with {}."""
    names = question.get("names") if isinstance(question, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names must be a list of names.")
    pending.drop(user, names)
    pending.tell_pages()
    return {}
