"""What a scan found: the fate of every file, sentences that stop the run, and remarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..config import ConceptConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What became of one file that the scan saw."""

    concept: int
    name: str  # relative to the concept's folder, posix
    fate: str  # picture | caption | mask | left out | not used
    why: str = ""


@dataclass(slots=True)
class Report:
    """The findings of one concept; every file starts as not used."""

    concept: ConceptConfig
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fates: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (fate, why)

    def problem(self, who: Iterable[str], why: str, sentence: str, remedy: str = "") -> None:
        """Refuse pictures, or note that they are left out, as the concept says.

        sentence: names them, without its full stop; it may hold the remedy itself.
        """
        for name in who:
            self.fates[name] = ("left out", why)
        if self.concept.on_problem == "stop":
            self.errors.append(f"{sentence}{'; ' if remedy else ''}{remedy}, or set on_problem to leave_out.")
        else:
            self.notes.append(f"Left out: {sentence}.")
