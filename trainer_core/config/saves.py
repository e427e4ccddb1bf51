"""Settings of saves: when a run is saved, the names of files, and whether an earlier run is resumed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config, check_choices, check_range

Unit = Literal["steps", "epochs", "minutes"]

FIELDS = ("name", "date", "time", "step", "epoch")  # allowed in a pattern of file names
LONGEST = 100  # characters of a name
MOST_BYTES = 160  # of a name in UTF-8, so that endings and numbers fit into what file systems allow (255)
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[\d¹²³])(\..*)?")  # device names on Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class SavesConfig(Config):
    """When a run is saved and samples are drawn, which saves are kept, and the LoRA's file name."""

    SECTION: ClassVar = "saves"
    NODE: ClassVar = "Saves & Samples"

    save_every: int = 5  # save_units from one save to the next; 0 = at the end only
    save_unit: Unit = "minutes"
    keep_last: int = 2  # number of newest saves to keep
    keep_every: int = 0  # also keep each n-th save; 0 = none
    publish: bool = False  # also copy the LoRA of each n-th save to the LoRA folder
    sample_every: int = 0  # sample_units from one set of samples to the next; 0 = at the end only
    sample_unit: Unit = "steps"
    sample_at_start: bool = False  # also before the first step
    folder: str = "atelier"  # below the LoRA folder, "/" between its parts; "" = the LoRA folder itself
    file_name: str = "{name}"  # of the LoRA, with any of FIELDS in braces
    overwrite: bool = False  # replace a LoRA of that name and of the same run; else the new one gets a number

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
    """What to do if a run of the same settings, pictures and models exists already."""

    SECTION: ClassVar = "existing"
    NODE: ClassVar = "Train LoRA"

    # resume: reuse a finished run's result; resume a stopped or a shorter run. reuse: reuse a finished run's result;
    # start over otherwise. fork: start from the weights and optimizer state of a save, with these settings.
    on_existing: Literal["resume", "reuse", "train again", "fork"] = "resume"
    fork_run: str = ""  # name of a run's folder
    fork_step: int = 0  # step of the save to fork from; 0 = the last save

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "fork_step", 0)
        if self.on_existing == "fork" and not self.fork_run:
            raise ValueError("fork needs a run; set run of Train LoRA to the name of a folder in output/atelier/runs.")
        if self.fork_run and (self.fork_run != plain_name(self.fork_run)):
            raise ValueError(
                f"There is no run {self.fork_run!r}; set run of Train LoRA to a folder in output/atelier/runs."
            )


def plain_name(name: str) -> str:
    """Normalize a file name without extension (Unicode NFC); raises ValueError for anything but one plain name."""
    if len(name) > 10 * LONGEST:  # to normalize it could take minutes
        raise ValueError(f"The name {name[:30]}... has {len(name)} characters; use at most {LONGEST}.")
    plain = unicodedata.normalize("NFC", name.strip().removesuffix(".safetensors").strip())
    well = re.fullmatch(r"[\w .()-]+", plain) and plain.strip(". ") == plain and not _RESERVED.fullmatch(plain)
    if not well:
        raise ValueError(
            f"The name {name[:LONGEST]!r} cannot be a file name; use up to {LONGEST} letters, digits, spaces and - _ . "
            "( ), without a folder, for example my_lora."
        )
    if len(plain) > LONGEST or len(plain.encode()) > MOST_BYTES:
        size = f"{len(plain)} characters ({len(plain.encode())} bytes)"
        raise ValueError(f"The name {plain[:30]}... has {size}; use at most {LONGEST} ({MOST_BYTES} bytes).")
    return plain


def plain_folder(folder: str) -> str:
    """Normalize a relative folder to plain names with "/" between them; raises ValueError for any other folder."""
    parts = folder.strip().replace("\\", "/").split("/") if folder.strip() else []
    if any(part.strip() in ("", ".", "..") or ":" in part for part in parts) or len(parts) > 8:
        raise ValueError(
            f"The folder {folder[:LONGEST]!r} is not inside the LoRA folder; write names separated by /, for example "
            "atelier/faces."
        )
    return "/".join(plain_name(part) for part in parts)


def fill_name(pattern: str, values: Mapping[str, object]) -> str:
    """Fill the FIELDS of a file name pattern; raises ValueError for an unknown field or a bad name."""
    unknown = [field for field in re.findall(r"{([^{}]*)}", pattern) if field not in FIELDS]
    if unknown or re.sub(r"{[^{}]*}", "", pattern).strip("{}") != re.sub(r"{[^{}]*}", "", pattern):
        raise ValueError(
            f"The file name {pattern[:LONGEST]!r} has an unknown field; set file_name of Saves & Samples with "
            f"{', '.join('{' + field + '}' for field in FIELDS)} only, for example {{name}}-{{step}}."
        )
    return plain_name(re.sub(r"{([^{}]*)}", lambda found: str(values[found[1]]), pattern))
