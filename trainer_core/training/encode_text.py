"""Encode captions: alone, and with the control pictures that some text encoders read beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from contextlib import ExitStack

import torch
from torch import Tensor

from ..common.wording import say
from ..config import MOST_CONTROLS, setting
from ..data.cache import text_key
from ..data.controls import Reference
from ..data.images import cut
from ..models import mentions
from .encoded import EncodingContext, Seen, room
from .pixels import decoded, pixels


def _check_text_space(work: EncodingContext, each: int, texts: int) -> None:
    """Raise ValueError if captions do not fit on the disk or into RAM; note those that exceed the limit of the cache.

    each: bytes of the first caption; others have about as many.
    """
    needed, more = each * texts, f"set {setting('captions.variants')} lower"
    free, place, limit = room(work.cache)
    if needed > free:
        raise ValueError(
            f"{texts} encoded captions need {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {place}; make "
            f"room, or {more}."
        )
    if 0 < limit < needed:
        work.callbacks.note(
            f"{texts} encoded captions take about {needed / 1e9:.1f} GB, more than the limit of what the pack keeps, "
            f"{limit / 1e9:.1f} GB. They stay until this run ends; to have fewer, {more}."
        )


@torch.no_grad()
def encode_texts(work: EncodingContext, texts: Collection[str]) -> dict[str, str]:
    """Encode texts that the cache lacks and return the key of each; texts with a trained embedding are left out."""
    base, cache = work.base, work.cache
    words = base.text.encoders[0].words if base.text.encoders else {}  # training changes what these captions encode to
    keys = {t: text_key(caption=t, encoder_id=base.text.identity) for t in sorted(texts) if not mentions(t, words)}
    missing = work.world.mine([text for text, key in keys.items() if not cache.has(key)])
    if missing:
        with ExitStack() as stack:
            for encoder in base.text.encoders:
                stack.enter_context(work.on_device(encoder.model, work.device))
            for done, text in enumerate(missing):
                work.callbacks.check()
                encoded = base.text.encode(text, work.device)
                if not done:
                    _check_text_space(work, sum(tensor.nbytes for tensor in encoded.values()), len(missing))
                cache.put(keys[text], encoded)
                work.callbacks.phase(say("encoding captions"), done + 1, len(missing))
    return keys


@torch.no_grad()
def encode_seen(work: EncodingContext, seen: Collection[Seen]) -> dict[Seen, str]:
    """Encode captions that the text encoders read with control pictures, and return their keys."""
    base, cache = work.base, work.cache
    keys: dict[Seen, str] = {}
    for caption, references in sorted(seen, key=lambda each: (repr(each[1]), each[0])):
        shown = [(each.control.digest, each.background, dataclasses.asdict(each.crop)) for each in references]
        identity = f"{base.text.identity}/{base.text.seen_as}"
        keys[caption, references] = text_key(caption=caption, encoder_id=identity, pictures=shown)
    missing = work.world.mine([each for each, key in keys.items() if not cache.has(key)])
    read = functools.lru_cache(maxsize=MOST_CONTROLS)(_pixels)  # of one picture after another
    for done, (caption, references) in enumerate(missing):
        work.callbacks.check()
        encoded = base.text.encode(caption, work.device, [read(each) for each in references])
        if not done:
            _check_text_space(work, sum(tensor.nbytes for tensor in encoded.values()), len(missing))
        cache.put(keys[caption, references], encoded)
        work.callbacks.phase(say("encoding captions with control pictures"), done + 1, len(missing))
    return keys


def _pixels(reference: Reference) -> Tensor:
    """Read a control picture as a model sees it, (3, H, W) in -1..1."""
    return pixels(cut(decoded(reference.control, reference.background), reference.crop))
