"""What services hear of a run: who it is, and what has happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MESSAGES = ("start", "save", "sample", "best", "error", "end")  # what a person may be sent


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """A run, without a place of this machine."""

    name: str
    run: str = ""  # the name of its folder, which no other run has
    settings: Mapping[str, Any] = field(default_factory=dict)  # by their full names


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a run."""

    kind: str  # one of MESSAGES, or "step", "validation"
    text: str = ""  # a sentence for people; none of single steps
    step: int = 0  # steps finished
    values: Mapping[str, float] = field(default_factory=dict)  # finite numbers, for curves
    pictures: Sequence[Path] = ()
