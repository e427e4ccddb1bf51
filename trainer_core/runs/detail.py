"""Describe the settings, samples and files of one run; nothing in it names a place of this machine."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from ..common.files import folder_size
from ..common.wording import printable
from .folder import SAMPLES, RunFolder

MOST_SETTINGS = 1000
MOST_SAMPLES = 2000  # of one run, the newest
MOST_FILES = 200
LONGEST = 500  # characters of a setting
_SAMPLE = re.compile(r"step-([0-9]{8,12})-([0-9]{1,4})(-[a-z]{1,20})?\.png")


def settings_of(run: RunFolder) -> dict[str, Any]:
    """List the settings of a run by their names, `train.steps`; of a path only its last part."""
    return dict(itertools.islice(_leaves(run.about["config"], ""), MOST_SETTINGS))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value, 1) if isinstance(value, list) else ()
    if not inner or not value:
        yield printable(name[1:LONGEST]), _shown(value)
        return
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}"[:LONGEST])


def _shown(value: Any) -> Any:
    if isinstance(value, (dict, list)):  # empty ones
        return None
    if not isinstance(value, str):
        return value if not isinstance(value, int) or abs(value) < 2**53 else str(value)  # exact in JavaScript
    return last_part(value) if PureWindowsPath(value).anchor else printable(value[:LONGEST])


def last_part(path: str) -> str:
    """Name the last part of either system's path."""
    return printable(PureWindowsPath(path).name[:LONGEST])


def sample_files(run: RunFolder) -> list[Path]:
    """List the pictures drawn for a run, by step, prompt and weights, the newest MOST_SAMPLES; no links."""
    folder = run.path / SAMPLES
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [
            (int(match[1]), int(match[2]), match[3] or "", entry.name)
            for entry in entries
            if (match := _SAMPLE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        ]
    return [folder / name for *_, name in sorted(found)[-MOST_SAMPLES:]]


def thumbnail_of(run: RunFolder) -> Path | None:
    """Find the picture that stands for a run: of its last sampled step the first; None without one."""
    found = sample_files(run)
    return next((file for file in found if file.name.split("-")[1] == found[-1].name.split("-")[1]), None)


def files_of(run: RunFolder) -> list[dict[str, Any]]:
    """List the files and folders in a run's folder with their bytes, at most MOST_FILES."""

    entries = sorted((path for path in run.path.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    return [
        {"name": printable(path.name), "size": folder_size(path) if path.is_dir() else path.lstat().st_size}
        for path in entries[:MOST_FILES]
    ]
