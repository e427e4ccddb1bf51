"""Words in captions whose token embeddings are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ..config import EmbeddingConfig

Words = Mapping[str, Sequence[int]]  # words that learned embeddings stand for, and the ids of these: below 0


def find_words(caption: str, words: Words) -> Iterator[tuple[str, str]]:
    """Yield the parts of a caption: (text, the word after it), the last with ""; case does not count.

    A word is found where neither a letter nor a digit stands beside it; of several, the longest.
    """
    ordered = sorted(words, key=len, reverse=True)
    at = 0
    if ordered:
        pattern = "|".join(f"({re.escape(word)})" for word in ordered)
        for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", caption, re.IGNORECASE):
            yield caption[at : match.start()], ordered[(match.lastindex or 1) - 1]
            at = match.end()
    yield caption[at:], ""


def word_ids(embeddings: Sequence[EmbeddingConfig]) -> dict[str, tuple[int, ...]]:
    """Return the ids of the vectors of each token: -1, -2 … in their order.

    They are below all others, as text encoders of old configurations take the place of the largest id for the end.
    """
    words: dict[str, tuple[int, ...]] = {}
    first = -1
    for embedding in embeddings:
        words[embedding.token] = tuple(range(first, first - embedding.vectors, -1))
        first -= embedding.vectors
    return words


def mentions(caption: str, words: Words) -> bool:
    """Tell whether one of the words stands in a caption."""
    return next(find_words(caption, words))[1] != ""
