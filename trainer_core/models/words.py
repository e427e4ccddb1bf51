"""Words in captions whose token embeddings are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ..config import EmbeddingConfig

Words = Mapping[str, Sequence[int]]  # trained words, and the ids of their vectors, below 0


def find_words(caption: str, words: Words) -> Iterator[tuple[str, str]]:
    """Yield the parts of a caption: (text, the word after it), the last with ""; case is ignored.

    Words match only as whole words; of several, the longest.
    """
    ordered = sorted(words, key=len, reverse=True)
    end = 0
    if ordered:
        pattern = "|".join(f"({re.escape(word)})" for word in ordered)
        for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", caption, re.IGNORECASE):
            yield caption[end : match.start()], ordered[(match.lastindex or 1) - 1]
            end = match.end()
    yield caption[end:], ""


def word_ids(embeddings: Sequence[EmbeddingConfig]) -> dict[str, tuple[int, ...]]:
    """Number the vectors of each token: -1, -2 … in their order.

    Ids are negative because text encoders of old configurations take the largest id for the end of the text.
    """
    words: dict[str, tuple[int, ...]] = {}
    first = -1
    for embedding in embeddings:
        words[embedding.token] = tuple(range(first, first - embedding.vectors, -1))
        first -= embedding.vectors
    return words


def mentions(caption: str, words: Words) -> bool:
    """Tell whether a caption contains one of the words."""
    return next(find_words(caption, words))[1] != ""
