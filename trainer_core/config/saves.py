"""Settings of saves: when a run is saved, the names of files, and whether an earlier run is resumed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar, Literal

from .base import Config
from .rows import row

IntervalUnit = Literal["steps", "epochs", "minutes"]

FIELDS = ("name", "date", "time", "step", "epoch")  # allowed in a pattern of file names
LONGEST = 100  # characters of a name
MOST_LORAS = 60  # sampled steps whose LoRA is kept, the newest: those whose samples the page shows
PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl")  # endings of files that can run code
MOST_BYTES = 160  # of a name in UTF-8, so that endings and numbers fit into what file systems allow (255)
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[\d¹²³])(\..*)?")  # device names on Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class SavesConfig(Config):
    """When a run is saved and samples are drawn, which saves are kept, and the LoRA's file name."""

    SECTION: ClassVar = "saves"
    NODE: ClassVar = "Saves & Samples"

    save_every: int = row(
        5,
        "Saves the run this often, in save_unit: everything needed to resume, and the LoRA so far. Cancel, errors "
        "and closing ComfyUI save as well. 0 = only those and the end.",
        span=(0, 1_000_000),
    )
    save_unit: IntervalUnit = row("minutes", "The unit of save_every: steps, epochs or minutes.")
    keep_last: int = row(
        2,
        "How many of the newest saves are kept in the run's folder; older ones are deleted. A save holds the "
        "optimizer's state, too: with AdamW it is about seven times as large as the LoRA.",
        span=(1, 1000),
    )
    keep_every: int = row(
        0,
        "Every n-th save is also kept for good, to compare or to fork later. 0 = none.",
        span=(0, 100_000),
        advanced=True,
    )
    publish: bool = row(
        False,
        "On: the LoRA of every save that is kept for good also goes to the LoRA folder, where loaders list it at once.",
        advanced=True,
    )
    sample_every: int = row(
        0,
        "Draws samples this often, in sample_unit: a picture for each line of sample_prompts, shown on Train LoRA. "
        f"The LoRA of each sampled step is kept, of the newest {MOST_LORAS}, so that you can take it. 0 = at the end "
        "only.",
        span=(0, 1_000_000),
    )
    sample_unit: IntervalUnit = row("steps", "The unit of sample_every: steps, epochs or minutes.")
    folder: str = "atelier"  # below the LoRA folder, "/" between its parts; "" = the LoRA folder itself
    file_name: str = row(
        "{name}",
        "Where the LoRA is saved inside models/loras: folders and a name, separated by /, for example "
        "faces/{name}-{date}. {name} is that of Train LoRA; {date}, {time}, {step} and {epoch} are those of the "
        "save.",
    )
    overwrite: bool = row(
        False,
        "On: replaces a LoRA of this name if it is of the same run: same settings, pictures and models. Any other "
        "file stays, and the new one gets a number. Off: it always gets a number.",
        advanced=True,
    )
    sample_at_start: bool = row(
        False,
        "On: samples are also drawn before the first step, to compare with. A run that resumes does not draw them "
        "again.",
        advanced=True,
    )

    def check(self) -> None:
        """Refuse a folder outside of the LoRA folder, and what cannot be a file name."""
        object.__setattr__(self, "folder", plain_folder(self.folder))
        fill_name(self.file_name, dict.fromkeys(FIELDS, "0"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExistingConfig(Config):
    """What to do if a run of the same settings, pictures and models exists already."""

    SECTION: ClassVar = "existing"
    NODE: ClassVar = "Train LoRA"

    on_existing: Literal["resume", "reuse", "train again", "fork"] = row(
        "resume",
        "If a run with these settings, pictures and models exists. resume (default): reuse a finished run's result,"
        " resume an unfinished or shorter one. reuse: only reuse a finished one. train again: start a new run. "
        "fork: start a new run from the weights and state of any run's save, with these settings.",
        optional=True,
    )
    fork_run: str = row(
        "",
        "The run's folder in output/atelier/runs, as the report of that run names it.",
        acts_with=("on_existing", ("fork",)),
        label="run",
    )
    fork_step: int = row(
        0,
        "The save to start from, by its step. 0 = the last one.",
        span=(0, 100_000_000),
        acts_with=("on_existing", ("fork",)),
        label="step",
    )

    def check(self) -> None:
        """Refuse a fork without a run, and a run that is no folder's name."""
        if self.on_existing == "fork" and not self.fork_run:
            raise ValueError(
                f"fork needs a run; set {self.named('fork_run')} to the name of a folder in output/atelier/runs."
            )
        if self.fork_run and (self.fork_run != plain_name(self.fork_run)):
            raise ValueError(
                f"There is no run {self.fork_run!r}; set {self.named('fork_run')} to a folder in output/atelier/runs."
            )


def plain_name(name: str) -> str:
    """Normalize a file name without extension (Unicode NFC); raises ValueError for anything but one plain name."""
    if len(name) > 10 * LONGEST:  # to normalize it could take minutes
        raise ValueError(f"The name {name[:30]}... has {len(name)} characters; use at most {LONGEST}.")
    plain = unicodedata.normalize("NFC", name.strip().removesuffix(".safetensors").strip())
    bare = plain.strip(". ")
    if PurePath(plain).suffix.lower() in PICKLED:
        raise ValueError(
            f"The name {plain[:LONGEST]!r} asks for a pickle file, which can run code when it is opened; write "
            f"{PurePath(plain).stem[:LONGEST]}: files are written as .safetensors, which every program reads."
        )
    if not bare or not re.fullmatch(r"[\w .()-]+", plain) or RESERVED.fullmatch(plain):
        raise ValueError(
            f"The name {name[:LONGEST]!r} cannot be a file name; use up to {LONGEST} letters, digits, spaces and - _ . "
            "( ), without a folder, for example my_lora."
        )
    if bare != plain:
        raise ValueError(f"The name {name[:LONGEST]!r} begins or ends with a dot; write {bare[:LONGEST]}.")
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
            f"The file name {pattern[:LONGEST]!r} has an unknown field; set {SavesConfig.named('file_name')} with "
            f"{', '.join('{' + field + '}' for field in FIELDS)} only, for example {{name}}-{{step}}."
        )
    return plain_name(re.sub(r"{([^{}]*)}", lambda found: str(values[found[1]]), pattern))
