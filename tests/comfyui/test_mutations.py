"""Prompts that no editor sends, by chance: each gets a result, ComfyUI's own refusal, or one sentence of ours."""

import json
import re
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from odd_prompts import WORKFLOWS, Prompt, mutated, prompts
from train_graph import changed, draw_pictures

from comfy_client import HANGS, ComfyClient, ComfyServer
from lora_atelier.dev import PACK, TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
OURS = re.compile(rf"File \"[^\"]*{PACK}[/\\](nodes|trainer_core)[/\\]")  # a frame of a traceback
RAW = re.compile(
    r"object has no attribute|unexpected keyword|missing \d+ required|multiple values for|not subscriptable"
    r"|not iterable|not callable|unhashable|unsupported operand|not supported between|index out of range"
    r"|indices must be|KeyError|invalid literal|could not convert|NoneType"
    r"|must be str|expected str|codec can't|Traceback|<class |object at 0x"
)
LONGEST = 1000  # characters of a message
CHAIN = r"\n\n(?:The above exception was the direct cause|During handling of the above exception).*\n\n"
BROKEN_LINK = "Bad linked input"
FOUND = [  # faults that odd prompts have revealed: a node of the prompt `others`, its inputs, the sentence
    ("folder", {"folder": [1]}, BROKEN_LINK),
    ("masks", {"folder": [1]}, BROKEN_LINK),
    ("train", {"name": [1]}, BROKEN_LINK),
    ("saves", {"file_name": [[]]}, BROKEN_LINK),
    ("word", {"token": [None]}, BROKEN_LINK),
    ("images", {"images": "x"}, "images of Concept from Images is 'x'; link a node's IMAGE output into it."),
    ("images", {"images": {}}, "images of Concept from Images is an object; link a node's IMAGE output into it."),
    ("images", {"masks": 5}, "masks of Concept from Images is 5; link a node's MASK output into it."),
    ("train", {"model": {"a": 1}}, "model of Train LoRA is an object; link a node's MODEL output into it."),
    ("train", {"clip": True}, "clip of Train LoRA is true; link a node's CLIP output into it."),
    pytest.param(
        "resized",
        {"lora": {"a": 1}},
        "lora of Resize LoRA is an object; link a node's LORA_MODEL output into it.",
        marks=pytest.mark.thorough,
    ),
    ("resized", {"lora": 0.5}, "lora of Resize LoRA is 0.5; link a node's LORA_MODEL output into it."),
    ("existing", {"lora": "x"}, "lora of Existing LoRA is 'x'; link a node's LORA_MODEL output into it."),
    ("lora", {"include": "\ud800"}, "include of LoRA Config has a character that no text can have; type it again."),
    ("images", {"captions": "a\udfff"}, "captions of Concept from Images has a character that no text can have"),
    # a link into an input that there is not
    ("drawn", {"nothing": ["words", 0], "of.prompt": "#"}, "prompt of Drawn Pictures is empty; write a prompt of"),
    pytest.param("memory", {"nothing": ["words", 0]}, None, marks=pytest.mark.thorough),
    pytest.param("optimizer", {"name.nothing": ["words", 0]}, None, marks=pytest.mark.thorough),
    ("lora", {"algorithm.algorithm": ["words", 0], "self": ["words", 0]}, None),
    (
        "images",
        {"dataset": {"__value__": None}},
        "dataset of Concept from Images is nothing; link Concept Dataset",
    ),
]


@pytest.fixture(scope="module")
def info(server: ComfyServer) -> dict[str, Any]:
    return ComfyClient(server.url).object_info()


@pytest.fixture(scope="module")
def unchanged(server: ComfyServer, info: dict[str, Any]) -> dict[str, Prompt]:
    """Return the prompts that are changed, by name."""
    return prompts(info, draw_pictures(server.base / "input" / "odd prompts"))


def send(comfy: ComfyClient, prompt: Prompt) -> tuple[str, str]:
    """Queue a prompt; return its id, "" where nothing of it can run, and what is wrong with the refusals of its parts.

    ComfyUI's validation has exceptions of its own (status 500), which the log tells apart from ours.
    """
    try:
        answer = json.loads(comfy.request("/prompt", {"prompt": prompt}))
    except urllib.error.HTTPError as refusal:
        answer = json.loads(refusal.read()) if refusal.code == 400 else {}
    return answer.get("prompt_id", ""), wrong_refusal(answer)


def wrong_refusal(body: dict[str, Any]) -> str:
    """Return an exception of our code that a refusal reports; ComfyUI's validation has some of its own."""
    for node in (body.get("node_errors") or {}).values():
        for error in node["errors"]:
            if OURS.search("".join(error["extra_info"].get("traceback") or ())) or len(error["details"]) > 200_000:
                return f"{node['class_type']}: {error['details'][:LONGEST]}"
    return ""


def wait(server: ComfyServer, comfy: ComfyClient) -> dict[str, Any]:
    """Wait until the queue is empty; return the history."""
    before, since = None, time.monotonic()
    while left := sum(map(len, comfy.get("/queue").values())):
        if left != before:
            before, since = left, time.monotonic()
        assert time.monotonic() - since < HANGS, f"a prompt hangs, with {left} left"
        assert "Exception in thread" not in server.log_text(), "ComfyUI's worker ended"
        time.sleep(0.2)
    return comfy.get("/history?max_items=10000")


def wrong_end(entry: dict[str, Any]) -> str:
    """Name the fault of the message that ended a prompt, which must be a sentence of ours.

    What another node raises is accepted, and what ComfyUI raises before it calls ours.
    """
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_error" and data["node_type"].startswith("Atelier"):
            message, raised = data["exception_message"].strip(), data["exception_type"]
            if OURS.search("".join(data["traceback"])) and (
                raised not in ("ValueError", "RuntimeError") or RAW.search(message) or len(message) > LONGEST
            ):
                return f"{data['node_type']}: {raised}: {message[:LONGEST]}"
    return ""


def stray_tracebacks(log: str, said: set[str]) -> Iterator[str]:
    """Yield each traceback of our code in a log that no prompt's message tells of.

    Python's logging adds a call stack where it cannot print what ComfyUI says of a prompt, such as half a letter.
    """
    for chain in re.split(r"(?m)^(?=Traceback )", re.sub(CHAIN, "\n", log))[1:]:
        chain = chain.partition("\nCall stack:\n")[0]
        if OURS.search(chain) and not any(message in chain for message in said):
            yield chain[:4000]


def test_prompts_changed_by_chance_get_a_result_or_one_sentence(
    server: ComfyServer, info: dict[str, Any], unchanged: dict[str, Prompt], pytestconfig: pytest.Config
) -> None:
    """Each is the same everywhere: one of every tenth prompt, or 500 of all with `--thorough`."""
    comfy, names, log = ComfyClient(server.url), list(unchanged), len(server.log_text())
    wrong, queued = {}, {}
    chosen = range(500) if pytestconfig.getoption("thorough") else range(0, len(names), 10)
    for number in chosen:
        prompt, done = mutated(unchanged[names[number % len(names)]], info, number)
        queued[number], problem = send(comfy, prompt)
        wrong[number] = (problem, done)
    history, said = wait(server, comfy), set()
    for number, prompt_id in queued.items():
        if prompt_id:
            wrong[number] = (wrong_end(history[prompt_id]), wrong[number][1])
            messages = history[prompt_id]["status"]["messages"]
            said |= {data["exception_message"].split("\n")[0] for kind, data in messages if kind == "execution_error"}
    printed = server.log_text()[log:]
    assert not {number: what for number, what in wrong.items() if what[0]}
    assert not list(stray_tracebacks(printed, said))
    assert not [line for line in re.findall("WARNING: .*", printed) if RAW.search(line)]


@pytest.mark.parametrize(("node", "inputs", "sentence"), FOUND, ids=lambda value: ascii(value)[:30])
def test_what_was_found_by_chance_gets_one_sentence(
    server: ComfyServer, unchanged: dict[str, Prompt], node: str, inputs: dict[str, Any], sentence: str | None
) -> None:
    graph = changed(unchanged["others"], node, **inputs)
    del graph["preview"]  # so that all depends on the training
    result = ComfyClient(server.url).queue(graph)
    assert not RAW.search(result.error), result.error
    assert result.ok if sentence is None else sentence in result.error, result.error


def test_a_fingerprint_of_odd_values_is_refused_in_a_sentence(
    server: ComfyServer, unchanged: dict[str, Prompt]
) -> None:
    """ComfyUI asks for it in any case, also where another part of the prompt alone can run."""
    log = len(server.log_text())
    graph = changed(unchanged["others"], "base", checkpoint=5)
    graph["alone"] = {"class_type": "PreviewAny", "inputs": {"source": ["words", 0]}}
    ComfyClient(server.url).queue(graph)
    printed = server.log_text()[log:]
    assert not [line for line in re.findall("WARNING: .*", printed) if RAW.search(line)], printed


@pytest.mark.parametrize(
    "name",
    # test_workflows.py runs the others in every run
    ["others", *(pytest.param(path.stem, marks=pytest.mark.thorough) for path in WORKFLOWS)],
)
def test_the_prompts_themselves_end_well(server: ComfyServer, unchanged: dict[str, Prompt], name: str) -> None:
    """Also after all of the others."""
    result = ComfyClient(server.url).queue(unchanged[name])
    assert result.ok, result.error
