"""Find pictures that a person may want to leave out: near-duplicates, blur, borders, marks, equal captions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..common.wording import count, names
from ..config import ONE_EACH
from ..data.fit import KIND, LONGEST, Fit, describe_fits
from ..data.looks import CORNERS, near_duplicates, same_marks
from ..data.plan import Plan
from ..data.scan import Index

BLURRED = 0.7  # Crete's measure, beyond which a picture of 512 pixels has lost its finest two
MOST_BORDER = 0.1  # share of the area in borders of one colour
MOST_ENLARGED = 1.5  # a picture that is enlarged more gets a remark
LEAST_ALIKE = 10  # captions that are named

Kind = Literal["near-duplicates", "blurred", "borders", "marks", "text", "enlarged", "captions", "fit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A remark on pictures, and those that would be left out for it."""

    kind: Kind
    sentence: str
    pictures: tuple[int, ...] = ()  # indices in the manifest
    like: tuple[int, ...] = ()  # those that they look like, which stay


def curate(plan: Plan) -> list[Finding]:
    """List what stands out among the pictures of a plan."""
    found = (_near_duplicates, _blurred, _borders, _marks, _enlarged, _same_captions)
    return [finding for find in found for finding in find(plan)]


def last_fits(plan: Plan, index: Index) -> dict[int, Fit]:
    """List how the losses of each picture compared in the last run that trained it."""
    known = {i: index.known_facts(plan.manifest.pictures[i].digest, KIND) for i in plan.trained}
    return {i: Fit(**facts) for i, facts in known.items() if facts is not None}


def misfits(plan: Plan, fits: Mapping[int, Fit]) -> list[Finding]:
    """Name the pictures that had higher losses than others in the last run that trained them."""
    bad, pictures = {i: fit for i, fit in fits.items() if fit.is_bad}, plan.manifest.pictures
    sentence = describe_fits([(pictures[i].name, " ".join(pictures[i].lines), fit) for i, fit in bad.items()])
    return [Finding(kind="fit", sentence=f"In the last run: {sentence}", pictures=tuple(bad))] if bad else []


def describe_likeness(plan: Plan, alike: Mapping[int, float], most: int) -> list[str]:
    """List sentences on the captions that are least like their pictures; most: pictures that are compared."""
    if not alike:
        return []
    pictures = plan.manifest.pictures
    worst = sorted(alike, key=lambda i: alike[i])[:LEAST_ALIKE]
    each = names(
        (f'{pictures[i].name} {alike[i]:.3f} ("{" ".join(pictures[i].lines)[:LONGEST]}")' for i in worst), len(worst)
    )
    found = [f"The captions that are least like their pictures, by the linked CLIP, the worst first: {each}."]
    if len(pictures) > most:
        found.append(f"Only the first {most} of {len(pictures)} pictures are compared with their captions.")
    return found


def _near_duplicates(plan: Plan) -> Iterator[Finding]:
    """Find pictures that look like an earlier one; exact copies have a note of the scan."""
    pictures = plan.manifest.pictures
    taught = [i for i, concept in enumerate(plan.concepts) if not concept.may_repeat]
    found = near_duplicates([pictures[i].look.hash for i in taught])
    pairs = [(taught[i], taught[first]) for i, first in found]
    pairs = [(i, first) for i, first in pairs if pictures[i].digest != pictures[first].digest]
    if pairs:
        some = count(pairs, "picture looks", "pictures look")
        each = names(f"{pictures[i].name} (like {pictures[first].name})" for i, first in pairs)
        sentence = f"{some} almost like another one, which then counts more often: {each}."
        yield Finding(
            kind="near-duplicates",
            sentence=sentence,
            pictures=tuple(i for i, _ in pairs),
            like=tuple(sorted({first for _, first in pairs})),
        )


def _blurred(plan: Plan) -> Iterator[Finding]:
    found = [i for i, picture in enumerate(plan.manifest.pictures) if picture.look.blur > BLURRED]
    if found:
        some = count(found, "picture looks", "pictures look")
        yield Finding(kind="blurred", sentence=f"{some} blurred: {_names(plan, found)}.", pictures=tuple(found))


def _borders(plan: Plan) -> Iterator[Finding]:
    shares = {i: p.look.border for i, p in enumerate(plan.manifest.pictures) if p.look.border > MOST_BORDER}
    if shares:
        some = count(shares, "picture has", "pictures have")
        each = names(f"{plan.manifest.pictures[i].name} ({share:.0%})" for i, share in shares.items())
        sentence = f"{some} borders of one colour, which are learnt, too: {each}."
        yield Finding(kind="borders", sentence=sentence, pictures=tuple(shares))


def _marks(plan: Plan) -> Iterator[Finding]:
    """Find marks in corners: the same in several pictures of a concept, as a watermark, and text in single ones."""
    pictures, marked = plan.manifest.pictures, set[int]()
    for concept in sorted({picture.concept for picture in pictures}):
        own = [i for i, picture in enumerate(pictures) if picture.concept == concept]
        for corner, same in same_marks([pictures[i].look.marks for i in own]).items():
            found = [own[i] for i in same]
            marked |= set(found)
            mark = f"the same mark in the {CORNERS[corner]} corner, which is learnt, too"
            sentence = f"{len(found)} pictures have {mark}: {_names(plan, found)}; crop or mask it."
            yield Finding(kind="marks", sentence=sentence)
    written = {i: each.look.text for i, each in enumerate(pictures) if each.look.text and i not in marked}
    if written:
        some = count(written, "picture seems", "pictures seem")
        each = names(f"{pictures[i].name} ({CORNERS[int(corners[0])]})" for i, corners in written.items())
        sentence = f"{some} to have text in a corner, which is learnt, too: {each}; crop or mask it."
        yield Finding(kind="text", sentence=sentence)


def _enlarged(plan: Plan) -> Iterator[Finding]:
    """Find pictures that are too small for their buckets."""
    pictures = plan.manifest.pictures
    scales = {i: max(crop.scale(plan.size(i)) for crop in plan.first_crops(i)) for i in range(len(pictures))}
    small = {i: scale for i, scale in scales.items() if scale > MOST_ENLARGED}
    if small:
        some = count(small, "picture is", "pictures are")
        each = names(f"{pictures[i].name} ({scale:.1f}x)" for i, scale in small.items())
        sentence = f"{some} enlarged more than {MOST_ENLARGED:g}x: {each}."
        yield Finding(kind="enlarged", sentence=sentence, pictures=tuple(small))


def _same_captions(plan: Plan) -> Iterator[Finding]:
    """Find captions that several contents of a concept share, where each picture has one of its own."""
    pictures = plan.manifest.pictures
    groups: defaultdict[tuple[int, tuple[str, ...]], dict[str, str]] = defaultdict(dict)
    for picture, concept in zip(pictures, plan.concepts, strict=True):
        own = concept.captions.source in ONE_EACH and any(picture.lines)
        if own and picture.lines != (concept.captions.class_prompt.strip(),):
            groups[picture.concept, picture.lines].setdefault(picture.digest, picture.name)
    same = [list(group.values()) for group in groups.values() if len(group) > 1]
    if same:
        some = count(same, "caption belongs", "captions belong")
        each = "; ".join(names(group, 3) for group in same[:3]) + (f"; and {len(same) - 3} more" if same[3:] else "")
        yield Finding(kind="captions", sentence=f"{some} to several pictures: {each}.")


def _names(plan: Plan, pictures: list[int]) -> str:
    return names(plan.manifest.pictures[i].name for i in pictures)
