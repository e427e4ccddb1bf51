"""What is kept of a run and when, under which names, and what happens when there is a run of it already."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range

Unit = Literal["steps", "epochs", "minutes"]

FIELDS = ("name", "date", "time", "step", "epoch")  # that a pattern of file names may hold
LONGEST = 100  # characters of a name
MOST_BYTES = 160  # of a name in UTF-8, so that endings and numbers fit into what file systems allow (255)
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # device names on Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class SavesConfig(Config):
    """When a run is saved and samples are drawn, which saves stay, and how the LoRA's file is called."""

    save_every: int = 5  # save_units from one save to the next; 0 = at the end only
    save_unit: Unit = "minutes"
    keep_last: int = 2  # newest saves that are kept
    keep_every: int = 0  # each n-th save stays as well; 0 = none
    publish: bool = False  # the LoRA of a save that stays goes to the LoRA folder, too
    sample_every: int = 0  # sample_units from one set of samples to the next; 0 = at the end only
    sample_unit: Unit = "steps"
    folder: str = "atelier"  # below the LoRA folder, "/" between its parts; "" = the LoRA folder itself
    file_name: str = "{name}"  # of the LoRA, with any of FIELDS in braces
    overwrite: bool = False  # a file of ours of that name is replaced; else the new one gets a number

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "save_every", 0)
        check_range(self, "keep_last", 1)
        check_range(self, "keep_every", 0)
        check_range(self, "sample_every", 0)
        object.__setattr__(self, "folder", plain_folder(self.folder))
        fill_name(self.file_name, dict.fromkeys(FIELDS, "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExistingConfig(Config):
    """What is done with runs of the same settings, pictures and models that are there already."""

    # resume: take a finished run's result, go on with one that was cut off or was shorter. reuse: take a finished
    # run's result, begin all others anew. fork: begin with the weights and state of a save, under these settings.
    on_existing: Literal["resume", "reuse", "train again", "fork"] = "resume"
    fork_run: str = ""  # name of a run's folder
    fork_step: int = 0  # steps finished in the save that is forked; 0 = its last one

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "fork_step", 0)
        if self.on_existing == "fork" and not self.fork_run:
            raise ValueError("fork needs a run to begin with; name its folder in output/atelier/runs.")
        if self.fork_run and (self.fork_run != plain_name(self.fork_run)):
            raise ValueError(f"{self.fork_run!r} is no name of a run's folder; give one of output/atelier/runs.")


def plain_name(name: str) -> str:
    """Return a file name without extension, in one Unicode form; raises ValueError for what is not one plain name."""
    plain = unicodedata.normalize("NFC", name.strip().removesuffix(".safetensors").strip())
    well = re.fullmatch(r"[\w .()-]+", plain) and plain.strip(". ") == plain and not _RESERVED.fullmatch(plain)
    if not well:
        raise ValueError(
            f"The name {name[:LONGEST]!r} cannot be a file name here; use up to {LONGEST} letters, digits, spaces and "
            "- _ . ( ), no folder, for example my_lora."
        )
    if len(plain) > LONGEST or len(plain.encode()) > MOST_BYTES:
        size = f"{len(plain)} characters ({len(plain.encode())} bytes)"
        raise ValueError(f"The name {plain[:30]}... has {size}; use at most {LONGEST} ({MOST_BYTES} bytes).")
    return plain


def plain_folder(folder: str) -> str:
    """Return a folder below another one, its parts plain names with "/" between; raises ValueError for any other."""
    parts = folder.strip().replace("\\", "/").split("/") if folder.strip() else []
    if any(part.strip() in ("", ".", "..") or ":" in part for part in parts) or len(parts) > 8:
        raise ValueError(
            f"The folder {folder[:LONGEST]!r} must lie inside the LoRA folder; give names with / between, for example "
            "atelier/faces."
        )
    return "/".join(plain_name(part) for part in parts)


def fill_name(pattern: str, values: Mapping[str, object]) -> str:
    """Return a file name from a pattern with FIELDS in braces; raises ValueError for an unknown field or a bad name."""
    unknown = [field for field in re.findall(r"{([^{}]*)}", pattern) if field not in FIELDS]
    if unknown or re.sub(r"{[^{}]*}", "", pattern).strip("{}") != re.sub(r"{[^{}]*}", "", pattern):
        raise ValueError(
            f"The file name {pattern[:LONGEST]!r} can hold {', '.join('{' + field + '}' for field in FIELDS)} and "
            "nothing else in braces, for example {name}-{step}."
        )
    return plain_name(re.sub(r"{([^{}]*)}", lambda found: str(values[found[1]]), pattern))
