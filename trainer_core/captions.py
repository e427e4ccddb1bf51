"""Read caption files and compose the caption of each visit."""

from __future__ import annotations

import codecs
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .config import ConceptConfig, DatasetConfig
from .rng import generator

if TYPE_CHECKING:
    from .scan import Manifest

SECONDARY_SEPARATOR = ";;;"  # glues tags that move and vanish together; becomes a comma
_BOMS = (  # the long ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_text(path: Path) -> str:
    """Read a text file as UTF-8 or as its byte order mark says; raises ValueError naming the file."""
    data = path.read_bytes()
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {encoding} text ({error.reason}); save it as UTF-8.") from error
    if "\0" in text:
        raise ValueError(f"{path} holds NUL characters, as UTF-16 without a mark does; save it as UTF-8.")
    return text


def split_tags(text: str) -> list[str]:
    """Return the comma-separated parts, stripped, without empty ones."""
    return [tag for part in text.split(",") if (tag := part.strip())]


def varies(concept: ConceptConfig) -> bool:
    """Tell whether captions of this concept differ from visit to visit."""
    return concept.shuffle_tags or concept.tag_dropout > 0 or concept.caption_dropout > 0


def compose_caption(text: str, concept: ConceptConfig, *, seed: int, picture: int, visit: int) -> str:
    """Return the final caption of one visit of one picture, a pure function of its arguments.

    Order: split, keep the head, shuffle, drop tags, join, secondary separator, prefix and suffix, drop the
    whole caption. Prefix and suffix come after the shuffle, so that the trigger word stays in front.
    """
    tags = split_tags(text)
    head, flex = tags[: concept.keep_tags], tags[concept.keep_tags :]
    if varies(concept):  # always the same draws, so that one setting does not change what another one draws
        draws = generator(seed, "caption", picture, visit)
        whole, *each = torch.rand(1 + len(flex), generator=draws).tolist()
        if whole < concept.caption_dropout:
            return ""
        if concept.shuffle_tags:
            flex = [flex[i] for i in torch.randperm(len(flex), generator=draws).tolist()]
        flex = [tag for tag, draw in zip(flex, each, strict=True) if draw >= concept.tag_dropout]
    body = ", ".join(head + flex).replace(SECONDARY_SEPARATOR, ",")
    parts = (concept.caption_prefix.strip(), body, concept.caption_suffix.strip())
    return " ".join(part for part in parts if part)


def tag_frequency(manifest: Manifest, dataset: DatasetConfig) -> dict[str, dict[str, int]]:
    """Count in how many captions each tag stands, by folder name: the content of kohya's ss_tag_frequency.

    Tags are lower-case as there; prefix and suffix are counted as tags, glued tags one by one.
    """
    counts: dict[str, Counter[str]] = {}
    for picture in manifest.pictures:
        concept = dataset.concepts[picture.concept]
        parts = (
            concept.caption_prefix,
            picture.caption.replace(SECONDARY_SEPARATOR, ","),
            concept.caption_suffix,
        )
        tags = [tag.lower() for part in parts for tag in split_tags(part)]
        counts.setdefault(Path(concept.folder).name, Counter()).update(tags)
    return {folder: dict(counter.most_common()) for folder, counter in counts.items()}
