"""Captions to conditioning: tokens, chunks of 75, clip skip; the layout ComfyUI uses at inference."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


@dataclass(kw_only=True)
class TextEncoder:
    """A text encoder in memory, and how it conditions a UNet."""

    model: Any
    layer: int  # hidden state in use, counted from the end
    final_norm: bool
    pooled: bool  # gives the pooled embedding as well
    open_clip: bool  # rows are padded with 0 after the first EOS
    kohya: str  # what names of its layers in a LoRA file begin with
    absent: int = 0  # last layers that the file leaves out, as they are not used

    @property
    def depth(self) -> int:
        """Return how many of the model's layers act on the conditioning; those behind them have nothing to learn."""
        layers = self.model.config.num_hidden_layers
        return layers if self.pooled else layers + self.absent - (self.layer - 1)


class Conditioning(NamedTuple):
    """What a caption becomes."""

    context: Tensor  # (L, D)
    pooled: Tensor | None  # (P,), of families that use one


def encode_caption(encoders: Sequence[TextEncoder], tokenizer: Any, caption: str, device: Any) -> Conditioning:
    """Encode a caption as ComfyUI does at inference: chunks of 75 tokens, encoders side by side."""
    contexts, pooled = [], None
    for encoder in encoders:
        tokens = tokenize(tokenizer, caption, pad=0 if encoder.open_clip else None).to(device)
        output = encoder.model(tokens, output_hidden_states=True)
        hidden = output.hidden_states[encoder.absent - encoder.layer]
        if encoder.final_norm:
            hidden = getattr(encoder.model, "text_model", encoder.model).final_layer_norm(hidden)
        contexts.append(hidden.flatten(0, 1))
        if encoder.pooled:
            pooled = output.text_embeds[0]
    return Conditioning(torch.cat(contexts, dim=-1), pooled)


def tokenize(tokenizer: Any, caption: str, max_chunks: int = MAX_CHUNKS, pad: int | None = None) -> Tensor:
    """Cut a caption into rows of 77 token ids, BOS + up to 75 + EOS + padding (EOS by default); (chunks, 77) int64.

    Tokens beyond `max_chunks` rows are left out; `count_tokens` tells beforehand.
    """
    ids = _ids(tokenizer, caption)[: CHUNK * max_chunks]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = [ids[i : i + CHUNK] for i in range(0, max(len(ids), 1), CHUNK)]
    fill = eos if pad is None else pad
    return torch.tensor([[bos, *row, eos, *[fill] * (CHUNK - len(row))] for row in rows])


def count_tokens(tokenizer: Any, caption: str) -> int:
    """Count the tokens of a caption without BOS and EOS."""
    return len(_ids(tokenizer, caption))


def left_out(tokenizer: Any, caption: str, max_chunks: int = MAX_CHUNKS) -> str:
    """Return the part of a caption that `tokenize` leaves out, as the tokenizer spells it; "" for none."""
    return tokenizer.decode(_ids(tokenizer, caption)[CHUNK * max_chunks :]).strip()


def _ids(tokenizer: Any, caption: str) -> list[int]:
    return tokenizer(caption, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]


def batch_context(contexts: Sequence[Tensor]) -> Tensor:
    """Stack (L_i, D) conditionings to (B, L, D), repeating each to the least common multiple of the lengths.

    Repeated keys leave softmax attention as it is, padding would not; ComfyUI batches conditionings the same way.
    """
    length = math.lcm(*(c.shape[0] for c in contexts))
    return torch.stack([c.repeat(length // c.shape[0], 1) for c in contexts])
