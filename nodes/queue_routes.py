"""Answer the page's questions on runs that the end of ComfyUI cut off: which ones, queue them again, forget them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from .comfyui import pending, server


def register_queue_routes() -> None:
    """Add the routes to the server, and remember what is queued from now on."""
    server.add_route("/atelier/pending", lambda request: of_user(listed)(request, None))
    server.add_question("/atelier/pending/take", of_user(taken))
    server.add_question("/atelier/pending/drop", of_user(dropped))
    pending.watch_queue()


def of_user(answer: Callable[[str, Any], dict[str, Any]]) -> Callable[[web.Request, Any], web.Response]:
    """Make an answer to the user that asks."""

    def answer_user(request: web.Request, question: Any) -> web.Response:
        try:
            return server.json_answer(answer(pending.user_of(request), question))
        except (KeyError, ValueError) as problem:
            sentence = str(problem) if isinstance(problem, ValueError) else "There is no such user."
            return server.json_answer({"error": sentence}, status=400)

    return answer_user


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
