"""The result of scanning a concept: what happened to each file, errors that stop the run, and notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...common.access import ANYWHERE, Access
from ...config import ConceptConfig, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOutcome:
    """What happened to one file of a concept's folder."""

    concept: int
    name: str  # relative to the concept's folder, posix
    outcome: str  # picture | clip | caption | mask | control picture | left out | not used
    why: str = ""


@dataclass(slots=True)
class Report:
    """The errors, notes and file outcomes of one concept; every file starts as not used."""

    concept: ConceptConfig
    access: Access = ANYWHERE  # the places that may be read
    reads_masks: bool = True
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (outcome, why)
    named: dict[str, dict[str, Path]] = field(default_factory=dict)  # column of a table -> entry -> control picture
    texts: dict[str, Path] = field(default_factory=dict)  # name of a picture -> the text file beside it

    def problem(self, who: Iterable[str], why: str, sentence: str, remedy: str = "") -> None:
        """Add an error for pictures, or leave them out with a note, by the concept's on_problem.

        who: names of the pictures. why: the reason in the table of files. sentence: names the pictures, without full
        stop; it may contain the remedy.
        """
        for name in who:
            self.outcomes[name] = ("left out", why)
        if self.concept.on_problem == "stop":
            self.errors.append(
                f"{sentence}{'; ' if remedy else ''}{remedy}, or set {setting('concepts.on_problem')} to leave_out."
            )
        else:
            self.notes.append(f"Left out: {sentence}.")
