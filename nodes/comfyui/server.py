"""Add routes to ComfyUI's server, and read what it knows of a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from comfy.cli_args import args
from server import PromptServer

from ...trainer_core.common.wording import for_page


def add_route(path: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]], method: str = "POST") -> None:
    """Add a route to the server; only while ComfyUI starts."""
    PromptServer.instance.routes.route(method, path)(answer)


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
