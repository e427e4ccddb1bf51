"""Settings of an embedding: a word whose token embeddings are trained with the LoRA (pivotal tuning)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config, check_choices, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig(Config):
    """A word of the captions that gets new, trained token embeddings in every text encoder."""

    SECTION: ClassVar = "lora.embeddings"
    NODE: ClassVar = "Embedding"

    token: str  # the word in the captions, in any case
    vectors: int = 2  # token embeddings per word, 1..75; each takes one token of a prompt
    init: str = ""  # words whose token embeddings the vectors start from; "" = noise of the usual norm
    learning_rate: float = 1e-3  # above 0; without weight decay
    stop: float = 0.0  # when the vectors are frozen; 0 = trained to the end
    stop_unit: Literal["steps", "epochs", "share"] = "steps"  # share: of the run, 0..1
    keep_norm: bool = False  # keep each norm in the range of nearly all other token embeddings

    def __post_init__(self) -> None:
        check_choices(self)
        if not re.fullmatch(r"\w+(-\w+)*", self.token) or len(self.token) > 50:
            raise ValueError(
                f"The token {self.token[:50]!r} is not one plain word; set token of Embedding to a word of the "
                "captions, up to 50 letters and digits, for example mossling."
            )
        check_range(self, "vectors", 1, 75)
        if not 0 < self.learning_rate <= 100:
            raise ValueError(
                f"The learning_rate of the embedding {self.token} is {self.learning_rate:g}; set learning_rate of "
                "Embedding above 0, to 100 at most."
            )
        check_range(self, "stop", 0, 1 if self.stop_unit == "share" else float("inf"))
        if self.stop_unit != "share" and self.stop % 1:
            raise ValueError(
                f"stop of the embedding {self.token} is {self.stop:g} {self.stop_unit}; set stop of Embedding to a "
                "whole number, or stop_unit to share."
            )
