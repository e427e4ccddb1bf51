"""Remember which run a node of a workflow showed last, so that the page finds it after a restart.

A run that was trained elsewhere is found by the workflow that its folder keeps. A node that ComfyUI does not run again,
as its outputs are known from another copy of the workflow, shows the run that they are from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import folder_paths
from comfy_execution.progress import get_progress_state
from server import PromptServer

from ...trainer_core.common.files import write_json
from ...trainer_core.common.json_files import read_json
from ...trainer_core.common.wording import Said, say
from ...trainer_core.workflow.read import trains_of
from . import folders

MOST = 1000  # nodes that are remembered, those of the newest runs
MOST_LOOKED = 100  # runs whose workflows are compared, the newest
LONGEST_ID = 100  # characters of a workflow's id
OF_A_PROMPT = ("extra_data", "extra_pnginfo", "workflow", "id")  # where a queued prompt names its workflow
TRAIN = "AtelierTrain"
_begun: dict[str, str] = {}  # the runs of this process, by `work_of` their node
_had: dict[str, set[str]] = {}  # the nodes whose runs have begun, of the prompt at work


class ShownRun(NamedTuple):
    """The run that a node showed last."""

    run: str  # its folder's name
    since: float  # seconds since 1970


def list_file() -> Path:
    """The file of nodes and runs; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "shown.json"


def runs() -> dict[str, ShownRun]:
    """Read each node's last run of this ComfyUI, by `key`; {} where the file is missing or damaged."""
    try:
        known = read_json(list_file())
    except (OSError, ValueError):
        return {}
    known = known.items() if isinstance(known, dict) else ()
    return {node: ShownRun(*each) for node, each in known if _is_shown(each)}


def _is_shown(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int | float)
    )


def key(workflow: str, node: str) -> str:
    """Name a node of a workflow."""
    return f"{workflow}/{node}"


def remember(workflow: str, node: str, run: str) -> None:
    """Remember the run of a node; raises OSError."""
    if workflow:
        name = key(workflow, node)
        known = {**{each: of for each, of in runs().items() if each != name}, name: ShownRun(run, time.time())}
        list_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(list_file(), dict(list(known.items())[-MOST:]))


def id_in(sent: Any, *path: str) -> str:
    """Read a workflow's id at a path of names, in what a stranger may have sent; "" where there is none."""
    for name in path:
        sent = sent.get(name) if isinstance(sent, dict) else None
    return sent if isinstance(sent, str) and len(sent) <= LONGEST_ID else ""


def follow_prompts() -> None:
    """Remember the run of a queued Train LoRA whose work a run of this process has done; only while ComfyUI starts."""
    PromptServer.instance.add_on_prompt_handler(_queued)


def begun(prompt_id: str, node: str, run: str) -> None:
    """Know from now on what the run of a node at work is for."""
    if prompt_id not in _had:
        _had.clear()
    _had.setdefault(prompt_id, set()).add(node)
    for _, own, prompt, *_ in list(PromptServer.instance.prompt_queue.currently_running.values()):
        if own == prompt_id and (work := work_of(prompt, node)):
            _begun[work] = run
    for oldest in list(_begun)[:-MOST]:
        del _begun[oldest]


def shows_the_run_before(prompt_id: str, node: str) -> bool:
    """Tell whether a node of the prompt at work is a Train LoRA whose run has not begun, or one that it waits for."""
    for _, own, prompt, *_ in list(PromptServer.instance.prompt_queue.currently_running.values()):
        if own == prompt_id:
            trains = {each for each, content in prompt.items() if content.get("class_type") == TRAIN}
            return any(node in _needed(prompt, [train]) for train in trains.difference(_had.get(own, ())))
    return False


def _queued(asked: dict[str, Any]) -> dict[str, Any]:
    prompt, workflow = asked.get("prompt"), id_in(asked, *OF_A_PROMPT)
    if not _begun or not isinstance(prompt, dict):
        return asked
    for node, each in prompt.items():
        if isinstance(each, dict) and each.get("class_type") == TRAIN and (run := _begun.get(work_of(prompt, node))):
            with suppress(OSError):  # a full disk keeps nothing from being trained
                remember(workflow, node, run)
    return asked


def waiting(workflow: str, nodes: Collection[str]) -> dict[str, Said]:
    """Say of each Train LoRA whose turn is still to come what it waits for."""
    running, queued = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    reasons = [(item, say("Waiting for the nodes before this one.")) for item in running]
    reasons += [(item, say("Waiting in ComfyUI's queue.")) for item in queued]
    found: dict[str, Said] = {}
    for (_, own, prompt, extra, outputs, *_), reason in reasons:
        if id_in(extra, *OF_A_PROMPT[1:]) == workflow:
            for node in _needed(prompt, outputs).intersection(nodes):
                if node not in found and _is_to_come(own, prompt, node):
                    found[node] = reason
    return found


def _is_to_come(own: str, prompt: Mapping[str, Any], node: str) -> bool:
    progress = get_progress_state()
    states = progress.nodes if progress.prompt_id == own else {}
    if node in states or node in _had.get(own, ()):
        return False
    if work_of(prompt, node) not in _begun:
        return True
    # ComfyUI knows its outputs, unless something before it has changed outside of the workflow, such as a folder.
    return any(states[each]["state"].value == "running" for each in _needed(prompt, [node]) if each in states)


def _needed(prompt: Mapping[str, Any], nodes: Collection[str]) -> set[str]:
    """List some nodes of a prompt that ComfyUI took, and all that these need."""
    found: set[str] = set()
    left = list(nodes)
    while left:
        if (node := left.pop()) not in found:
            found.add(node)
            pairs = [
                each
                for each in (prompt[node].get("inputs") or {}).values()
                if isinstance(each, list) and len(each) == 2
            ]
            left += [name for name, _ in pairs if isinstance(name, str) and name in prompt]
    return found


def work_of(prompt: Mapping[str, Any], node: str) -> str:
    """Name what a node of a prompt does, by its inputs and those of all before it; "" where ComfyUI refuses these.

    Two nodes of one name give the same outputs, whatever numbers they have.
    """
    known: dict[str, str] = {}

    def name(key: str) -> str:
        if key not in known:
            each = prompt[key]
            given = {
                field: [name(value[0]), value[1]] if isinstance(value, list) and len(value) == 2 else value
                for field, value in each["inputs"].items()
            }
            text = json.dumps([each["class_type"], given], sort_keys=True)
            known[key] = hashlib.sha256(text.encode()).hexdigest()
        return known[key]

    try:
        return name(node)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):  # ComfyUI says what is wrong with it
        return ""


def of_nodes(workflow: str, nodes: Collection[str]) -> dict[str, str]:
    """Find the newest run of each of some nodes, trained here or elsewhere; raises OSError."""
    known = runs()
    found = {node: known[name] for node in nodes if (name := key(workflow, node)) in known}
    own = {shown.run for shown in known.values()}  # whose nodes are known exactly
    for since, path in _newest_workflows():
        if path.parent.name in own:
            continue
        for node in _nodes_of(path, since, workflow):
            if node in nodes and (node not in found or found[node].since < since):
                found[node] = ShownRun(path.parent.name, since)
    return {node: shown.run for node, shown in found.items()}


def _newest_workflows() -> list[tuple[float, Path]]:
    from ...trainer_core.runs import run_paths  # here, so that ComfyUI starts fast
    from ...trainer_core.runs.folder import WORKFLOW, is_elsewhere

    kept = [path / WORKFLOW for path in run_paths(folders.runs_folder())]
    times = [
        (path.stat().st_mtime, path) for path in kept if path.is_file() and not is_elsewhere(path, path.parents[1])
    ]
    return sorted(times, reverse=True)[:MOST_LOOKED]


@functools.lru_cache(maxsize=4 * MOST_LOOKED)
def _nodes_of(path: Path, since: float, workflow: str) -> tuple[str, ...]:
    """List the ids of Train LoRA in a run's workflow that trained it; none in another workflow.

    since: when the file was written, so that a changed one is read again.
    """
    from ...trainer_core.runs import open_run

    try:
        kept, name = read_json(path), open_run(path.parent).about["name"]
        if not isinstance(kept, dict) or kept.get("id") != workflow:
            return ()
        trains = trains_of(kept)
    except (OSError, ValueError):  # damaged, or gone: the tab of runs says so
        return ()
    return tuple(node for node, given in trains.items() if len(trains) == 1 or given == name)
