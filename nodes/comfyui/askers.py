"""Who may ask our routes: pages of this server; and who may change something: those that hold its token."""

from __future__ import annotations

import hmac
import ipaddress
import platform
import secrets

from aiohttp import HttpVersion11, web
from yarl import URL

TOKEN = secrets.token_urlsafe(24)  # of this process; no other site can read it
HEADER = "Atelier-Token"
# How the names of headers begin that proxies add.
PROXIES = ("forwarded", "via", "x-forwarded", "x-real-ip", "x-client-ip", "true-client-ip", "cf-", "tailscale-")
# Names that only a network gives: of RFC 6762 and 8375, of ICANN for private use, and of usual routers.
OWN_NETWORK = (".local", ".lan", ".home", ".home.arpa", ".internal", ".localdomain", ".intranet", ".fritz.box")


def of_this_site(request: web.Request) -> bool:
    """Tell whether a request comes from a page of this server, or from no page; browsers name other sites' pages.

    A page of another site may lead its own name to this machine. So whose browser asks at the machine has to name it by
    its own name, and in its network by an address or a name that nobody can own elsewhere.
    """
    if is_direct(request) and request.scheme == "http":  # to a wrong name no page gets a certificate
        name = _host_of(request)
        if not (is_local(name) if is_local(request.remote) else is_unowned(name) or not _is_near(request.remote)):
            return False
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:  # behind a proxy the server does not know its own name
        return site in ("same-origin", "none")
    return origin is None or _is_own(origin, request)


def of_a_page(request: web.Request) -> bool:
    """Tell whether a request comes from a page of this server for sure: browsers say so whenever a page posts."""
    return of_this_site(request) and "Origin" in request.headers


def holds_token(request: web.Request) -> bool:
    """Tell whether a request has the token of this process, which `of_a_page` gets."""
    return hmac.compare_digest(request.headers.get(HEADER, "").encode("utf-8", "replace"), TOKEN.encode())


def at_the_machine(request: web.Request) -> bool:
    """Tell whether a request comes from a page that was opened on the machine itself, by its local address.

    The name in the address counts as well: so no other site can ask in its place, whatever its name leads to.
    """
    same = request.headers.get("Sec-Fetch-Site") == "same-origin"  # browsers send no Origin when a page only reads
    if "Origin" in request.headers:
        same = request.headers["Origin"] == f"{request.scheme}://{request.host}"
    return same and is_direct(request) and is_local(request.remote) and is_local(_host_of(request))


def is_direct(request: web.Request) -> bool:
    """Tell whether a browser sent a request itself; a proxy may pass on whatever its client makes up.

    Every browser asks to keep the connection. That word is for the next hop alone: proxies send one of their own, which
    is another one, as those do that say nothing else of themselves.
    """
    passed_on = any(name.lower().startswith(PROXIES) for name in request.headers)
    kept = request.headers.get("Connection", "").lower() == "keep-alive"
    return request.version == HttpVersion11 and kept and not passed_on


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


def is_unowned(host: str) -> bool:
    """Tell whether no other site can have a name: an address, one without a dot, this machine's own, a network's."""
    name = host.lower().rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(OWN_NETWORK) or is_local(name)
    return True


def address_of(request: web.Request) -> str:
    """Give the address and port at which a request has reached this machine."""
    address = request.transport.get_extra_info("sockname") if request.transport else None
    host, port = (address or ("127.0.0.1", ""))[:2]
    return str(URL.build(authority=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")).removeprefix("//")


def _is_near(peer: str | None) -> bool:
    """Tell whether an address is of a private network, where alone a page of another site asks in a browser's place."""
    try:
        return ipaddress.ip_address(peer or "").is_private
    except ValueError:
        return False


def _host_of(request: web.Request) -> str:
    """Read the name that a request gives to the server; "" for what is no name."""
    try:
        return URL(f"//{request.host}").host or ""
    except ValueError:
        return ""


def _is_own(origin: str, request: web.Request) -> bool:
    return origin.partition("://")[2] == request.host
