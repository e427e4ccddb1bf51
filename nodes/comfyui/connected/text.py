"""Captions through a connected CLIP: any number of tensors and numbers for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ....trainer_core.common.tensor_tree import pack, unpack
from ....trainer_core.models import Conditioning

NEVER = "\0embedding:"  # starts no word of a caption
TREE = "tree"  # of an encoded caption: the JSON text of its tree, as bytes


def escape(caption: str) -> str:
    """Write a caption so that ComfyUI reads its brackets as text, not as weights."""
    return caption.replace("(", "\\(").replace(")", "\\)")


def tokenize(clip: Any, caption: str, *, weights: bool) -> Any:
    """Cut a caption into the tokens of each encoder, as text; weights: as a prompt, where (word:1.2) is a weight."""
    if weights:
        return clip.tokenize(caption)
    with _plain_words(getattr(clip, "tokenizer", None)):
        return clip.tokenize(escape(caption))


@contextmanager
def _plain_words(tokenizer: Any) -> Iterator[None]:
    """Let ComfyUI's tokenizers read embedding: as text, not as the name of a file."""
    with ExitStack() as stack:
        for each in (tokenizer, *getattr(tokenizer, "__dict__", {}).values()):
            own = getattr(each, "embedding_identifier", None)
            if own is not None:
                each.embedding_identifier = NEVER
                stack.callback(setattr, each, "embedding_identifier", own)
        yield


def count_tokens(clip: Any, caption: str, *, weights: bool) -> int:
    """Count the tokens that the encoder with the most gets, padding included."""
    tokens = tokenize(clip, caption, weights=weights)
    encoders = tokens.values() if isinstance(tokens, Mapping) else (tokens,)
    found = (chunks for chunks in encoders if isinstance(chunks, list))
    return max((sum(len(c) if isinstance(c, list) else 1 for c in chunks) for chunks in found), default=0)


def encode(clip: Any, caption: str, *, weights: bool, live: bool = False) -> Conditioning:
    """Encode a caption as ComfyUI does, as flat tensors; raises ValueError for values that cannot be kept.

    live: with gradients where they are on, on the CLIP's device.
    """
    live = live and torch.is_grad_enabled()
    with torch.set_grad_enabled(live):
        return _stored(clip.encode_from_tokens_scheduled(tokenize(clip, caption, weights=weights)), live=live)


@torch.no_grad()
def encode_seen(clip: Any, caption: str, pictures: Sequence[Tensor], *, single: bool) -> Conditioning:
    """Encode a caption that Qwen-Image-Edit's text encoder reads with control pictures, by ComfyUI's own nodes for it.

    pictures: (3, H, W) in -1..1. single: by the node of its first model, which takes one; else by that of the later
    ones. Neither knows weights of words.
    """
    from comfy_extras import nodes_qwen  # ComfyUI loads it after custom nodes

    images = [((pixels + 1) / 2).movedim(0, -1)[None] for pixels in pictures]
    with _plain_words(getattr(clip, "tokenizer", None)):
        if single:
            made = nodes_qwen.TextEncodeQwenImageEdit.execute(clip, escape(caption), image=images[0])
        else:
            numbered = {f"image{number}": image for number, image in enumerate(images, 1)}
            made = nodes_qwen.TextEncodeQwenImageEditPlus.execute(clip, escape(caption), **numbered)
    return _stored(made.args[0])


def _stored(found: Any, *, live: bool = False) -> Conditioning:
    """Write a CONDITIONING as flat tensors; raises ValueError for values that cannot be kept. live: with gradients."""
    if len(found) != 1:
        raise ValueError(
            "The linked CLIP changes over a schedule (hooks); link it to Use Connected Model without them."
        )
    cross, extra = found[0]
    try:
        tensors, tree = pack({"cross": cross, "extra": dict(extra)}, copy=not live, live=live)
    except ValueError as error:
        raise ValueError(f"The linked CLIP gives conditions that cannot be trained on: {error}") from error
    text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    return {name: tensor.contiguous() for name, tensor in tensors.items()} | {TREE: text}


def conditioning(stored: Conditioning) -> tuple[Tensor | None, dict[str, Any]]:
    """Rebuild ComfyUI's conditioning of a caption: what is attended to, and everything else."""
    tree = json.loads(bytes(stored[TREE].cpu().numpy()).decode())
    state = unpack({name: tensor for name, tensor in stored.items() if name != TREE}, tree)
    return state["cross"], state["extra"]
