"""Hold out a share of the training pictures for validation, chosen by the seed and their content."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..common.rng import uniforms
from ..common.wording import count, names
from ..config import DatasetConfig, setting
from .scan import Manifest

WHY = "held out for validation"


def hold_out(manifest: Manifest, dataset: DatasetConfig, share: float, seed: int) -> tuple[Manifest, DatasetConfig]:
    """Move a share of the pictures of role train, 0..1, to concepts of role validation, which come after all others.

    Every concept gives about that share and keeps one content at least. The order of files does not matter, and copies
    of a picture stay together. Raises ValueError for a share that leaves no picture to validate.
    """
    if not share:
        return manifest, dataset
    chosen = _choose(manifest, dataset, share, seed)
    concepts, own = [*dataset.concepts], {}
    pictures, moved = [], {}
    for picture in manifest.pictures:
        concept = dataset.concepts[picture.concept]
        if concept.role == "train" and picture.digest in chosen:
            if picture.concept not in own:
                own[picture.concept] = len(concepts)
                concepts.append(concept.replace(role="validation"))
            moved[picture.concept, picture.name] = own[picture.concept]
            picture = replace(picture, concept=own[picture.concept])
        pictures.append(picture)
    held = [name for _, name in moved]
    note = f"Validation holds out {count(held, 'picture')}, which {'is' if len(held) == 1 else 'are'} not trained"
    return replace(
        manifest,
        pictures=tuple(pictures),
        notes=(*manifest.notes, f"{note}: {names(held)}."),
        outcomes=tuple(
            replace(file, concept=moved[file.concept, file.name], why=WHY)
            if (file.concept, file.name) in moved
            else file
            for file in manifest.outcomes
        ),
    ), dataset.replace(concepts=tuple(concepts))


def _choose(manifest: Manifest, dataset: DatasetConfig, share: float, seed: int) -> set[str]:
    """Choose the contents to hold out, by their digests: those that draw the lowest numbers in each concept."""
    contents: defaultdict[int, set[str]] = defaultdict(set)
    known: set[str] = set()
    for picture in sorted(manifest.pictures, key=lambda picture: picture.concept):
        if dataset.concepts[picture.concept].role == "train" and picture.digest not in known:
            known.add(picture.digest)
            contents[picture.concept].add(picture.digest)
    chosen: set[str] = set()
    before = 0
    for digests in contents.values():
        # Rounded as a running total, so that concepts of few pictures give their share together.
        number = round(share * (before + len(digests))) - round(share * before)
        drawn = sorted(digests, key=lambda digest: (uniforms(seed, f"hold out/{digest}"), digest))
        chosen |= set(drawn[: min(number, len(digests) - 1)])
        before += len(digests)
    if not chosen:
        raise ValueError(
            f"validation_share {share:g} of {count(known, 'picture')} leaves no picture to validate and one to train; "
            f"set {setting('train.validation_share')} higher, add pictures, or set it to 0."
        )
    return chosen
