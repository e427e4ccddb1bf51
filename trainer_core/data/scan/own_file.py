"""Read and write the file in a folder that says which single pictures are left out, and their role, repeats, focus."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.access import ANYWHERE, Access
from ...common.files import keep_newest, open_file, written_whole
from ...common.json_files import MEBIBYTE, parse_json
from ...common.values import is_number, read_object
from ...common.wording import printable
from ..buckets import Point
from .folder import MOST_FOLDER_REPEATS, same_name

OWN_FILE = "lora_atelier.json"
LARGEST = 8 * MEBIBYTE  # bytes of the file
MOST_ENTRIES = 100_000  # pictures in it
LONGEST_NAME = 1024  # characters
MOST_KEPT = 100  # folders whose earlier settings are kept
ROLES = ("train", "regularisation", "validation")  # prior_prediction repeats pictures, with captions of their class
_OUTSIDE = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^[/\\]|^[A-Za-z]:[/\\]|[\0\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSettings:
    """What the file sets for one picture."""

    leave_out: bool = False
    role: str = ""  # one of ROLES; "" = that of its concept
    repeats: int = 1  # times those of its concept and folder
    focus: Point | None = None  # shares of width and height, from the top left of the upright picture

    def to_dict(self) -> dict[str, Any]:
        """Describe it as the file does, without what is as usual."""
        found = {"leave_out": self.leave_out, "role": self.role, "focus": self.focus and list(self.focus)}
        return {name: value for name, value in found.items() if value} | (
            {"repeats": self.repeats} if self.repeats != 1 else {}
        )


OwnFile = dict[str, OwnSettings]  # by the name of the picture


def read_own(folder: Path, access: Access = ANYWHERE) -> tuple[OwnFile, str]:
    """Read the file of a folder, and the sha256 of its bytes; ({}, "") without one. Raises ValueError and OSError."""
    path = folder / OWN_FILE
    if not access.allows(path):
        raise ValueError(f"{path} is a link to a place that may not be read; put the file itself there.")
    try:
        with open_file(path) as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        return {}, ""
    if len(content) > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST // MEBIBYTE} MiB; remove pictures from it, or delete it.")
    try:
        value = parse_json(content)
    except ValueError as problem:
        raise ValueError(f"{path} cannot be read: {problem}; repair or delete it.") from None
    return _settings(path, value), hashlib.sha256(content).hexdigest()


def own_of(value: Any, where: str) -> OwnSettings:
    """Check what is set for one picture; where: the file and the picture, for the ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f'{where}: {_short(value)} is no object such as {{"leave_out": true}}; write one.')
    known = OwnSettings.__dataclass_fields__
    if unknown := next((key for key in value if key not in known), None):
        raise ValueError(f"{where}: {_short(unknown)} is unknown; use {', '.join(known)}.")
    leave_out, role, repeats = value.get("leave_out", False), value.get("role", ""), value.get("repeats", 1)
    if not isinstance(leave_out, bool):
        raise ValueError(f"{where}: leave_out is {_short(leave_out)}; set it to true or false.")
    if role == "prior_prediction":
        raise ValueError(
            f"{where}: prior_prediction needs captions of its own; move these pictures to a dataset of that role."
        )
    if role not in ("", *ROLES):
        raise ValueError(f"{where}: role is {_short(role)}; set it to {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if not isinstance(repeats, int) or isinstance(repeats, bool) or not 1 <= repeats <= MOST_FOLDER_REPEATS:
        raise ValueError(
            f"{where}: repeats is {_short(repeats)}; set it to a whole number from 1 to {MOST_FOLDER_REPEATS}."
        )
    return OwnSettings(leave_out=leave_out, role=role, repeats=repeats, focus=_focus(value.get("focus"), where))


def write_own(
    folder: Path,
    changes: Mapping[str, OwnSettings],
    read: str,
    access: Access = ANYWHERE,
    *,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """Change what the file sets for some pictures, atomically: what it set before, and its new sha256.

    read: sha256 of the file that the change is made of. keep: is given what was set before, ahead of the change, so
    that whatever is written can be undone. Raises Changed where the file is another one by now, and ValueError for too
    many pictures. Without any picture there is no file.
    """
    path = folder / OWN_FILE
    known, now = read_own(folder, access)
    if now != read:
        raise Changed(f"{path} was changed meanwhile; look at the picture again, and repeat your change.")
    # An entry of another case, or with accents written apart, is the picture's own unless it names another file.
    entries = {name: entry for name, entry in find_own(known, [*changes]).items() if _is_one(folder, name, entry)}
    before = {name: known.get(entries.get(name, name), OwnSettings()).to_dict() for name in changes}
    others = {name: each for name, each in known.items() if name not in entries.values()}
    after = {name: each.to_dict() for name, each in (others | dict(changes)).items()}
    after = {name: each for name, each in sorted(after.items()) if each}
    text = json.dumps({"pictures": after}, ensure_ascii=False, indent=1).encode()
    if len(after) > MOST_ENTRIES or len(text) > LARGEST:
        raise ValueError(f"{path} would hold too many pictures; use several folders.")
    keep(before)
    if not after:
        path.unlink(missing_ok=True)
        return before, ""
    with written_whole(path) as temporary:
        temporary.write_bytes(text)
    return before, hashlib.sha256(text).hexdigest()


def _is_one(folder: Path, name: str, entry: str) -> bool:
    own, other = folder / name, folder / entry
    return name == entry or not other.is_file() or (own.is_file() and other.samefile(own))


def remember(path: Path, before: Mapping[str, Any]) -> None:
    """Keep in a file what was set for some pictures before a change, with what was before those of others."""
    text = json.dumps(_kept(path) | dict(before), ensure_ascii=False).encode()
    if len(text) > LARGEST:
        text = json.dumps(before, ensure_ascii=False).encode()
    with written_whole(path) as temporary:
        temporary.write_bytes(text)
    keep_newest(path.parent, MOST_KEPT)


def remembered(path: Path, name: str) -> OwnSettings | None:
    """Read what was set for a picture before its last change; None where nothing is known."""
    value = _kept(path).get(name)
    return None if value is None else own_of(value, f"{path}, {_short(name)}")


def _kept(path: Path) -> dict[str, Any]:
    return read_object(path, LARGEST) or {}


class Changed(ValueError):
    """A file is no longer what a change was made of."""


def find_own(settings: OwnFile, names: list[str]) -> dict[str, str]:
    """Find the name in the file of each picture that it sets something for; a Mac's accents and case may differ."""
    alike = {same_name(name): name for name in settings}
    found = ((name, name if name in settings else alike.get(same_name(name))) for name in names)
    return {name: own for name, own in found if own is not None}


def is_outside(name: str) -> bool:
    """Tell whether a name is none of a file inside a folder, or cannot stand in a text."""
    return not name or len(name) > LONGEST_NAME or bool(_OUTSIDE.search(name))


def _settings(path: Path, value: Any) -> OwnFile:
    pictures = value.get("pictures") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(pictures, dict):
        raise ValueError(f'{path} has no pictures; write {{"pictures": {{"cat.png": {{"leave_out": true}}}}}}.')
    if unknown := next((key for key in value if key != "pictures"), None):
        raise ValueError(f"{path}: {_short(unknown)} is unknown; use pictures alone.")
    if len(pictures) > MOST_ENTRIES:
        raise ValueError(f"{path} names more than {MOST_ENTRIES:,} pictures; use several folders.")
    if strange := next(filter(is_outside, pictures), None):
        raise ValueError(
            f"{path}: {_short(strange)} is no picture inside the folder; write its name within the folder."
        )
    return {name: own_of(each, f"{path}, {_short(name)}") for name, each in pictures.items()}


def _focus(value: Any, where: str) -> Point | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(is_number(each) and 0 <= each <= 1 for each in value):
        raise ValueError(f"{where}: focus is {_short(value)}; set it to two shares from 0 to 1, as [0.5, 0.3].")
    return float(value[0]), float(value[1])


def _short(value: Any) -> str:
    """Show a value in a sentence."""
    return printable(json.dumps(value, ensure_ascii=True)[:80])
