"""Add routes to ComfyUI's server, and read what it knows of a prompt."""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from comfy.cli_args import args
from server import PromptServer

from ...trainer_core.common.wording import for_page

PROXIES = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")  # what they add to a request
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_route(path: str, answer: Answer, method: str = "POST") -> None:
    """Add a route that answers no page of another site; only while ComfyUI starts."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        plain = request.method == "GET" or not request.can_read_body or request.content_type == "application/json"
        if plain and _of_this_site(request):  # a page of another site posts no JSON without asking
            return await answer(request)
        sentence = "Only a page of this ComfyUI may do this; on the machine itself open it at 127.0.0.1 or localhost."
        return json_answer({"error": sentence}, status=403)

    PromptServer.instance.routes.route(method, path)(guarded)


def _of_this_site(request: web.Request) -> bool:
    """Tell whether a request comes from a page of this server, or from no page; browsers name other sites' pages.

    A page of another site may lead its own name to this machine. So who asks at the machine names it by its own name.
    """
    if is_local(request.remote) and not forwarded(request) and not is_local(request.url.host):
        return False
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:  # behind a proxy the server does not know its own name
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == request.host


def forwarded(request: web.Request) -> bool:
    """Tell whether a proxy has passed a request on."""
    return any(name in request.headers for name in PROXIES)


def is_local(host: str | None) -> bool:
    """Tell whether an address, or a name that no other site can have, is this machine's own."""
    name = (host or "").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if name and name in (own := platform.node().lower(), f"{own.partition('.')[0]}.local"):
        return True
    try:
        address = ipaddress.ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:  # another name
        return False


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
