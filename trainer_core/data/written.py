"""Write captions and masks beside pictures: where each belongs, what stays, and which files a model has written.

What is written stands in a journal, with the job that wrote it and the content's digest. So a job that was cancelled
goes on where it stopped, and a text that a person has changed since counts as that person's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from PIL import Image

from ..common.access import Access
from ..common.callbacks import Callbacks
from ..common.files import file_digest, written_whole
from ..common.wording import count, names
from ..config import MASK_SUFFIX, CaptionConfig, DatasetConfig, MaskConfig
from .edits import Journal, encoded
from .films import is_film
from .masks import find_mask
from .scan import Index, Picture, list_files, resolve_folder, scan
from .scan.caption_files import TEXT_LIMIT, decode, read_bytes
from .scan.caption_sources import TEXT_EXTENSIONS, captions_beside

PLAIN = frozenset(TEXT_EXTENSIONS) - {".json"}  # endings of texts that hold nothing but a caption
WRITTEN = "written"  # what a change of a job is called
ExistingFile = Literal["keep", "append", "replace"]  # what happens to a text or mask that is there


def pictures_to_see(dataset: DatasetConfig, index: Index, callbacks: Callbacks, access: Access) -> list[Picture]:
    """Scan a dataset for its pictures alone: captions and masks may be missing."""
    concepts = (each.replace(captions=each.captions.replace(source="none")) for each in dataset.concepts)
    return list(scan(DatasetConfig(concepts=tuple(concepts)), index, callbacks, access, reads_masks=False).pictures)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A text or mask that belongs to a picture."""

    picture: Picture
    path: Path
    captions: CaptionConfig = field(default_factory=CaptionConfig)  # how a text is read
    there: bool = False


def texts_of(dataset: DatasetConfig, pictures: Iterable[Picture], access: Access) -> list[WrittenFile]:
    """Find the text of each picture, or where it belongs; ValueError for captions that are in no texts beside."""
    found = []
    for number, (concept, own) in enumerate(zip(dataset.concepts, _by_concept(dataset, pictures), strict=True)):
        captions = concept.captions
        if captions.source != "text_file":
            raise ValueError(
                f"Concept {number + 1} takes its captions from {captions.source}, not from texts beside its pictures; "
                f"set {captions.named('source')} to text_file."
            )
        files = {file.name: file for file in list_files(resolve_folder(concept.folder), concept.recursive, access)}
        shown = [files[picture.name] for picture in own]
        beside = captions_beside(shown, list(files.values()), captions)
        for picture, file in zip(own, shown, strict=True):
            text = beside[file]
            path = text.path if text else picture.path.with_suffix(captions.extensions[0])
            if path.suffix.lower() not in PLAIN:
                raise ValueError(
                    f"{path.name} is no plain text, so no caption is written there; set {captions.named('extensions')} "
                    "to .txt."
                )
            found.append(WrittenFile(picture, path, captions, text is not None))
    return _each_once(found)


def masks_of(dataset: DatasetConfig, pictures: Iterable[Picture], access: Access) -> list[WrittenFile]:
    """Find the mask beside each picture, or where it belongs; ValueError for concepts that have masks already."""
    usual, found = MaskConfig(), []
    for number, (concept, own) in enumerate(zip(dataset.concepts, _by_concept(dataset, pictures), strict=True)):
        if concept.masks is not None:
            raise ValueError(
                f"Concept {number + 1} has masks by {usual.NODE} already; link {usual.NODE} after the node that "
                "writes them."
            )
        files = list_files(resolve_folder(concept.folder), concept.recursive, access)
        masks = {file.name.lower(): file.path for file in files}
        for picture in own:
            mask = find_mask(picture.name, masks, usual)
            there = None if mask is None or is_film(mask) else mask  # a picture comes before a clip of masks
            path = there or picture.path.with_name(picture.path.stem + MASK_SUFFIX)
            found.append(WrittenFile(picture, path, there=mask is not None))
    return _each_once(found)


def _by_concept(dataset: DatasetConfig, pictures: Iterable[Picture]) -> list[list[Picture]]:
    found: list[list[Picture]] = [[] for _ in dataset.concepts]
    for picture in pictures:
        found[picture.concept].append(picture)
    return found


def _each_once(files: list[WrittenFile]) -> list[WrittenFile]:
    """Leave out what another picture has, too: a.png and a.jpg share a text, and a folder may be two concepts."""
    return list({file.path: file for file in reversed(files)}.values())[::-1]


def one_caption(text: str, prefix: str) -> str:
    """Make one line of what a model said, as several lines would be several captions; "" for nothing."""
    line = " ".join(text.split())
    return " ".join(filter(None, (prefix.strip(), line))) if line else ""


def appended(before: str, line: str) -> str:
    """Put a line after a text: after the end of a sentence with a space, else as a further tag."""
    before = before.rstrip()
    return before + (" " if before.endswith((".", "!", "?", "。")) else ", " if before else "") + line


def put_text(
    file: WrittenFile, text: str, existing: ExistingFile, journal: Journal, folders: Collection[Path], onto: str
) -> str:
    """Write a caption as a run reads it, so that it can be undone with others of the change `onto`; return its number.

    Raises ValueError where that fails, also of one there, and OSError.
    """

    def compose(before: bytes | None) -> bytes:
        new = text
        if before is not None and existing == "append":
            new = appended(decode(file.path, before, file.captions.encoding).read(), text)
        return encoded(new + "\n", file.captions, file.path)

    if file.path.is_file():
        read_bytes(file.path, TEXT_LIMIT, "caption file")  # refuses one that is none by its size
    return journal.add(file.path, compose, WRITTEN, folders, onto)


def write_mask(file: WrittenFile, mask: Image.Image) -> None:
    """Write a mask in mode "L" atomically, at the size of its picture."""
    if mask.size != file.picture.size:
        mask = mask.resize(file.picture.size, Image.Resampling.BILINEAR)
    with written_whole(file.path) as temporary:
        mask.save(temporary, format="PNG")


class WritingJournal:
    """What a job has written: a line for each file, in a file of the pack's own."""

    def __init__(self, place: Path, job: str) -> None:
        self.place, self.job = place, job
        self._known: dict[str, tuple[str, str]] = {}  # a file's path -> the job that wrote it, digest of its content
        if place.is_file():
            for line in place.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, TypeError):  # a line that was cut off when the process ended
                    path, job, digest = json.loads(line)
                    self._known[str(path)] = (str(job), str(digest))

    def wrote(self, path: Path) -> bool:
        """Tell whether this job wrote a file, which nobody has changed since."""
        job, digest = self._known.get(str(path), ("", ""))
        return job == self.job and path.is_file() and file_digest(path) == digest

    def add(self, path: Path) -> None:
        """Enter a file that was just written."""
        entry = (self.job, file_digest(path))
        self._known[str(path)] = entry
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with self.place.open("a", encoding="utf-8") as file:
            file.write(json.dumps([str(path), *entry]) + "\n")

    def shorten(self) -> None:
        """Write the journal anew with the newest line of each file that is still there."""
        self._known = {path: entry for path, entry in self._known.items() if Path(path).is_file()}
        with written_whole(self.place) as temporary:
            lines = (json.dumps([path, *entry]) + "\n" for path, entry in self._known.items())
            temporary.write_text("".join(lines), encoding="utf-8")


def journal_of(folder: Path, dataset: DatasetConfig, job: str) -> WritingJournal:
    """Open the journal of a dataset's folders, for a job."""
    folders = sorted(str(resolve_folder(each.folder)) for each in dataset.concepts)
    return WritingJournal(folder / f"{hashlib.sha256(chr(10).join(folders).encode()).hexdigest()[:32]}.jsonl", job)


@dataclass(slots=True)
class WritingState:
    """What became of each picture, by name."""

    kept: int = 0  # there before, of whoever
    done: int = 0  # this job's, from a run before
    written: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)  # the model gave nothing

    def report(self, kind: str, kinds: str) -> str:
        """Say it in one line. kind, kinds: what is written, as one and as several."""
        said = [f"{count(len(self.written), kind, kinds)} written"]
        said += [f"{self.done} written before"] if self.done else []
        said += [f"{self.kept} kept"] if self.kept else []
        line = ", ".join(said) + "."
        if self.empty:
            line += f" Nothing came for {count(self.empty, 'picture')}: {names(self.empty)}."
        return line


def open_files(
    files: Iterable[WrittenFile], existing: ExistingFile, journal: WritingJournal, progress: WritingState
) -> list[WrittenFile]:
    """List the files to be written; count the others."""
    found = []
    for file in files:
        if not file.there:
            found.append(file)
        elif journal.wrote(file.path):
            progress.done += 1
        elif existing == "keep":
            progress.kept += 1
        else:
            found.append(file)
    return found
