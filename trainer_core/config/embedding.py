"""Settings of an embedding: a word whose token embeddings are trained with the LoRA (pivotal tuning)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config
from .rows import needed, row


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig(Config):
    """A word of the captions that gets new, trained token embeddings in every text encoder."""

    SECTION: ClassVar = "lora.embeddings"
    NODE: ClassVar = "Embedding"

    token: str = needed(
        "The word as it stands in the captions: one plain word of letters and digits, in upper or lower case. "
        "Wherever it stands alone, the trained vectors replace it. Empty = this node changes nothing.",
        open="",
        placeholder="mossling",
    )
    vectors: int = row(
        2,
        "How many vectors the word gets, 1 to 75. More hold more detail and take as many of the 75 tokens of a "
        "prompt. 1 to 4 suits most.",
        span=(1, 75),
    )
    init: str = row(
        "",
        "The initial meaning of the word, for example creature: one or two words that come near. Empty = noise, which "
        "trains longer.",
        label="init_text",
    )
    learning_rate: float = row(  # without weight decay
        1e-3,
        "Learning rate of the vectors, above 0; usually about ten times that of the LoRA. The scheduler acts on it "
        "too. With Prodigy 1.",
        span=(1e-8, 100, 1e-4),
        round=1e-8,
    )
    stop: float = row(
        0.0,
        "Trains the vectors only up to here, in stop_unit; the LoRA trains on. 0 = to the end. Half of the run is a "
        "good start.",
        span=(0, 1_000_000, 0.05),
        round=0.001,
    )
    stop_unit: Literal["share", "steps", "epochs"] = row(
        "steps",
        "The unit of stop. share: of the whole run, 0.5 is half. steps and epochs: whole numbers.",
        open="share",  # a node does not know how long a run is
    )
    keep_norm: bool = row(
        False,
        "On: keeps the length of each vector within that of nearly all other words' embeddings. Helps if the word "
        "drowns out the rest of a prompt, or with a high learning rate.",
        advanced=True,
    )

    def check(self) -> None:
        """Raise ValueError for a token that is no plain word, and for a stop that is none of its unit."""
        if not re.fullmatch(r"\w+(-\w+)*", self.token) or len(self.token) > 50:
            raise ValueError(
                f"The token {self.token[:50]!r} is not one plain word; set {self.named('token')} to a word of the "
                "captions, up to 50 letters and digits, for example mossling."
            )
        if self.stop_unit == "share" and self.stop > 1:
            raise ValueError(f"{self.named('stop')} is {self.stop:g}; it must be between 0 and 1, a share of the run.")
        if self.stop_unit != "share" and self.stop % 1:
            raise ValueError(
                f"stop of the embedding {self.token} is {self.stop:g} {self.stop_unit}; set {self.named('stop')} to a "
                "whole number, or stop_unit to share."
            )
