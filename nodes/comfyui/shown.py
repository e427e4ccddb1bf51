"""Remember which run a node of a workflow showed last, so that the page finds it after a restart."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...trainer_core.common.files import write_json
from ...trainer_core.common.json_files import read_json

MOST = 1000  # nodes that are remembered, those of the newest runs


def list_file() -> Path:
    """The file of nodes and runs; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "shown.json"


def runs() -> dict[str, str]:
    """Read the folder's name of each node's last run, by `key`; {} where the file is missing or damaged."""
    try:
        known = read_json(list_file())
    except (OSError, ValueError):
        return {}
    known = known if isinstance(known, dict) else {}
    return {node: run for node, run in known.items() if isinstance(run, str)}


def key(workflow: str, node: str) -> str:
    """Name a node of a workflow."""
    return f"{workflow}/{node}"


def remember(workflow: str, node: str, run: str) -> None:
    """Remember the run of a node; raises OSError."""
    if workflow:
        name = key(workflow, node)
        known = {**{each: of for each, of in runs().items() if each != name}, name: run}
        list_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(list_file(), dict(list(known.items())[-MOST:]))
