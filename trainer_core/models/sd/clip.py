"""Captions through CLIP's text encoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Conditioning
from ..words import Words
from .text import CHUNK, MAX_CHUNKS, ClipEncoder, ClipLengths, encode_caption, longest_context, token_ids


@dataclass(frozen=True, kw_only=True)
class ClipText(ClipLengths):
    """The text encoders of Stable Diffusion; implements `Text` and `TrainableText`."""

    encoders: tuple[ClipEncoder, ...]
    stored: dict[str, str]  # keys of stored weights; "text_encoder" is theirs
    dtype: torch.dtype
    layer: int  # in use, counted from the end
    seen_as: str = ""  # CLIP sees no pictures

    @property
    def trainable(self) -> ClipText:
        """Itself: every text encoder can be trained."""
        return self

    @property
    def identity(self) -> str:
        """A key of the text encoders' state: stored weights, dtype, layer in use, chunks, and how captions are read."""
        reading = "/prompt weights" if self.weights else ""
        return f"{self.stored['text_encoder']}/{self.dtype}/{self.layer}/{MAX_CHUNKS}{reading}"

    def mark(self, *changes: str) -> None:
        """Add changes of the text encoders' weights to `identity`."""
        self.stored["text_encoder"] = "+".join([self.stored["text_encoder"], *changes])

    def encode(self, caption: str, device: torch.device | str, pictures: Sequence[Tensor] = ()) -> Conditioning:
        """Encode a caption as ComfyUI does at inference: "context" (L, D), for XL also "pooled" (P,)."""
        del pictures
        context, pooled = encode_caption(self.encoders, self.tokenizer, caption, device, weights=self.weights)
        return {"context": context} | ({} if pooled is None else {"pooled": pooled})

    def longest_batch(self, captions: Iterable[str], count: int, words: Words) -> int:
        """Count the tokens, with BOS and EOS of chunks, of the longest possible batch of `count` captions."""
        lengths = (self.count_tokens(caption, words) for caption in captions)
        chunks = {min(MAX_CHUNKS, max(1, -(-length // CHUNK))) for length in lengths}
        return (CHUNK + 2) * longest_context(chunks, count)

    def token_ids(self, text: str) -> list[int]:
        """List the ids of a text's tokens; [] without a tokenizer."""
        return token_ids(self.tokenizer, text) if self.tokenizer else []
