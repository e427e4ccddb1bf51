"""Add routes to ComfyUI's server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from server import PromptServer


def add_route(path: str, answer: Callable[[web.Request], Awaitable[web.Response]], method: str = "POST") -> None:
    """Add a route to the server; only while ComfyUI starts."""
    PromptServer.instance.routes.route(method, path)(answer)
