"""One file of the GPU suite that its owner may show: without a path, a name of the machine or of its person."""

from __future__ import annotations

import getpass
import json
import platform
import re
from pathlib import Path
from typing import Any

from lora_atelier.trainer_core.common.wording import without_paths

COMMAND = "python3 dev.py bench --gpu --share"
MINUTES = 30.0
PARTS = ("sources", "date", "commit", "command", "parts", "left_out")  # of a file


def write(data: dict[str, Any], device: str, folder: Path) -> Path:
    """Write measurements into a folder, under a name that says the device; return the file."""
    name = re.sub(r"\W+", "-", device.lower()).strip("-")
    path = folder / f"lora-atelier-{name}-{data['date']}.json"
    path.write_text(json.dumps(without_names({**data, "command": COMMAND}), indent=1), encoding="utf-8")
    return path


def without_names(value: Any) -> Any:
    """Leave out of all texts paths, and the names of the machine and of whoever uses it."""
    if isinstance(value, dict):
        return {key: without_names(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_names(each) for each in value]
    if not isinstance(value, str):
        return value
    for name in (platform.node(), getpass.getuser(), Path.home().name):
        if len(name) > 3:  # a shorter one may be part of a word that means something
            value = re.sub(rf"\b{re.escape(name)}\b", "(a name)", value, flags=re.IGNORECASE)
    return without_paths(value)


def read(path: Path) -> dict[str, Any]:
    """Read a file of measurements; ValueError for another one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise ValueError(f"{path.name} is no file of `{COMMAND}`: {problem}") from problem
    if not isinstance(data, dict) or not all(part in data for part in PARTS):
        raise ValueError(f"{path.name} is no file of `{COMMAND}`: it lacks one of {', '.join(PARTS)}")
    return data
