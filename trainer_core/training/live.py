"""Encode pictures, masks and captions while training, micro-batch by micro-batch, where nothing of them is kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import MemoryConfig, SampleConfig, SamplePicture
from ..data.cache import MicroBatchCache
from ..data.controls import References
from ..data.plan import Sample
from ..memory import moves_weights, on_device, plain_attention, staying
from ..models import encoding
from ..networks import Network
from ..objective import Term, texts_beside
from .encode import encode
from .encoded import Encoded, EncodingContext, EncodingNeeds, Seen


@dataclass(kw_only=True, slots=True)
class LiveEncoder:
    """Encodes what some samples need, exactly as a cached run does before its first step: each item by itself."""

    work: EncodingContext  # with the text encoders as they were before the first step
    network: Network
    terms: Sequence[Term]
    drawn: Mapping[SamplePicture, References]  # control pictures of samples
    texts: bool  # False: the text encoders are trained, and passes encode captions themselves
    trained: Sequence[Any] = ()  # text encoders that passes use, too, and that stay where they are

    def encode(self, samples: Sequence[Sample], prompts: Collection[str], memory: MemoryConfig) -> Encoded:
        """Encode what passes on samples read; prompts: beside their captions and what is kept for these."""
        base, plan = self.work.base, self.work.plan
        texts, seen, references = set[str](), set[Seen](), set[Any]()
        for sample in samples:
            shown = plan.shown(sample)
            own = {sample.caption, *texts_beside(self.terms, sample.caption), *prompts}
            references.update(shown)
            if shown and base.text.seen_as:
                seen |= {(text, shown) for text in own}
            else:
                texts |= own
        needs = EncodingNeeds(
            views={sample.view for sample in samples},
            masked={sample.view for sample in samples if sample.use_mask},
            blank={sample.crop.bucket for sample in samples if not sample.use_mask},
            references=references,
            texts=texts if self.texts else None,
            seen=seen,
        )
        return self._encode(needs, memory)

    def encode_prompts(self, config: SampleConfig, memory: MemoryConfig) -> Encoded:
        """Encode what the samples of a run are drawn with: prompts, and their control pictures."""
        seen = {(text, shown) for picture, shown in self.drawn.items() for text in (picture.prompt, picture.negative)}
        needs = EncodingNeeds(
            references=set[Any]().union(*self.drawn.values()),
            texts=config.texts() if self.texts else None,
            seen=seen if self.work.base.text.seen_as else (),
        )
        return self._encode(needs, memory)

    def free(self) -> None:
        """Let go of the models."""
        self.work.base.free()
        self.work.small = None

    def _encode(self, needs: EncodingNeeds, memory: MemoryConfig) -> Encoded:
        """Forget what was encoded, and encode other things: with the network as it is, without dropout."""
        moves = moves_weights(memory)

        def moved(model: Any, device: torch.device) -> AbstractContextManager[Any]:
            return on_device(model, device) if moves and model not in self.trained else staying(model, device)

        self.work.cache = MicroBatchCache(self.work.cache.folder)
        self.work.on_device = moved
        self.network.set_micro_batch(None)
        with encoding(self.work.base), plain_attention(self.work.device):
            return replace(encode(self.work, needs), drawn=self.drawn)
