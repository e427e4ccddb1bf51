"""Scan the folders of a dataset: find, decode and check every picture and clip, with its caption, mask and controls.

`folder.py` lists files, `index.py` knows those seen before, `pictures.py` decodes, `clips.py` chooses frames. Each file
ends in `report.py`: trained, left out, or an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...common.access import ANYWHERE, Access
from ...common.axes import Size
from ...common.callbacks import Callbacks
from ...common.disk_errors import reason
from ...common.wording import count, names, printable
from ...config import ClipConfig, ConceptConfig, DatasetConfig, node, setting
from ..clips import Clip
from ..controls import Control, control_folders
from ..films import FILM_EXTENSIONS, trainable_extensions
from ..images import PACKAGES, picture_extensions, strict_decoding
from ..looks import Look
from ..masks import mask_endings, mask_folder
from .caption_sources import TEXT_EXTENSIONS, captions_beside, read_captions
from .caption_tables import CONTROL_COLUMNS, TABLES
from .clips import clips_among, tell_fates
from .control_files import read_controls, read_named
from .folder import (
    ELSEWHERE,
    UNOPENED,
    File,
    file_at,
    folder_repeats,
    list_files,
    natural_order,
    numbered,
    refused,
    resolve_folder,
    unlisted,
)
from .index import PLACE, Index
from .mask_files import read_masks
from .own_file import OWN_FILE, Changed, OwnFile, OwnSettings, find_own, own_of, read_own, write_own
from .pictures import UNREADABLE_EXTENSIONS, examine_pictures, nothing_found, pictures_among
from .report import FileOutcome, Report

__all__ = [
    "OWN_FILE",
    "PLACE",
    "Changed",
    "File",
    "FileOutcome",
    "Index",
    "Manifest",
    "OwnSettings",
    "Picture",
    "count",
    "file_at",
    "fingerprint",
    "folder_repeats",
    "glance",
    "list_files",
    "manifest_digest",
    "manifest_parts",
    "names",
    "natural_order",
    "own_of",
    "printable",
    "read_own",
    "resolve_folder",
    "scan",
    "write_own",
]


USUAL = OwnSettings()
OWN_PART = "settings of single pictures"  # of the parts of a dataset
NOWHERE: tuple[Path, list[File], list[File], OwnFile] = (Path(), [], [], {})  # without pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One usable picture or clip with its caption and mask."""

    path: Path
    name: str  # relative to the concept's folder, posix
    concept: int  # index in DatasetConfig.concepts
    width: int  # pixels, upright
    height: int
    digest: str  # sha256 of the file's bytes
    lines: tuple[str, ...] = ()  # of its caption text
    text: Path | None = None  # the file of that text, where it has one of its own
    repeats: int = 1  # from the name of its folder, times its own
    own: OwnSettings = field(default_factory=OwnSettings)  # of the folder's own file
    mask: Path | None = None  # the picture's own path if its alpha channel is the mask
    mask_digest: str = ""  # "" without a mask
    mask_moves: bool = False  # it is a clip, with a mask for each frame of the file
    controls: tuple[Control, ...] = ()  # one of each folder of control pictures, for an edit model
    other_end: Control | None = None  # the other picture of its pair
    look: Look = field(default_factory=Look)  # of a clip: of its first frame
    clip: Clip | None = None  # the frames that are trained; None for a picture

    @property
    def size(self) -> Size:
        """Width and height."""
        return self.width, self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All pictures of a dataset in a stable order, what happened to each file, and notes for the user."""

    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()
    outcomes: tuple[FileOutcome, ...] = ()


def scan(
    dataset: DatasetConfig,
    index: Index | None = None,
    callbacks: Callbacks | None = None,
    access: Access = ANYWHERE,
    *,
    reads_masks: bool = True,
) -> Manifest:
    """Read and check a whole dataset; raises one ValueError that names every problem and its remedy.

    index: remembers the contents of files across calls; None reads all files again. access: the places that may be
    read; what lies elsewhere is a problem like any other. reads_masks: False only tells masks and pictures apart.
    """
    if index is None:
        with Index() as index:
            return scan(dataset, index, callbacks, access, reads_masks=reads_masks)
    if not dataset.concepts:
        raise ValueError(f"The dataset has no concept; link {node('concepts')} with a folder of pictures.")
    pictures: list[Picture] = []
    reports: list[Report] = []
    with strict_decoding():
        for number, concept in enumerate(dataset.concepts):
            reports.append(Report(concept=concept, access=access, reads_masks=reads_masks))
            pictures += _read_concept(number, reports[-1], index, callbacks or Callbacks())
    if errors := [error for report in reports for error in report.errors]:
        raise ValueError(printable(" ".join(errors)))
    notes = [note for report in reports for note in report.notes]
    first: dict[str, Picture] = {}
    taught = [p for p in pictures if not dataset.concepts[p.concept].may_repeat]
    copies = [p.name for p in taught if first.setdefault(p.digest, p) is not p]
    notes += _describe_leaks(taught, dataset)
    if copies:
        some = count(copies, "picture repeats", "pictures repeat")
        notes.append(f"{some} another one exactly: {names(copies)}.")
    outcomes = (
        FileOutcome(concept=number, name=name, outcome=outcome, why=why)
        for number, report in enumerate(reports)
        for name, (outcome, why) in report.outcomes.items()
    )
    return Manifest(pictures=tuple(pictures), notes=tuple(map(printable, notes)), outcomes=tuple(outcomes))


def _describe_leaks(pictures: list[Picture], dataset: DatasetConfig) -> list[str]:
    """List a sentence on validation pictures with the same content as trained ones."""
    roles = {(p.concept, p.name): p.own.role or dataset.concepts[p.concept].role for p in pictures}
    held = [p for p in pictures if roles[p.concept, p.name] == "validation"]
    trained = {p.digest: p.name for p in pictures if roles[p.concept, p.name] != "validation"}
    leaks = [f"{p.name} (trained as {trained[p.digest]})" for p in held if p.digest in trained]
    if not leaks:
        return []
    some = count(leaks, "validation picture is", "validation pictures are")
    return [
        f"{some} trained, too, so the validation loss cannot tell what is learnt by heart: {names(leaks)}. Remove them "
        "from one of the two folders."
    ]


class Glance(NamedTuple):
    """What a folder holds, by the names of its files."""

    pictures: int
    films: int  # that move by their names; a gif may be either, and is a picture here
    uncaptioned: int  # of those that are trained


def glance(concept: ConceptConfig, access: Access = ANYWHERE, *, takes_films: bool = True) -> Glance:
    """Count a concept's pictures and films, and those without a caption, by their names; nothing is decoded.

    takes_films: whether the model does; else these are trained by nobody. Only a file that holds all captions is read.
    Raises the ValueError of a scan for a folder that it could not use.
    """
    report = Report(concept=concept.replace(clips=concept.clips or ClipConfig(step=1)), access=access)
    folder, files, found, _ = _find_pictures(0, report)
    films = sum(file.extension in FILM_EXTENSIONS for file in found)
    if films and not takes_films:
        report.concept = concept.replace(clips=None)
        folder, files, found, _ = _find_pictures(0, report)
    if report.errors:
        raise ValueError(printable(" ".join(report.errors)))
    pictures = sum(file.extension not in FILM_EXTENSIONS for file in found)
    captions = concept.captions.replace(missing="error")
    if captions.source == "text_file":
        without = sum(text is None for text in captions_beside(found, files, captions).values())
        return Glance(pictures, films, without)
    report.concept = report.concept.replace(captions=captions, on_problem="leave_out")
    lines = read_captions(folder, found, files, report)
    if report.errors:
        raise ValueError(printable(" ".join(report.errors)))
    return Glance(pictures, films, len(found) - len(lines))


def _find_pictures(number: int, report: Report) -> tuple[Path, list[File], list[File], OwnFile]:
    """List a concept's folder, its files, the pictures among them that are not left out, and what is set for each.

    Without any the report has an error.
    """
    concept = report.concept
    if not concept.folder.strip():
        report.errors.append(
            f"Concept {number + 1} has no folder; set its {setting('concepts.folder')} to its pictures."
        )
        return NOWHERE
    folder = resolve_folder(concept.folder)
    if not report.access.allows(folder):
        report.errors.append(refused(folder, setting("concepts.folder")))
        return NOWHERE
    if not os.path.isdir(folder):
        kind = "is a file" if os.path.exists(folder) else "does not exist"
        report.errors.append(f"The folder {folder} {kind}; check {setting('concepts.folder')}.")
        return NOWHERE
    try:
        files = list_files(folder, concept.recursive, report.access)
    except OSError as error:
        report.errors.append(unlisted(error))
        return NOWHERE
    for file in files:
        report.outcomes[file.name] = ("not used", file.ignored or "not a picture")
    kinds = {
        *trainable_extensions(),
        *map(str.lower, concept.captions.extensions),
        *([""] if concept.recursive else []),
    }
    if elsewhere := [
        file.name for file in files if file.ignored == ELSEWHERE and (file.extension in kinds or file.name == OWN_FILE)
    ]:
        some = count(elsewhere, "link leads", "links lead")
        sentence = f"{some} out of {folder} to a place that may not be read: {names(elsewhere)}"
        report.problem(elsewhere, ELSEWHERE, sentence, "allow that folder, or copy the files")
    if unopened := [file.name for file in files if file.ignored == UNOPENED]:
        some = count(unopened, "folder", "folders")
        why = "its path is too long, or its name ends in a dot or a space"
        report.problem(
            unopened, UNOPENED, f"{some} in {folder} cannot be opened: {names(unopened)}; {why}", "rename it"
        )
    files = [file for file in files if not file.ignored]
    report.named = read_named(folder, files, concept, report.access)
    found = pictures_among(folder, files, report)
    if not found:
        if not report.errors:
            report.errors.append(nothing_found(folder, files, report))
        return NOWHERE
    own = _read_own(folder, files, found, report)
    if found and all(own.get(file.name, USUAL).leave_out for file in found) and not report.errors:
        report.errors.append(f"{folder / OWN_FILE} leaves out every picture; let one be trained, or delete the file.")
    found = [file for file in found if not own.get(file.name, USUAL).leave_out]
    return folder, [file for file in files if file.path.name != OWN_FILE], found, own


def _read_own(folder: Path, files: list[File], found: list[File], report: Report) -> OwnFile:
    """Read what the folder's own file sets for each picture; pictures that it leaves out are reported."""
    beneath = [file.name for file in files if file.path.name == OWN_FILE and file.name != OWN_FILE]
    if beneath:
        do = "it counts" if len(beneath) == 1 else "they count"
        report.notes.append(f"{names(beneath)} of {folder}: {do} only where that folder itself is a dataset's folder.")
    path = folder / OWN_FILE
    if not any(file.name == OWN_FILE for file in files):
        return {}
    try:
        settings, _ = read_own(path.parent)
    except (ValueError, OSError) as error:
        report.errors.append(
            str(error) if isinstance(error, ValueError) else f"{path} cannot be opened ({reason(error)})."
        )
        return {}
    report.outcomes[OWN_FILE] = ("settings", "of single pictures")
    known = find_own(settings, [file.name for file in found])
    if unknown := settings.keys() - known.values():
        some = count(unknown, "entry of", "entries of")
        verb = "names" if len(unknown) == 1 else "name"
        report.notes.append(f"{some} {OWN_FILE} {verb} no picture in {folder}: {names(sorted(unknown))}.")
    out = [name for name, own in known.items() if settings[own].leave_out]
    report.outcomes |= dict.fromkeys(out, ("left out", f"by {OWN_FILE}"))
    if out:
        report.notes.append(f"{OWN_FILE} leaves out {count(out, 'picture')}: {names(out)}.")
    return {name: settings[own] for name, own in known.items()}


def _read_concept(number: int, report: Report, index: Index, callbacks: Callbacks) -> list[Picture]:
    """Read one concept's pictures; pictures with a problem are left out and reported."""
    concept = report.concept
    folder, files, found, own = _find_pictures(number, report)
    if not found:
        return []
    facts, digests = examine_pictures(folder, found, report, index, callbacks)
    clips = clips_among(folder, facts, report)
    facts = {file: fact for file, fact in facts.items() if file.name in clips or "rate" not in fact}
    # If problems stop the run, report all of them at once, also the captions of broken pictures.
    captions = read_captions(folder, found if concept.on_problem == "stop" else list(facts), files, report)
    masks = read_masks(folder, facts, report, index, callbacks)
    controls = read_controls(folder, facts, report, index, callbacks)
    pictures = [
        Picture(
            path=file.path,
            name=file.name,
            concept=number,
            width=fact["width"],
            height=fact["height"],
            digest=digests[file.name],
            lines=captions[file.name],
            text=report.texts.get(file.name),
            repeats=own.get(file.name, USUAL).repeats * (folder_repeats(file.name) if concept.folder_repeats else 1),
            own=own.get(file.name, USUAL),
            mask=masks[file.name].path,
            mask_digest=masks[file.name].digest,
            mask_moves=masks[file.name].moves,
            controls=() if concept.paired else controls[file.name],
            other_end=controls[file.name][0] if concept.paired else None,
            look=Look(**fact["look"]),
            clip=clips.get(file.name),
        )
        for file, fact in facts.items()
        if file.name in captions and file.name in masks and file.name in controls
    ]
    report.outcomes |= {picture.name: ("picture", "") for picture in pictures if picture.clip is None}
    tell_fates(folder, {picture.name: picture.clip for picture in pictures if picture.clip}, facts, report)
    repeated = Counter(
        picture.name.split("/")[0]
        for picture in pictures
        if concept.folder_repeats and folder_repeats(picture.name) > 1
    )
    for name in repeated:
        report.notes.append(f"The pictures of {name} are repeated {numbered(name)[0]} times, as its name says.")
    if not pictures and not report.errors:
        reasons = " ".join(report.notes)
        report.errors.append(f"No picture of {folder} can be used; fix or replace some. {reasons}")
    return pictures


def manifest_digest(manifest: Manifest) -> str:
    """Compute the sha256 of the training data: contents, captions, masks, control pictures and concepts.

    Paths and times do not count.
    """
    parts = [
        (p.concept, p.digest, p.lines, p.repeats, p.mask_digest, *_digests(p), *_own(p)) for p in manifest.pictures
    ]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


def manifest_parts(manifest: Manifest) -> dict[str, str]:
    """Compute the sha256 of each part of the training data, to tell which of them changed between two runs."""
    parts = {
        "pictures": [(p.concept, p.digest, p.repeats // p.own.repeats) for p in manifest.pictures],
        "captions": [p.lines for p in manifest.pictures],
        "masks": [p.mask_digest for p in manifest.pictures],
    }
    if any(map(_digests, manifest.pictures)):
        parts["control pictures"] = [_digests(p) for p in manifest.pictures]
    if any(p.own != USUAL for p in manifest.pictures):
        parts[OWN_PART] = [(p.concept, p.digest, p.own.to_dict()) for p in manifest.pictures if p.own != USUAL]
    return {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}


def _own(picture: Picture) -> list[object]:
    """List what the folder's own file sets for a picture, and no other value shows."""
    return [picture.own.role, picture.own.focus] if picture.own.role or picture.own.focus else []


def _digests(picture: Picture) -> list[str]:
    """List the digests of a picture's control pictures."""
    return [control.digest for control in (*picture.controls, picture.other_end) if control is not None]


def fingerprint(
    dataset: DatasetConfig, index: Index | None = None, access: Access = ANYWHERE, *, any_ending: bool = False
) -> str:
    """Compute a hash of the settings, and of the names and contents of all files that a scan could read.

    Decodes nothing, and never raises for the state of the disk. With an index, only changed files are read.
    any_ending: captions may be in files of any ending; of unusual ones names, sizes and times count.
    """
    if index is None:
        with Index() as index:
            return fingerprint(dataset, index, access, any_ending=any_ending)
    total = hashlib.sha256(dataset.digest().encode())
    for concept in dataset.concepts:
        if concept.folder.strip():
            for text in _contents(concept, index, access, any_ending=any_ending):
                total.update(text.encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def _contents(concept: ConceptConfig, index: Index, access: Access, *, any_ending: bool) -> Iterable[str]:
    """Yield names and digests of the files that a concept's scan could read."""
    captions, masks, folder = concept.captions, concept.masks, resolve_folder(concept.folder)
    texts = TEXT_EXTENSIONS if any_ending else tuple(map(str.lower, captions.extensions))
    endings = (*trainable_extensions(), *PACKAGES, *UNREADABLE_EXTENSIONS, *texts, *TABLES)

    def listing(place: Path, recursive: bool, endings: tuple[str, ...], *, all_others: bool = False) -> Iterable[str]:
        return _listing(place, recursive, endings, index, access, all_others=all_others)

    yield from listing(folder, concept.recursive, endings, all_others=any_ending)
    if masks is not None and mask_folder(folder, masks) != folder:
        yield from listing(mask_folder(folder, masks), True, mask_endings(masks.suffixes))
    for place in control_folders(folder, concept.controls):
        yield from listing(place, True, (*picture_extensions(), *PACKAGES))
    if captions.source == "table" and access.allows(folder):
        yield from _named(folder, concept, index, access)
    if captions.source in ("one_file", "table") and captions.file.strip():
        named = folder / captions.file.strip()
        yield from listing(named.parent, False, (named.name.lower(),))


def _named(folder: Path, concept: ConceptConfig, index: Index, access: Access) -> Iterable[str]:
    """Yield digests of the control pictures that the caption table names."""
    try:
        files = [file for file in list_files(folder, concept.recursive, access) if not file.ignored]
    except OSError as error:
        yield str(error)
        return
    named = read_named(folder, files, concept, access, CONTROL_COLUMNS)  # whichever a node behind this one takes
    paths = {path for row in named.values() for path in row.values()}
    there = [file_at(path) for path in sorted(paths) if access.allows(path) and os.path.isfile(path)]
    for file, digest in zip(there, index.digests(there), strict=True):
        yield f"{file.name}\0{digest}\n"


def _listing(
    folder: Path, recursive: bool, endings: tuple[str, ...], index: Index, access: Access, *, all_others: bool
) -> Iterable[str]:
    """Yield names and digests of the files in a folder that end in one of `endings`; nothing where none may be read.

    all_others: with names, sizes and times of all other files.
    """
    if not access.allows(folder):
        return
    try:
        listed = list_files(folder, recursive, access)
    except OSError as error:  # a folder without permission
        yield str(error)
        return
    yield str(os.path.isdir(folder))
    seen = [file for file in listed if not file.ignored]
    files = [file for file in seen if file.name.lower().endswith(endings)]
    for file, digest in zip(files, index.digests(files), strict=True):
        yield f"{file.name}\0{digest}\n"
    if all_others:
        for file in seen:
            if not file.name.lower().endswith(endings):
                yield f"{file.name}\0{file.size} {file.mtime_ns}\n"
