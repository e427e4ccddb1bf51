"""Captions to conditioning: tokens, chunks of 75, clip skip; the layout ComfyUI uses at inference."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 75  # tokens of a caption between BOS and EOS
MAX_CHUNKS = 3


def find_tokenizer(explicit: str, model: Path) -> Path:
    """Return the folder with vocab.json and merges.txt: the given one, the model's own, or ComfyUI's.

    Raises ValueError that lists where it looked.
    """
    comfy = os.environ.get("COMFYUI_PATH", "")
    places = [Path(explicit)] if explicit else [model / "tokenizer"] if model.is_dir() else []
    if not explicit and comfy:
        places.append(Path(comfy) / "comfy" / "sd1_tokenizer")
    for place in places:
        if (place / "vocab.json").is_file() and (place / "merges.txt").is_file():
            return place
    looked = ", ".join(map(str, places)) or "nowhere"
    raise ValueError(
        f"No CLIP tokenizer (vocab.json and merges.txt) for {model.name}, looked in: {looked}; name its folder as "
        "tokenizer, or set COMFYUI_PATH."
    )


@functools.lru_cache(maxsize=4)  # a quarter of a second each time
def load_tokenizer(folder: Path) -> Any:
    """Load the CLIP tokenizer from a folder, offline."""
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def tokenize(tokenizer: Any, caption: str, max_chunks: int = MAX_CHUNKS) -> Tensor:
    """Cut a caption into rows of 77 token ids, BOS + up to 75 + EOS padding; (chunks, 77) int64.

    Tokens beyond `max_chunks` rows are left out; `count_tokens` tells beforehand.
    """
    ids = _ids(tokenizer, caption)[: CHUNK * max_chunks]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = [ids[i : i + CHUNK] for i in range(0, max(len(ids), 1), CHUNK)]
    return torch.tensor([[bos, *row, *[eos] * (CHUNK + 1 - len(row))] for row in rows])


def count_tokens(tokenizer: Any, caption: str) -> int:
    """Count the tokens of a caption without BOS and EOS."""
    return len(_ids(tokenizer, caption))


def left_out(tokenizer: Any, caption: str, max_chunks: int = MAX_CHUNKS) -> str:
    """Return the part of a caption that `tokenize` leaves out, as the tokenizer spells it; "" for none."""
    return tokenizer.decode(_ids(tokenizer, caption)[CHUNK * max_chunks :]).strip()


def _ids(tokenizer: Any, caption: str) -> list[int]:
    return tokenizer(caption, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]


def encode_tokens(encoder: Any, tokens: Tensor, clip_skip: int = 1) -> Tensor:
    """Encode (chunks, 77) token ids to (77 * chunks, D): hidden state -clip_skip through the final norm."""
    hidden = encoder(tokens, output_hidden_states=True).hidden_states[-clip_skip]
    body = getattr(encoder, "text_model", encoder)
    return body.final_layer_norm(hidden).flatten(0, 1)


def batch_context(contexts: Sequence[Tensor]) -> Tensor:
    """Stack (L_i, D) conditionings to (B, L, D), repeating each to the least common multiple of the lengths.

    Repeated keys leave softmax attention as it is, padding would not; ComfyUI batches conditionings the same way.
    """
    length = math.lcm(*(c.shape[0] for c in contexts))
    return torch.stack([c.repeat(length // c.shape[0], 1) for c in contexts])
