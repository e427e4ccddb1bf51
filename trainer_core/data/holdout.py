"""Hold out a share of the training pictures for validation, chosen by the seed and their content."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..common.rng import uniforms
from ..common.wording import count, names
from ..config import DatasetConfig, setting
from .looks import alike
from .roles import with_roles
from .scan import Manifest

WHY = "held out for validation"


def hold_out(manifest: Manifest, dataset: DatasetConfig, share: float, seed: int) -> tuple[Manifest, DatasetConfig]:
    """Move a share of the pictures of role train, 0..1, to concepts of role validation, which come after all others.

    Every concept gives about that share and keeps one content at least. The order of files does not matter, and copies
    and near-duplicates of a picture stay together. Raises ValueError for a share that leaves no picture to validate.
    """
    if not share:
        return manifest, dataset
    chosen = _choose(manifest, dataset, share, seed)
    held = [
        picture
        for picture in manifest.pictures
        if dataset.concepts[picture.concept].role == "train" and picture.digest in chosen
    ]
    note = f"Validation holds out {count(held, 'picture')}, which {'is' if len(held) == 1 else 'are'} not trained"
    noted = replace(manifest, notes=(*manifest.notes, f"{note}: {names(picture.name for picture in held)}."))
    roles = {(picture.concept, picture.name): "validation" for picture in held}
    return with_roles(noted, dataset, roles, why=WHY)


def _choose(manifest: Manifest, dataset: DatasetConfig, share: float, seed: int) -> set[str]:
    """Choose the contents to hold out, by their digests: those that draw the lowest numbers in each concept."""
    pictures = [picture for picture in manifest.pictures if dataset.concepts[picture.concept].role == "train"]
    left: defaultdict[int, set[str]] = defaultdict(set)  # contents that each concept trains
    for picture in pictures:
        left[picture.concept].add(picture.digest)
    known = {picture.digest: picture.look.hash for picture in pictures}
    groups: defaultdict[int, list[frozenset[str]]] = defaultdict(list)  # by the first concept that has one of them
    for group in alike(known):
        groups[min(concept for concept, own in left.items() if not own.isdisjoint(group))].append(group)
    chosen: set[str] = set()
    before = 0
    for _, own in sorted(groups.items()):
        size = sum(map(len, own))
        # Rounded as a running total, so that concepts of few pictures give their share together.
        number = round(share * (before + size)) - round(share * before)
        before += size
        drawn = sorted(own, key=lambda group: (uniforms(seed, f"hold out/{min(group)}"), min(group)))
        taken: set[str] = set()
        # Where near-duplicates are more than the share in every group, the smallest one stands for it.
        for most in (number, min(map(len, own)) if number else 0):
            for group in drawn:
                fits = len(taken) + len(group) <= most and not taken & group
                if fits and all(each - chosen - taken - group for each in left.values() if each & group):
                    taken |= group
            if taken:
                break
        chosen |= taken
    if not chosen:
        raise ValueError(
            f"validation_share {share:g} of {count(known, 'picture')} leaves no picture to validate and one to train; "
            f"set {setting('train.validation_share')} higher, add pictures, or set it to 0. Near-duplicates stay "
            "together."
        )
    return chosen
