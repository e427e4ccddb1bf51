"""A word whose token embeddings are learned together with the LoRA (textual inversion, pivotal tuning)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig(Config):
    """A word of the captions that becomes new token embeddings, in every text encoder."""

    token: str  # the word in the captions; upper and lower case are the same
    vectors: int = 2  # token embeddings that stand for it, 1..75: that many tokens of a prompt
    init: str = ""  # words whose token embeddings the vectors begin with; "" = noise as long as embeddings are
    learning_rate: float = 1e-3  # above 0; without weight decay
    stop: float = 0.0  # the vectors stay as they are from then on; 0 = learn to the end
    stop_unit: Literal["steps", "epochs", "share"] = "steps"  # share: of the run, 0..1
    keep_norm: bool = False  # no vector becomes shorter or longer than the embeddings of nearly all other words

    def __post_init__(self) -> None:
        check_choices(self)
        if not re.fullmatch(r"\w+(-\w+)*", self.token) or len(self.token) > 50:
            raise ValueError(
                f"The token {self.token!r} of Embedding is not one plain word; give one of up to 50 letters and digits "
                "as it stands in the captions, for example mossling."
            )
        check_range(self, "vectors", 1, 75)
        if not 0 < self.learning_rate <= 100:
            raise ValueError(
                f"The learning_rate of the embedding {self.token} is {self.learning_rate:g}; it must be above 0 and at "
                "most 100, or leave Embedding out."
            )
        check_range(self, "stop", 0, 1 if self.stop_unit == "share" else float("inf"))
        if self.stop_unit != "share" and self.stop % 1:
            raise ValueError(
                f"stop of the embedding {self.token} is {self.stop:g} {self.stop_unit}; give a whole number, or set "
                "stop_unit to share."
            )
