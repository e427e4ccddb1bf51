"""Encode captions as ComfyUI does at inference: tokens, chunks of 75, clip skip."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base import Unit
from ..weights import weighted_parts
from ..words import Words, find_words
from .units import units

CHUNK = 75  # tokens of a caption between BOS and EOS
MAX_CHUNKS = 32  # more than any caption has; what is longer is a file by mistake, and would fill the memory
MOST_REPEATED = 2  # times that the longest context of a batch is repeated at most
LONG_PART = 8  # tokens; ComfyUI may split a part of a prompt of this length or more over two chunks


@dataclass(frozen=True, kw_only=True)
class ClipLengths:
    """The limits of caption length of CLIP; implements `CaptionLengths` without a model."""

    tokenizer: Any
    weights: bool = False  # (word:1.2) in captions is a weight
    window: int = CHUNK  # tokens in a chunk
    max_tokens: int = CHUNK * MAX_CHUNKS  # of a caption; the rest is cut

    def count_tokens(self, caption: str, words: Words) -> int:
        """Count the tokens of a caption, including unused tokens at the ends of chunks."""
        return count_tokens(self.tokenizer, caption, words, weights=self.weights)

    def cut(self, caption: str, words: Words) -> tuple[str, list[str]]:
        """Find the part of a caption after the last chunk: its text, and the trained words in it."""
        given = {"words": words, "weights": self.weights}
        return truncated_text(self.tokenizer, caption, **given), truncated_words(self.tokenizer, caption, **given)


def find_tokenizer(explicit: str, model: Path) -> Path:
    """Find the folder with vocab.json and merges.txt: the given one, else that of a diffusers folder.

    Raises ValueError, with the searched folder, if there is none.
    """
    folder = Path(explicit) if explicit else model / "tokenizer"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return folder
    looked = f"looked in {folder}" if explicit or model.is_dir() else "as a single file holds none"
    raise ValueError(
        f"No CLIP tokenizer (vocab.json and merges.txt) for {model.name}, {looked}; set tokenizer of the base model to "
        "its folder, for example ComfyUI's comfy/sd1_tokenizer."
    )


@functools.lru_cache(maxsize=4)  # a quarter of a second each time
def load_tokenizer(folder: Path) -> Any:
    """Load the CLIP tokenizer from a folder, offline."""
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


@dataclass(kw_only=True)
class ClipEncoder:
    """A text encoder in memory, and the settings by which it conditions the UNet."""

    model: Any
    layer: int  # hidden state in use, counted from the end
    final_norm: bool
    pooled: bool  # also gives the pooled embedding
    open_clip: bool  # rows are padded with 0 after the first EOS
    prefix: str  # of its layers' names in LoRA files
    absent: int = 0  # unused last layers that the file lacks
    words: Words = field(default_factory=dict)  # trained words in the model's token embedding while they are attached

    @property
    def depth(self) -> int:
        """Number of the model's layers that act on the conditioning; later ones get no gradient."""
        layers = self.model.config.num_hidden_layers
        return layers if self.pooled else layers + self.absent - (self.layer - 1)

    def units(self) -> list[Unit]:
        """List the repeated blocks."""
        return units(self.model)


class EncodedCaption(NamedTuple):
    """An encoded caption."""

    context: Tensor  # (L, D)
    pooled: Tensor | None  # (P,), of families that use one


def encode_caption(
    encoders: Sequence[ClipEncoder], tokenizer: Any, caption: str, device: Any, *, weights: bool = False
) -> EncodedCaption:
    """Encode a caption as ComfyUI does at inference: chunks of 75 tokens, encoders side by side.

    weights: (word:1.2) is a weight. A token's state moves by it away from that of the empty prompt at its position.
    """
    contexts, pooled = [], None
    for encoder in encoders:
        pad = 0 if encoder.open_clip else None
        tokens = tokenize(tokenizer, caption, pad=pad, words=encoder.words, weights=weights)
        factors = _factors(tokenizer, caption, encoder.words) if weights else torch.ones(())
        weighted = bool((factors != 1).any())
        if weighted:
            tokens = torch.cat([tokens, tokenize(tokenizer, "", pad=pad)[:1]])
        output = encoder.model(tokens.to(device), output_hidden_states=True)
        hidden = output.hidden_states[encoder.absent - encoder.layer]
        if encoder.final_norm:
            hidden = getattr(encoder.model, "text_model", encoder.model).final_layer_norm(hidden)
        if weighted:
            states = hidden.float()
            hidden = torch.lerp(states[-1], states[:-1], factors.to(device)).to(hidden.dtype)
        contexts.append(hidden.flatten(0, 1))
        if encoder.pooled:
            pooled = output.text_embeds[0]
    return EncodedCaption(torch.cat(contexts, dim=-1), pooled)


def tokenize(
    tokenizer: Any,
    caption: str,
    max_chunks: int = MAX_CHUNKS,
    pad: int | None = None,
    words: Words | None = None,
    *,
    weights: bool = False,
) -> Tensor:
    """Cut a caption into rows of 77 token ids, BOS + up to 75 + EOS + padding (EOS by default); (chunks, 77) int64.

    Tokens beyond `max_chunks` rows are cut; `count_tokens` counts them, too.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    fill = eos if pad is None else pad
    rows = _rows(tokenizer, caption, words, weights=weights)[:max_chunks]
    return torch.tensor([[bos, *(i for i, _ in row), eos, *[fill] * (CHUNK - len(row))] for row in rows])


def _factors(tokenizer: Any, caption: str, words: Words) -> Tensor:
    """List the weight of every token of `tokenize`, 1 for those that are not the caption's; (chunks, 77, 1)."""
    rows = _rows(tokenizer, caption, words, weights=True)[:MAX_CHUNKS]
    return torch.tensor([[[1.0], *([weight] for _, weight in row), *[[1.0]] * (CHUNK + 1 - len(row))] for row in rows])


def count_tokens(tokenizer: Any, caption: str, words: Words | None = None, *, weights: bool = False) -> int:
    """Count the tokens of a caption without BOS and EOS, including unused tokens at the ends of chunks."""
    *full, last = _rows(tokenizer, caption, words, weights=weights)
    return CHUNK * len(full) + len(last)


def truncated_text(
    tokenizer: Any, caption: str, max_chunks: int = MAX_CHUNKS, words: Words | None = None, *, weights: bool = False
) -> str:
    """Decode the part of a caption that `tokenize` cuts; "" for none."""
    rows = _rows(tokenizer, caption, words, weights=weights)[max_chunks:]
    return tokenizer.decode([i for row in rows for i, _ in row if i >= 0]).strip()


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text without BOS and EOS."""
    return tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]


def truncated_words(
    tokenizer: Any, caption: str, words: Words, max_chunks: int = MAX_CHUNKS, *, weights: bool = False
) -> list[str]:
    """List the trained words of a caption of which `tokenize` cuts vectors."""
    named = sum(len(words[word]) for _, word in find_words(caption, words) if word)
    if len(caption.encode(errors="replace")) + named <= CHUNK * (max_chunks - 1):  # each token takes at least one byte
        return []
    lost = {i for row in _rows(tokenizer, caption, words, weights=weights)[max_chunks:] for i, _ in row}
    return [word for word, ids in words.items() if not lost.isdisjoint(ids)]


def _rows(tokenizer: Any, caption: str, words: Words | None, *, weights: bool) -> list[list[tuple[int, float]]]:
    """Split a caption's ids, each with its weight, into chunks as ComfyUI does.

    Trained words, the text between them and what has a weight of its own are parts. A short part that does not fit
    moves to the next chunk; a long one is split.
    """
    rows: list[list[tuple[int, float]]] = [[]]
    for ids, weight in _parts(tokenizer, caption, words or {}, weights=weights):
        part = [(i, weight) for i in ids]
        large = len(part) >= LONG_PART
        while part:
            room = CHUNK - len(rows[-1])
            if large or len(part) <= room:
                rows[-1] += part[:room]
                part = part[room:]
            if part:
                rows.append([])
    return rows


def _parts(tokenizer: Any, caption: str, words: Words, *, weights: bool) -> Iterator[tuple[Sequence[int], float]]:
    """Yield the ids of a caption's parts, and their weights."""
    for text, weight in weighted_parts(caption) if weights else [(caption, 1.0)]:
        for plain, word in find_words(text, words):
            yield token_ids(tokenizer, plain), weight
            yield words.get(word, ()), weight


def batch_context(contexts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack (L_i, D) conditionings to (B, L, D), repeating each to the least common multiple of the lengths.

    Repeated keys do not change softmax attention; ComfyUI batches conditionings the same way. Where the multiple is
    beyond MOST_REPEATED times the longest, all are padded to that instead. Also returns the keys that are no padding,
    (B, L) bool; None for all.
    """
    lengths = [len(context) for context in contexts]
    length, longest = math.lcm(*lengths), max(lengths)
    if length <= MOST_REPEATED * longest:
        return torch.stack([context.repeat(length // len(context), 1) for context in contexts]), None
    padded = [nn.functional.pad(context, (0, 0, 0, longest - len(context))) for context in contexts]
    return torch.stack(padded), torch.arange(longest) < torch.tensor(lengths)[:, None]


def longest_context(chunks: set[int], count: int) -> int:
    """Count the chunks of the longest context that `batch_context` makes of `count` captions of so many chunks each."""
    if count == 1:
        return max(chunks)
    twice = (most for most in chunks for less in chunks if most % less and MOST_REPEATED * most % less == 0)
    return max(*chunks, MOST_REPEATED * max(twice, default=0))
