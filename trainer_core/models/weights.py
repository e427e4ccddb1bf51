"""Weights in captions as ComfyUI reads them in prompts: (word) counts 1.1 times, (word:1.3) 1.3 times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

BRACKETS = 1.1  # what a pair of brackets without a number multiplies by
LARGEST = 1000.0  # weight, above or below 0
DEEPEST = 100  # pairs of brackets in each other


def weighted_parts(caption: str) -> list[tuple[str, float]]:
    """Split a caption into its parts, each of one weight; without brackets of weights the caption is one part.

    Raises ValueError for weights beyond `LARGEST` and for more than `DEEPEST` brackets in each other.
    """
    parts = []
    waiting = [(item, 1.0, 0) for item in reversed(_items(re.findall(r"\\[()]|.", caption, re.DOTALL)))]
    while waiting:
        item, weight, depth = waiting.pop()
        if len(item) > 1 and item[0] == "(" and item[-1] == ")":
            if depth == DEEPEST:
                raise _refused(caption, f"more than {DEEPEST} brackets in each other")
            inside, weight = _weigh(item[1:-1], weight)
            waiting += [(each, weight, depth + 1) for each in reversed(_items(inside))]
            continue
        if not abs(weight) <= LARGEST:
            raise _refused(caption, f"a weight of {weight:g}, beyond {LARGEST:g}")
        parts.append(("".join(mark[-1] for mark in item), weight))
    return parts


def check_weighted(captions: Iterable[str]) -> None:
    """Raise ValueError for a caption whose weights cannot be used."""
    for caption in captions:
        weighted_parts(caption)


def _items(marks: Sequence[str]) -> list[Sequence[str]]:
    """Split characters (escaped brackets are one) into outermost pairs of brackets and what lies between them."""
    items, first, depth = [], 0, 0
    for i, mark in enumerate(marks):
        if mark == "(":
            if depth == 0 and first < i:
                items.append(marks[first:i])
                first = i
            depth += 1
        elif mark == ")":
            depth -= 1
            if depth == 0:
                items.append(marks[first : i + 1])
                first = i + 1
    return [*items, marks[first:]] if first < len(marks) else items


def _weigh(marks: Sequence[str], weight: float) -> tuple[Sequence[str], float]:
    """Find what a pair of brackets holds, and its weight: the number after its last colon, else a multiple."""
    colon = max((i for i, mark in enumerate(marks) if mark == ":"), default=0)
    if colon:
        try:
            return marks[:colon], float("".join(marks[colon + 1 :]))
        except ValueError:  # the text goes on after the colon
            pass
    return marks, weight * BRACKETS


def _refused(caption: str, what: str) -> ValueError:
    shown = caption if len(caption) <= 60 else f"{caption[:60]}..."
    return ValueError(f'The text "{shown}" has {what}; change it, or turn prompt_weights of the base model off.')
