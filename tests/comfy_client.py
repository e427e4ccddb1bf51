"""Start a real ComfyUI server with this pack in it, and talk to it as a browser does."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
import websocket

from lora_atelier.dev import prepare_base, server_command

RUN_EVENT = "atelier.run"  # tells of a run at work
# A node pack that lets each step of a run wait: a run that is only watched need not keep a processor busy. Its nodes
# make copies of another one for each turn of a loop, describe pictures, and let the server treat files as Windows does.
PACE = """
import gc
import runpy
import time
from pathlib import Path

import torch
from aiohttp import web
from comfy_execution.graph_utils import GraphBuilder
from server import PromptServer


@web.middleware
async def keep_scripts(request, handler):
    answer = await handler(request)
    if request.path.startswith("/assets/"):
        answer.headers["Cache-Control"] = "max-age=86400"
    return answer


PromptServer.instance.app.middlewares.append(keep_scripts)
step, seconds = torch.amp.GradScaler.step, Path(__file__).with_name("seconds.txt")


def after_a_while(*given, **named):
    time.sleep(float(seconds.read_text()) if seconds.exists() else 0)
    return step(*given, **named)


torch.amp.GradScaler.step = after_a_while


class Turn:
    INPUT_TYPES = lambda: {"required": {"number": ("INT", {})}}
    IS_CHANGED = lambda **_: float("nan")
    RETURN_TYPES, FUNCTION, CATEGORY = ("INT",), "give", "tests"

    def give(self, number):
        return (number,)


class Loop:
    INPUT_TYPES = lambda: {
        "required": {"body": ("*", {"rawLink": True})},
        "hidden": {"prompt": "DYNPROMPT"},
    }
    IS_CHANGED = lambda **_: float("nan")
    RETURN_TYPES, FUNCTION, CATEGORY = ("*",), "expand", "tests"

    def expand(self, body, prompt):
        graph, (original, slot) = GraphBuilder(), body
        about = prompt.get_node(original)
        for seed in (1, 6):
            copy = graph.node(about["class_type"], f"{seed}_{original}", **about["inputs"])
            copy.set_input("seed", graph.node("Turn", f"iteration_{seed}", number=seed).out(0))
            copy.set_override_display_id(original)
        return {"result": (copy.out(slot),), "expand": graph.finalize()}


class Rules:
    INPUT_TYPES = lambda: {"required": {"file": ("STRING", {}), "on": ("BOOLEAN", {})}}
    IS_CHANGED = lambda **_: float("nan")
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "turn", "tests", True

    def turn(self, file, on):
        if on:
            Rules.now = runpy.run_path(file)["rules"]()
            Rules.now.__enter__()
        else:
            Rules.now.__exit__(None, None, None)
        return ()


class Describe:  # a tagger or vision model, which says how bright a picture is
    INPUT_TYPES = lambda: {"required": {"image": ("IMAGE", {}), "word": ("STRING", {"default": "grey"})}}
    RETURN_TYPES, FUNCTION, CATEGORY = ("STRING", "MASK"), "look", "tests"

    def look(self, image, word):
        assert image.shape[0] == 1
        time.sleep(float(seconds.read_text()) if seconds.exists() else 0)
        level = round(float(image.mean()) * 255)
        return (f"{word} {level} " if word else "", (image[:, ::2, ::2, 0] > 0.5).float())


NODE_CLASS_MAPPINGS = {"Turn": Turn, "Loop": Loop, "Rules": Rules, "Describe": Describe}
gc.collect()
gc.freeze()  # each run collects garbage, and need not look at what ComfyUI and the pack have imported
"""
HANGS = 300.0  # seconds after which whoever waits gives up: what works is quicker on the busiest machine


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_in_a_terminal() -> None:
    """Let the calling process answer signals, as one from a background job does not, and end with its parent."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    warm.end_with_parent()


class ComfyServer:
    """A ComfyUI server process with its own base directory; a context manager that starts and ends it.

    warmed: its large libraries are imported already, where the system can (see warm.py).
    """

    def __init__(self, comfyui: Path, base: Path, *extra: str, cpu: bool = True, warmed: bool = False) -> None:
        prepare_base(base)
        self.comfyui, self.base, self.extra, self.cpu = comfyui, base, extra, cpu
        self.warmed = warmed and cpu and warm.POSSIBLE
        self.log = base / "server.log"
        self.url = ""
        self.process: subprocess.Popen | warm.Popen | None = None

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, timeout: float = HANGS) -> None:
        """Start the process, again at its old address, and return once it answers.

        Raises RuntimeError with the log's end if it does not.
        """
        port = int(self.url.rpartition(":")[2]) if self.url else free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = self._spawn(server_command(self.comfyui, self.base, port, *self.extra, cpu=self.cpu))
        deadline = time.monotonic() + timeout
        while not self.answers():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                end = "\n".join(self.log_text().splitlines()[-25:])
                raise RuntimeError(
                    f"ComfyUI {'ended' if ended else 'did not answer'} at start-up; its log ends:\n{end}"
                )
            time.sleep(0.2)

    def _spawn(self, command: list[str]) -> subprocess.Popen | warm.Popen:
        if self.warmed:
            with self.log.open("ab") as log:
                return warm.Popen(command, cwd=self.base, stdout=log)
        alone: dict[str, Any] = {"start_new_session": True}  # a Ctrl-C is ours to pass on
        if os.name == "posix":
            alone["preexec_fn"] = as_in_a_terminal
        else:
            alone = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=self.base, stdout=log, stderr=log, **alone)

    @contextmanager
    def unhurried(self, seconds: float = 0.6) -> Iterator[None]:
        """Let each step of its runs wait so many seconds; of a server that has the pack PACE."""
        waits = self.base / "custom_nodes" / "pace" / "seconds.txt"
        waits.write_text(str(seconds))
        yield
        waits.unlink()

    def answers(self) -> bool:
        """Tell whether the server takes requests yet."""
        try:
            urllib.request.urlopen(f"{self.url}/system_stats", timeout=60).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the process in good order, by force after ten seconds."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log_text(self) -> str:
        """Return all that the server has printed, without its colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(encoding="utf-8", errors="replace"))


@dataclass
class Result:
    """What one queued prompt did, gathered from its websocket events and its history entry."""

    prompt_id: str = ""
    status: str = ""  # success | error | interrupted | rejected (refused before it was queued)
    error: str = ""  # the message a person sees, empty on success
    details: dict = field(default_factory=dict)  # data of execution_error, or the body of the refusal
    ran: list[str] = field(default_factory=list)  # node ids in order
    cached: set[str] = field(default_factory=set)
    events: list[tuple[str, dict]] = field(default_factory=list)  # every text event, in order
    texts: list[tuple[str, str]] = field(default_factory=list)  # (node id, status or note of a run)
    outputs: dict[str, dict] = field(default_factory=dict)  # node id -> its `ui` output

    @property
    def ok(self) -> bool:
        """Tell whether every node was executed or served from cache."""
        return self.status == "success"

    def did_run(self, node: str) -> bool:
        """Tell whether the node was executed (a twin of it in the same prompt counts for itself alone)."""
        return str(node) in self.ran

    def was_cached(self, node: str) -> bool:
        """Tell whether the node was known to be cached when the prompt started."""
        return str(node) in self.cached

    def custom(self, prefix: str = "atelier") -> list[tuple[str, dict]]:
        """Return the pack's own events, in order."""
        return [(kind, data) for kind, data in self.events if kind.startswith(prefix)]


_infos: dict[str, dict] = {}  # by the address of a server


class ComfyClient:
    """One browser tab's view of a server: queue prompts and read what comes back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = uuid.uuid4().hex

    def request(self, path: str, data: object = None, headers: dict | None = None) -> bytes:
        """GET a path, or POST `data` to it (bytes as they are, anything else as JSON); return the body."""
        body = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
        headers = headers or ({"Content-Type": "application/json"} if body else {})
        if body is not None and "/atelier/" in path:
            headers = {"Atelier-Token": self.token(), **headers}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=HANGS) as answer:
            return answer.read()

    def token(self) -> str:
        """Give the token that a page of the server has."""
        asked = urllib.request.Request(f"{self.url}/atelier/token", b"", {"Origin": self.url}, method="POST")
        with urllib.request.urlopen(asked, timeout=HANGS) as answer:
            return json.load(answer)["token"]

    def get(self, path: str) -> Any:
        """GET a path and return its JSON."""
        return answer_of(self.request(path))

    def object_info(self) -> dict:
        """Return the schemas of all nodes."""
        return self.get("/object_info")

    def first_info(self) -> dict:
        """Return the schemas as they were when a test first asked this server, which makes them anew each time."""
        if self.url not in _infos:
            _infos[self.url] = self.object_info()
        return _infos[self.url]

    def interrupt(self, prompt_id: str) -> None:
        """Cancel this prompt if it is the one that runs."""
        self.request("/interrupt", {"prompt_id": prompt_id})

    def cancel(self, prompt_id: str) -> bool:
        """Cancel this prompt, whether it runs or waits, as newer editors do; tell whether it was."""
        return answer_of(self.request(f"/api/jobs/{prompt_id}/cancel", {}))["cancelled"]

    def upload(self, path: Path, subfolder: str = "") -> dict:
        """Put an image into the input folder; return its name, subfolder and type."""
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="subfolder"\r\n\r\n{subfolder}\r\n'.encode(),
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{path.name}"\r\n'.encode(),
            b"Content-Type: application/octet-stream\r\n\r\n" + path.read_bytes() + b"\r\n",
            f"--{boundary}--\r\n".encode(),
        ]
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return json.loads(self.request("/upload/image", b"".join(parts), headers))

    def image(self, reference: dict) -> bytes:
        """Return the file that an image reference of an output names."""
        return self.request("/view?" + urllib.parse.urlencode(reference))

    def images(self, result: Result, node: str) -> list:
        """Return a node's output images as PIL images."""
        from PIL import Image

        references = result.outputs.get(str(node), {}).get("images", [])
        return [Image.open(io.BytesIO(self.image(reference))) for reference in references]

    def queue(
        self,
        prompt: dict,
        on_event: Callable[[str, dict, Result], None] | None = None,
        timeout: float = HANGS,
        workflow: str = "",
        only: str = "",
    ) -> Result:
        """Queue a prompt, follow it to its end and return its result; workflow: the id of its workflow.

        only: an output node; others do not run, as the page asks for where a person runs one node.

        `on_event(kind, data, result)` is called on every event as it arrives ("text": status or note of a run), so that
        a test can interrupt, or press a button, at a known moment. TimeoutError when no event comes for `timeout`
        seconds.
        """
        result, extra = Result(), {"extra_pnginfo": {"workflow": {"id": workflow}}} if workflow else {}
        socket_url = self.url.replace("http", "ws", 1) + f"/ws?clientId={self.id}"
        connection = websocket.create_connection(socket_url, timeout=timeout)
        try:
            asked = {"prompt": prompt, "client_id": self.id, "extra_data": extra}
            asked |= {"partial_execution_targets": [only]} if only else {}
            try:
                answer = self.request("/prompt", asked)
            except urllib.error.HTTPError as refusal:
                result.status, result.details = "rejected", json.loads(refusal.read())
                result.error = refusal_text(result.details)
                return result
            result.prompt_id = json.loads(answer)["prompt_id"]
            while not self._take(connection, result, on_event, timeout):
                pass
        finally:
            connection.close()
        result.outputs = self.get(f"/history/{result.prompt_id}")[result.prompt_id]["outputs"]
        return result

    def _take(self, connection: websocket.WebSocket, result: Result, on_event: Callable | None, timeout: float) -> bool:
        """Read one message into the result; return True on the end of the prompt."""
        try:
            message = connection.recv()
        except websocket.WebSocketTimeoutException:
            raise TimeoutError(f"No event from the server for {timeout} s; the last: {result.events[-1:]}") from None
        if isinstance(message, bytes):  # a preview
            return False
        parsed = answer_of(message)
        kind, data = parsed["type"], parsed.get("data") or {}
        if data.get("prompt_id", result.prompt_id) != result.prompt_id:
            return False
        result.events.append((kind, data))
        if kind == RUN_EVENT and data["alive"]:
            text = data.get("note") or " · ".join([data["text"], *data["details"]])
            result.texts.append((data["node"], text))
            kind, data = "text", {"node": data["node"], "text": text}
        if kind == "executing" and data["node"] is not None:
            result.ran.append(data["node"])
        elif kind == "execution_cached":
            result.cached |= set(data["nodes"])
        elif kind in ("execution_success", "execution_interrupted", "execution_error"):
            result.status = kind.removeprefix("execution_")
            if kind == "execution_error":
                result.details, result.error = data, data["exception_message"].strip()
        if on_event:
            on_event(kind, data, result)
        return kind == "executing" and data["node"] is None


def send(comfy: ComfyClient, path: str, question: object = None, **headers: str | None) -> tuple[int, dict]:
    """Ask as a browser at the machine does, or with other headers, None for none; give status and answer."""
    host, method = comfy.url.partition("//")[2], "GET" if question is None else "POST"
    body = b"" if question is None else json.dumps(question).encode()
    given: dict[str, str | None] = {"Host": host, "Connection": "keep-alive", "Origin": comfy.url}
    given |= {"Content-Type": "application/json", "Content-Length": str(len(body))} if body else {}
    given |= {"Atelier-Token": comfy.token()} if body and "Atelier-Token" not in headers else {}
    given |= headers
    lines = [f"{method} {path} HTTP/{given.pop('version', None) or '1.1'}"]
    lines += [f"{name}: {value}" for name, value in given.items() if value is not None]
    name, _, port = host.rpartition(":")
    with socket.create_connection((name, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        found = answer.read()
    return answer.status, answer_of(found) if found.startswith(b"{") else {}


def answer_of(body: bytes | str) -> Any:
    """Read an answer in JSON, with the English text of each sentence."""

    def sentence(found: dict[str, Any]) -> Any:
        return found["text"] if found.keys() == {"text", "key", "values"} else found

    return json.loads(body, object_hook=sentence)


def refusal_text(body: dict) -> str:
    """Put the reasons why a prompt was refused into one line per node."""
    lines = [
        f"{node['class_type']}: {error['message']}: {error['details']}"
        for node in (body.get("node_errors") or {}).values()
        for error in node["errors"]
    ]
    return "\n".join(lines) or body["error"]["message"]


def refused(comfy: ComfyClient, graph: dict, status: str, sentence: str, *more: str) -> None:
    """Check that a prompt is refused in the given way; the message says `sentence` once, and has the other parts."""
    result = comfy.queue(graph)
    assert result.status == status, result.error
    assert result.error.count(sentence) == 1, result.error
    for part in more:
        assert part in result.error, result.error
