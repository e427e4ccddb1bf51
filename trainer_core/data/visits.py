"""Compute how often each picture is visited per epoch, and the start of its cycles of resolutions and variants."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import torch

from ..common.rng import generator
from ..config import ConceptConfig, TrainConfig
from .scan import Manifest


def trained_resolutions(concept: ConceptConfig, train: TrainConfig) -> tuple[str, ...]:
    """List the resolutions of a concept, without repetitions."""
    return tuple(dict.fromkeys(concept.resolutions or train.buckets.resolutions or (str(train.resolution),)))


def visit_rates(
    manifest: Manifest, concepts: list[ConceptConfig], resolutions: list[int], train: TrainConfig
) -> list[Fraction]:
    """Compute the visits per epoch of each picture.

    They are `repeats` times the repeats of its folder, or its share of `samples`. Regularisation pictures without
    `samples` are visited as often as all training pictures together, as sd-scripts does.
    """
    every = train.buckets.resolution_mode == "all"
    own = [
        Fraction(concept.repeats).limit_denominator(1000) * picture.repeats * (count if every else 1)
        for picture, concept, count in zip(manifest.pictures, concepts, resolutions, strict=True)
    ]
    total: defaultdict[int, Fraction] = defaultdict(Fraction)
    for picture, rate in zip(manifest.pictures, own, strict=True):
        total[picture.concept] += rate
    wanted = {
        picture.concept: Fraction(concept.samples)
        for picture, concept in zip(manifest.pictures, concepts, strict=True)
        if concept.samples
    }
    role = {picture.concept: concept.role for picture, concept in zip(manifest.pictures, concepts, strict=True)}
    trained = sum((wanted.get(c, total[c]) for c in total if role[c] == "train"), Fraction())
    free = [c for c in total if role[c] == "regularisation" and c not in wanted]
    together = sum((total[c] for c in free), Fraction())
    wanted |= {c: trained * total[c] / together for c in free}
    return [
        rate * wanted[picture.concept] / total[picture.concept] if picture.concept in wanted else rate
        for picture, rate in zip(manifest.pictures, own, strict=True)
    ]


def visit_offsets(trained: list[int], manifest: Manifest, seed: int) -> dict[int, Fraction]:
    """Draw a different offset k/n in [0, 1) for each of the n pictures of a concept."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i in trained:
        members[manifest.pictures[i].concept].append(i)
    return {
        i: Fraction(turn, len(each))
        for concept, each in members.items()
        for turn, i in enumerate(shuffled(each, generator(seed, "turns", concept)))
    }


def cycle_starts(pictures: int, seed: int) -> list[tuple[int, int]]:
    """Draw two numbers for each picture: the starts of its cycles of resolutions and of variants."""
    draws = torch.randint(0, 2**31, (pictures, 2), generator=generator(seed, "starts")).tolist()
    return [(first, second) for first, second in draws]


def shuffled(entries: list, draws: torch.Generator) -> list:
    """Shuffle the entries into a new list."""
    return [entries[i] for i in torch.randperm(len(entries), generator=draws).tolist()]
