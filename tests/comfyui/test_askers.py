"""Who may ask the server: pages of its own, as browsers and the usual proxies pass them on; and how much at once."""

import asyncio
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from run_folders import make_run

from comfy_client import ComfyClient, ComfyServer, answer_of, free_port, send
from lora_atelier.dev import ROOT
from lora_atelier.trainer_core.common.files import remove_folder

Result = TypeVar("Result")
ROUTE = re.compile(r'add_(route|download|question)\("(/[^"]+)"')
ELSEWHERE: list[dict[str, str | None]] = [
    {"Origin": "http://elsewhere.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Origin": None},
    {"Sec-Fetch-Site": "same-site", "Origin": None},
    {"Origin": "http://elsewhere.example", "Host": "elsewhere.example"},  # whose name leads here
    {"Sec-Fetch-Site": "same-origin", "Host": "elsewhere.example", "Origin": None},
]
# What a proxy on the machine sends in place of its client's words; its client makes up all others as it likes.
PASSED_ON: dict[str, dict[str, str | None]] = {
    "nginx": {"version": "1.0", "Connection": "close"},
    "nginx with HTTP 1.1": {"Connection": "close"},
    "nginx for websockets": {"Connection": "upgrade"},
    "HAProxy, newest nginx": {"Connection": None},
    "Apache": {"X-Forwarded-For": "203.0.113.7"},
    "Squid": {"Via": "1.1 squid"},
    "Cloudflare": {"CF-Connecting-IP": "203.0.113.7"},
    "RFC 7239": {"Forwarded": "for=203.0.113.7"},
}


def test_no_route_answers_a_page_of_another_site(comfy: ComfyClient) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "nodes").rglob("*.py")]
    routes = sorted({(route, kind) for text in texts for kind, route in ROUTE.findall(text)})
    assert len(routes) > 25 and {("/atelier/kept/clear", "question"), ("/atelier/runs", "route")} <= {*routes}
    asked = [(re.sub(r"{\w+}", "x", route), {} if kind == "question" else None) for route, kind in routes]
    for headers in ELSEWHERE:
        answered = [path for path, question in asked if send(comfy, path, question, **headers)[0] != 403]
        assert answered == [], headers
        assert send(comfy, "/atelier/token", {}, **headers)[0] == 403
    status, answer = send(comfy, "/atelier/runs", Host="elsewhere.example", Origin="http://elsewhere.example")
    assert status == 403 and f"such as {comfy.url}." in answer["error"]


@pytest.mark.parametrize(
    ("host", "peer", "answered"),
    [
        ("192.168.0.2:8188", "192.168.0.9", True),
        ("[fe80::2]:8188", "fe80::9", True),
        ("studio:8188", "192.168.0.9", True),
        ("studio.fritz.box:8188", "192.168.0.9", True),
        ("elsewhere.example:8188", "192.168.0.9", False),
        ("elsewhere.example:8188", "::ffff:192.168.0.9", False),
        ("192.168.0.2.elsewhere.example:8188", "10.0.0.9", False),
        ("lan.elsewhere.example:8188", "10.0.0.9", False),
        ("comfy.example", "1.2.3.4", True),  # a server in the open, whose owner chose its name
    ],
)
def test_in_a_network_the_name_is_one_that_no_other_site_can_have(
    comfy_modules: ModuleType, host: str, peer: str, answered: bool
) -> None:
    from lora_atelier.nodes.comfyui import askers

    def request(connection: str) -> web.Request:
        page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin", "Connection": connection}
        transport = Mock(get_extra_info={"peername": (peer, 1)}.get)
        return make_mocked_request("GET", "/", headers=page, transport=transport)

    assert askers.of_this_site(request("keep-alive")) is answered
    assert askers.of_this_site(request("close"))  # of a proxy


def test_a_question_needs_the_token_that_only_a_page_gets(comfy: ComfyClient) -> None:
    for token in (None, "", "x" * 32, comfy.token()[:-1], "\u00ff"):
        status, answer = send(comfy, "/atelier/kept/clear", {}, **{"Atelier-Token": token})
        assert status == 403 and "reload the page" in answer["error"]
    assert send(comfy, "/atelier/token", {}, Origin=None)[0] == 403  # of no page
    assert send(comfy, "/atelier/kept", Origin=None)[0] == 200


@pytest.mark.parametrize("proxy", PASSED_ON)
def test_a_proxys_client_reads_and_asks_but_allows_no_folder(comfy: ComfyClient, tmp_path: Path, proxy: str) -> None:
    """Whatever it says: it names the server by its local name, as the proxy does itself."""
    passed = PASSED_ON[proxy]
    for more in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-origin", "Origin": None}):
        assert send(comfy, "/atelier/folders/allow", {"folder": str(tmp_path)}, **passed, **more)[0] == 403
        assert not send(comfy, "/atelier/folders", **passed, **more)[1]["may_change"]
    named = {"Host": "lora.example", "Origin": "http://lora.example"}  # as a proxy that keeps the name
    assert send(comfy, "/atelier/folders/check", {"folders": []}, **passed, **named) == (200, {"unknown": []})
    assert send(comfy, "/atelier/folders/allow", {"folder": str(tmp_path)}, **passed, **named)[0] == 403


def test_a_browser_at_the_machine_may_allow_folders(comfy: ComfyClient) -> None:
    assert send(comfy, "/atelier/folders")[1]["may_change"]
    assert send(comfy, "/atelier/folders", **{"Origin": None, "Sec-Fetch-Site": "same-origin"})[1]["may_change"]
    assert send(comfy, "/atelier/folders/forget", {"folder": 5})[0] == 400  # no name


NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error; user root;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {server}; {more} }} }}
}}
"""


@pytest.mark.nginx
@pytest.mark.parametrize(
    "more",
    [
        "",
        "proxy_set_header Host $http_host;",
        "proxy_http_version 1.1;",
        'proxy_http_version 1.1; proxy_set_header Connection "";',
        'proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";',
        "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
    ],
)
@pytest.mark.parametrize("started", [(), ("--enable-cors-header", "*"), ("--listen",)], ids=str)
def test_a_client_of_a_real_nginx_allows_no_folder(
    start_comfy: Callable[..., ComfyServer],
    servers: dict[tuple[str, ...], ComfyServer],
    pytestconfig: pytest.Config,
    tmp_path: Path,
    more: str,
    started: tuple[str, ...],
) -> None:
    server = servers.get(started) or servers.setdefault(started, start_comfy(*started))
    port = free_port()
    (tmp_path / "conf").write_text(NGINX.format(folder=tmp_path, port=port, server=server.url, more=more))
    command = [pytestconfig.getoption("nginx"), "-c", str(tmp_path / "conf"), "-e", str(tmp_path / "error")]
    comfy, direct = ComfyClient(f"http://127.0.0.1:{port}"), ComfyClient(server.url)
    with subprocess.Popen(command) as process:
        try:
            while not ComfyServer.answers(cast("ComfyServer", comfy)):
                assert process.poll() is None
                time.sleep(0.05)
            for origin in (direct.url, comfy.url, "http://lora.example", None):
                for site in ("same-origin", None):
                    headers = {"Origin": origin, "Sec-Fetch-Site": site, "Atelier-Token": direct.token()}
                    assert send(comfy, "/atelier/folders/allow", {"folder": str(tmp_path)}, **headers)[0] == 403
                    assert not send(comfy, "/atelier/folders", **headers)[1].get("may_change")
            assert send(comfy, "/atelier/runs", Origin=None)[0] == 200
            assert send(direct, "/atelier/folders")[1]["may_change"]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def servers() -> dict[tuple[str, ...], ComfyServer]:
    """Remember the servers of these tests by what they were started with."""
    return {}


@pytest.fixture
def asked(comfy_modules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Give `ask(path)`, which answers as a route does; its work counts itself, and waits for `go`."""
    from lora_atelier.nodes.comfyui import server, threads

    monkeypatch.setattr(server, "PATIENCE", 30.0)
    begun, go = [], threading.Event()

    def work(path: str) -> web.Response:
        begun.append(path)
        assert go.wait(60)
        return server.json_answer({"path": path})

    async def ask(path: str) -> tuple[int, dict]:
        answer = await server._answer(make_mocked_request("GET", path), b"", lambda: work(path))
        return answer.status, answer_of(answer.body)

    yield SimpleNamespace(ask=ask, begun=begun, go=go, server=server, threads=threads)
    go.set()


def in_a_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread of its own: browser tests leave a loop at work in the process that they share."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def test_what_is_being_answered_is_not_begun_twice_and_stays_when_its_client_goes(asked: SimpleNamespace) -> None:
    async def several() -> list[tuple[int, dict]]:
        clients = [asyncio.ensure_future(asked.ask("/a")) for _ in range(20)]
        await asyncio.sleep(0.05)
        for gone in clients[:19]:
            gone.cancel()
        await asyncio.sleep(0.05)
        asked.go.set()
        return [await clients[19], await asked.ask("/a")]

    assert in_a_loop(several()) == [(200, {"path": "/a"})] * 2
    assert asked.begun == ["/a"] * 2  # the second began after the first was answered


def test_work_that_takes_long_goes_on_and_is_joined(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    async def twice() -> list[int]:
        monkeypatch.setattr(asked.server, "PATIENCE", 0.05)
        late = (await asked.ask("/a"))[0]
        monkeypatch.setattr(asked.server, "PATIENCE", 30.0)
        again = asyncio.ensure_future(asked.ask("/a"))
        await asyncio.sleep(0.05)
        asked.go.set()
        return [late, (await again)[0]]

    assert in_a_loop(twice()) == [504, 200] and asked.begun == ["/a"]


def test_more_than_a_few_questions_at_once_are_refused_and_comfyuis_threads_stay_free(asked: SimpleNamespace) -> None:
    async def flood() -> list[int]:
        clients = [asyncio.ensure_future(asked.ask(f"/{number}")) for number in range(asked.threads.MOST + 20)]
        while len(asked.begun) < asked.threads.THREADS:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert len(asked.begun) == asked.threads.THREADS
        asked.go.set()
        return sorted([(await client)[0] for client in clients])

    assert in_a_loop(flood()) == [200] * asked.threads.MOST + [503] * 20


def test_questions_that_fill_the_memory_together_are_refused(asked: SimpleNamespace) -> None:
    async def flood() -> list[int]:
        go = asyncio.Event()

        async def read_slowly() -> web.Response:
            await go.wait()
            return web.Response()

        def clients(number: int) -> list[asyncio.Task]:
            return [asyncio.ensure_future(asked.server._in_turn(2**25, read_slowly)) for _ in range(number)]

        first = clients(10)
        await asyncio.sleep(0)
        go.set()
        return [(await client).status for client in [*first, *clients(2)]]

    assert in_a_loop(flood()) == [200] * 8 + [503] * 2 + [200] * 2


def test_what_a_newer_comfyui_has_lost_is_said_to_the_page(asked: SimpleNamespace) -> None:
    def folder() -> web.Response:
        import folder_paths

        from lora_atelier.nodes.comfyui import folders

        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(folder_paths, "get_temp_directory")
            folders.access()
        raise AssertionError

    answer = asked.server.answered(folder)
    assert answer.status == 409
    assert "has no folder_paths.get_temp_directory, which LoRA Atelier uses" in answer_of(answer.body)["error"]
    with pytest.raises(AttributeError):  # a mistake of ours stays one
        asked.server.answered(lambda: None.nothing)  # type: ignore[attr-defined]


def test_all_threads_of_the_pack_are_its_own() -> None:
    found = [path.name for path in (ROOT / "nodes").rglob("*.py") if "run_in_executor" in path.read_text("utf-8")]
    assert found == ["threads.py"]
    assert not [path for path in (ROOT / "nodes").rglob("*.py") if "to_thread" in path.read_text("utf-8")]


def test_a_client_that_goes_leaves_no_error_in_the_log(comfy: ComfyClient, server: ComfyServer, tmp_path: Path) -> None:
    """In the middle of its question, or of a zip that is larger than what the system takes at once."""
    run = make_run(server.base / "output" / "atelier" / "runs", tmp_path.name, saves=(2,), finished=2, steps=2)
    (run.path / "samples").mkdir()
    (run.path / "samples" / "step-00000002-1.png").write_bytes(bytes(30_000_000))
    host, before = comfy.url.partition("//")[2], len(server.log_text())
    question = f"Origin: {comfy.url}\r\nAtelier-Token: {comfy.token()}\r\nContent-Type: application/json"
    for first, more in [
        (f"GET /atelier/runs/{run.path.name}/export/last HTTP/1.1", ""),
        ("POST /atelier/runs/rename HTTP/1.1", f"{question}\r\nContent-Length: 500\r\n"),
    ]:
        with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=60) as connection:
            connection.sendall(f"{first}\r\nHost: {host}\r\n{more}\r\n".encode())
            if not more:
                assert connection.recv(15) == b"HTTP/1.1 200 OK"
    temp = server.base / "temp"
    while send(comfy, f"/atelier/runs/{run.path.name}/export/2")[0] != 200:
        time.sleep(0.1)
    assert "Traceback" not in server.log_text()[before:] and not [*temp.glob("tmp*")]
    remove_folder(run.path)
