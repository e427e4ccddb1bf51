"""What the UNet reads beside noised latents and timesteps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.axes import Framing
from ..base import Conditioning
from .family import SIZE_CHANNELS
from .text import CHUNK, MAX_CHUNKS, ClipEncoder, batch_context, encode_caption


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The UNet's inputs for a batch, besides noised latents and timesteps."""

    context: Tensor  # (B, L, D)
    mask: Tensor | None = None  # (B, L) bool, the context that is no padding; None without padding
    pooled: Tensor | None = None  # (B, P), of families that use one
    sizes: Tensor | None = None  # (B, 6): original height and width, crop top and left, trained height and width
    painted: Tensor | None = (
        None  # (B, 5, H, W), of inpainting models: mask, and latents of the picture without the masked region
    )

    def some(self, samples: slice) -> Conditions:
        """Select the conditions of some samples."""
        rest = {name: getattr(self, name) for name in ("mask", "pooled", "sizes", "painted")}
        chosen = {name: value[samples] for name, value in rest.items() if value is not None}
        return Conditions(context=self.context[samples], **chosen)


@dataclass(frozen=True)
class UNetConditions:
    """The conditions of a UNet's batches; implements `ConditionsOfBatch`."""

    unet: Any
    texts: tuple[ClipEncoder, ...]
    dtype: torch.dtype
    weights: bool  # of words in captions

    def batch(
        self,
        captions: Sequence[Conditioning],
        framings: Sequence[Framing],
        device: torch.device,
        painted: Tensor | None = None,
        references: Sequence[Sequence[Tensor]] = (),
    ) -> Conditions:
        """Join the conditions of a batch on a device; painted (B, 5, H, W) for inpainting models."""
        del references  # the UNet reads none
        context, mask = batch_context([c["context"] for c in captions])
        context, mask = context.to(device, self.dtype), None if mask is None else mask.to(device)
        pooled = [c["pooled"] for c in captions if "pooled" in c]
        painted = None if painted is None else painted.to(device)
        if not pooled:
            return Conditions(context=context, mask=mask, painted=painted)
        sizes = torch.tensor([framing.numbers for framing in framings], device=device)
        joined = torch.stack(pooled).to(device, self.dtype)
        return Conditions(context=context, mask=mask, pooled=joined, sizes=sizes, painted=painted)

    def without_data(self, count: int, axes: Sequence[int], tokens: int) -> Conditions:
        """Build a batch's conditions on the meta device; text encoders in memory run there."""
        config = self.unet.config
        context = torch.empty(count, tokens, config.cross_attention_dim, dtype=self.dtype, device="meta")
        pooled = sizes = painted = None
        if config.addition_embed_type == "text_time":
            sizes = torch.empty(count, 6, dtype=torch.int64, device="meta")
            width = config.projection_class_embeddings_input_dim - 6 * SIZE_CHANNELS
            pooled = context.new_empty(count, width)
        if self.texts:
            rows = tokens // (CHUNK + 2)
            caption = _WholeChunks(min(rows, MAX_CHUNKS))
            text, weights = "(any:2)", self.weights  # a weight takes one more row of the text encoder
            each = [encode_caption(self.texts, caption, text, "meta", weights=weights) for _ in range(count)]
            context = torch.stack([c.context.repeat(tokens // len(c.context), 1) for c in each]).to(self.dtype)
            pooled = None if pooled is None else torch.stack([c.pooled for c in each if c.pooled is not None])
        if config.in_channels > config.out_channels:  # of inpainting models
            painted = torch.empty(count, config.in_channels - config.out_channels, *axes, device="meta")
        return Conditions(context=context, pooled=pooled, sizes=sizes, painted=painted)


class _WholeChunks:
    """A stand-in for the tokenizer that makes any caption fill a number of chunks."""

    bos_token_id, eos_token_id = 0, 1

    def __init__(self, chunks: int) -> None:
        self.ids = [2] * (CHUNK * chunks)

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
        return {"input_ids": self.ids}
