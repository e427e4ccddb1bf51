"""List the pictures of a plan for a page: how each is trained, what stands out, which captions can be changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.access import Access
from ..common.wording import say
from ..config import CaptionConfig, ConceptConfig, setting
from ..data.captions import plain_caption
from ..data.edits import LARGEST_ENTRY, content_of, fingerprint_of
from ..data.plan import Plan
from ..data.scan import Index, list_files, resolve_folder
from ..data.scan.caption_files import caption_lines, decode
from ..data.scan.caption_sources import captions_beside
from ..models.base import CaptionLengths
from .curation import curate, last_fits, misfits
from .preview import sample_in_epoch

SHORT = 16  # digits of a picture's digest, which its address in a page carries


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionFile:
    """The text file of a picture, which a person may change."""

    path: Path
    text: str  # "" without a file
    seen: str  # its fingerprint


def list_shown(plan: Plan, index: Index, concepts: Collection[int], origin: Mapping[Path, int]) -> list[dict[str, Any]]:
    """Describe for a page each picture of some concepts, as the sheet of Dataset Preview draws it in the first epoch.

    cut: share of the picture, 0..1. corners: of the trained part, as shares of width and height. repeats: visits in an
    epoch. marks: kinds of what stands out. fit: ratio, trend and weight of the last run that trained it. file: of the
    caption, "" where it cannot be changed. origin: the concept in which each file was found.
    """
    marks: defaultdict[int, list[str]] = defaultdict(list)
    fits = last_fits(plan, index)
    for finding in [*curate(plan), *misfits(plan, fits)]:
        for i in {*finding.pictures, *finding.like}:  # both of a pair, to be compared
            marks[i].append(finding.kind)
    for i, fit in fits.items():
        marks[i] += fit.marks
    pictures = plan.manifest.pictures
    shown = []
    for i, picture in enumerate(pictures):
        number = picture.concept if picture.concept in concepts else origin.get(picture.path, -1)
        if number not in concepts:
            continue
        sample, remark = sample_in_epoch(plan, i, 0)
        size, captions = picture.size, plan.dataset.concepts[number].captions
        caption = _caption_file(picture.text or _place_of_new(picture.path, captions), captions)
        shown.append(
            {
                "concept": number,
                "name": picture.name,
                "digest": picture.digest[:SHORT],
                "size": size,
                "bucket": sample.crop.bucket,
                "cut": round(sample.crop.crop_share(size), 3),
                "scale": round(sample.crop.scale(size), 3),
                "corners": [[round(x / size[0], 4), round(y / size[1], 4)] for x, y in sample.crop.corners(size)],
                "repeats": float(plan.rates[i]) if plan.concepts[i].role != "validation" else 0,
                "remark": remark,
                "mask": picture.mask is not None,
                "marks": marks[i],
                "fit": [fits[i].ratio, fits[i].trend, fits[i].weight] if i in fits else None,
                "file": caption.path.name if caption else "",
                "text": caption.text if caption else "\n".join(picture.lines),
                "seen": caption.seen if caption else "",
            }
        )
    return shown


def caption_files(
    concept: ConceptConfig, access: Access, wanted: Callable[[str, Path], bool] = lambda name, path: True
) -> dict[str, CaptionFile]:
    """Read the text file of each picture of a concept; of one without a file, where a new one belongs.

    wanted: by the picture's name and the caption's place. Pictures are left out whose caption is no text file beside
    them, a link to elsewhere, in another encoding, or cannot be read; raises OSError, and ValueError where all are
    longer than a page shows.
    """
    found, left = dict[str, CaptionFile](), LARGEST_ENTRY
    for name, path in _places(concept, access):
        if not wanted(name, path) or not access.allows(path):
            continue
        file = _caption_file(path, concept.captions)
        left -= len(file.text) if file else 0
        if left < 0:
            raise ValueError(say("The captions of this folder are too long to be shown; divide it into several."))
        if file:
            found[name] = file
    return found


def _places(concept: ConceptConfig, access: Access) -> Iterator[tuple[str, Path]]:
    """Yield the name of each file that may be a picture, and the place of its caption."""
    if concept.captions.source != "text_file":
        return
    from ..data.films import trainable_extensions

    folder, endings = resolve_folder(concept.folder), trainable_extensions()
    files = [file for file in list_files(folder, concept.recursive, access) if not file.ignored]
    pictures = [file for file in files if file.extension in endings]
    for file, text in captions_beside(pictures, files, concept.captions).items():
        yield file.name, text.path if text else _place_of_new(file.path, concept.captions)


def _place_of_new(picture: Path, captions: CaptionConfig) -> Path:
    return picture.with_suffix(captions.extensions[0])


def _caption_file(path: Path, captions: CaptionConfig) -> CaptionFile | None:
    """Read the text file of a picture, or one that is not there yet; None for what cannot be changed as text."""
    if captions.source != "text_file" or path.suffix.lower() == ".json":
        return None
    with suppress(OSError, ValueError):  # the scan says so
        content = content_of(path)
        text = "" if content is None else decode(path, content, captions.encoding).read()
        return CaptionFile(path=path, text=text, seen=fingerprint_of(content))
    return None


def where_captions_are(concept: ConceptConfig) -> str:
    """Say why the captions of a concept cannot be changed one by one; "" where they can."""
    captions = concept.captions
    if captions.source == "text_file":
        return ""
    if captions.source in ("table", "one_file"):
        name = captions.file.strip() or "metadata.jsonl"
        return say("These captions live in one file, {0}; change them there.", name)
    if captions.source == "none":
        return say("No captions are read; set {0} to text_file to write some.", setting("captions.source"))
    return say("These captions are names of files or folders; set {0} to text_file.", setting("captions.source"))


def describe_caption(text: str, captions: CaptionConfig, limits: CaptionLengths) -> dict[str, Any]:
    """Compose a caption as a page shows it while it is written, with its tokens.

    caption: as a visit without random draws trains it. cut: its end that no text encoder reads. Raises ValueError.
    """
    whole = plain_caption(caption_lines(text, "draw"), captions)
    rest = limits.cut(whole, {})[0] if limits.cut and limits.count_tokens(whole, {}) > limits.max_tokens else ""
    return {
        "caption": whole,
        "prefix": captions.prefix.strip(),
        "suffix": captions.suffix.strip(),
        "tokens": limits.count_tokens(whole, {}),
        "window": limits.window,
        "cut": rest,
    }


def chosen_files(
    concepts: Sequence[ConceptConfig], access: Access, pictures: Sequence[tuple[int, str]]
) -> Mapping[tuple[int, str], CaptionFile]:
    """Read the caption files of chosen pictures, (concept, name); raises ValueError for one that has none."""
    wanted: defaultdict[int, set[str]] = defaultdict(set)
    for number, name in pictures:
        if not 0 <= number < len(concepts):
            raise ValueError("There is no such concept any more; open the pictures again.")
        wanted[number].add(name)
    found: dict[tuple[int, str], CaptionFile] = {}
    for number, names in wanted.items():
        own = caption_files(concepts[number], access, lambda name, _, names=names: name in names)
        if missing := names - own.keys():
            raise ValueError(say("{0} has no caption file that can be changed here.", min(missing)))
        found |= {(number, name): file for name, file in own.items()}
    return found
