"""The one file that says who hears what. Only its owner can read it, as it holds tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.files import write_json
from ..common.json_files import read_json
from ..common.values import is_flag, is_object, is_text
from .event import MESSAGES

FOLDER, FILE = "outward", "settings.json"  # in the pack's part of ComfyUI's user folder
LARGEST = 65_536  # bytes of the file
LONGEST_SECRET = 8192  # characters of a token, or of all addresses
LONGEST_PROJECT = 100  # characters
_PROJECT = re.compile(r"[\w .-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSettings:
    """What a person chose for one service."""

    on: bool = False
    secret: str = field(default="", repr=False)  # a token, or addresses with blanks between them
    project: str = ""  # of a tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Outward:
    """All that a person chose."""

    services: Mapping[str, ServiceSettings] = field(default_factory=dict)  # by name
    events: tuple[str, ...] = ("start", "error", "end")  # of which messages tell
    pictures: bool = False  # samples go along

    def of(self, name: str) -> ServiceSettings:
        """Give what is chosen for a service."""
        return self.services.get(name, ServiceSettings())

    @property
    def secrets(self) -> list[str]:
        """List all tokens and addresses, which nobody may read anywhere."""
        return [choice.secret for choice in self.services.values() if choice.secret]

    def with_choice(self, name: str, **values: Any) -> Outward:
        """Change what is chosen for a service."""
        return replace(self, services={**self.services, name: replace(self.of(name), **values)})


def usual_file(comfyui: Path | None) -> Path:
    """Find the file that ComfyUI's settings write, below its folder; raises ValueError without one."""
    if comfyui is None:
        raise ValueError("ComfyUI's settings were not found; name the file of services by --services.")
    return comfyui / "user" / "__atelier" / FOLDER / FILE


def read_outward(path: Path) -> Outward:
    """Read the file; nothing is on where there is none. Raises ValueError, without a word of it, for a damaged one."""
    try:
        with suppress(PermissionError):  # somebody else's
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
        values = read_json(path, LARGEST)
        return _checked(values)
    except FileNotFoundError:
        return Outward()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"The settings in {path} cannot be read ({why}); repair or delete this file.") from None


def write_outward(path: Path, outward: Outward) -> None:
    """Write the file into a folder that only its owner can open, so that no copy of it was ever open to others."""
    checked = asdict(_checked(asdict(outward)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # of a disk without modes
        os.chmod(path.parent, 0o700)
    write_json(path, checked)  # which takes the modes of its folder


def _checked(values: Any) -> Outward:
    """Build the settings of plain values; raises ValueError with a reason that quotes none of them."""
    if not is_object(values):
        raise ValueError("it is no object")
    services, events, pictures = values.get("services", {}), values.get("events", ()), values.get("pictures", False)
    if not is_object(services) or not isinstance(events, list | tuple) or not is_flag(pictures):
        raise ValueError("services must be an object, events a list, and pictures true or false")
    if not set(map(str, events)) <= set(MESSAGES):
        raise ValueError(f"events must be among {', '.join(MESSAGES)}")
    return Outward(
        services={name: _choice(name, each) for name, each in services.items()},
        events=tuple(each for each in MESSAGES if each in events),
        pictures=pictures,
    )


def _choice(name: str, values: Any) -> ServiceSettings:
    known = {"on": is_flag, "secret": is_text, "project": is_text}
    if not is_object(values) or not all(key in known and known[key](value) for key, value in values.items()):
        raise ValueError(f"{name:.40} must have on, secret and project alone")
    choice = ServiceSettings(**values)
    if len(choice.secret) > LONGEST_SECRET or not choice.secret.isprintable():
        raise ValueError(f"secret of {name:.40} is too long, or has several lines")
    if choice.project and not (_PROJECT.fullmatch(choice.project) and len(choice.project) <= LONGEST_PROJECT):
        raise ValueError(f"project of {name:.40} must be at most {LONGEST_PROJECT} letters, digits, blanks, . - and _")
    return choice
