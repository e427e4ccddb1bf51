"""Trained token embeddings of words in captions: textual inversion (Gal et al. 2022)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.rng import generator
from ..config import EmbeddingConfig
from ..models import TextEncoder, Words

TYPICAL = (0.05, 0.95)  # quantiles; the lengths of nearly all words in a table lie between them


class Embeddings(nn.Module):
    """The trained vectors of some tokens in each text encoder; without tokens it does nothing.

    vectors: by the prefix of a text encoder's part, a (count, width) parameter for each token. The tables of the text
    encoders stay frozen; the vectors have ids below 0 (`words`) while attached.
    """

    def __init__(
        self,
        texts: Sequence[TextEncoder] = (),
        configs: Sequence[EmbeddingConfig] = (),
        words: Words | None = None,
        init: Mapping[str, Sequence[int]] | None = None,
        seed: int = 0,
    ) -> None:
        """Build the vectors of each token. init: ids of the words that initialise them, by token."""
        super().__init__()
        self._texts = {text.prefix: text for text in texts} if configs else {}
        self._configs = {config.token: config for config in configs}
        self._words: Words = words or {}
        self._limits: dict[str, tuple[float, float]] = {}
        lists = {}
        for prefix, text in self._texts.items():
            table = text.model.get_input_embeddings().weight.detach()
            lists[prefix] = nn.ParameterList(
                initial_vectors(
                    table, (init or {}).get(c.token, ()), c.vectors, generator(seed, f"embedding/{prefix}/{c.token}")
                )
                for c in configs
            )
            if not table.is_meta and any(c.keep_norm for c in configs):
                low, high = table.float().norm(dim=1).quantile(torch.tensor(TYPICAL, device=table.device)).tolist()
                self._limits[prefix] = low, high
        self.vectors: Any = nn.ModuleDict(lists)

    def attach(self) -> None:
        """Make the text encoders read the trained tokens from now on."""
        for prefix, text in self._texts.items():
            module = text.model.get_input_embeddings()
            if not isinstance(module, WithVectors):
                module.__class__ = _with_vectors(type(module))
                module.__dict__["vectors"] = self.vectors[prefix]  # not a child: the frozen model keeps its parameters
                text.words = self._words

    def detach(self) -> None:
        """Restore the text encoders exactly."""
        for text in self._texts.values():
            module = text.model.get_input_embeddings()
            if isinstance(module, WithVectors):
                del module.__dict__["vectors"]
                module.__class__ = type(module).__bases__[1]
                text.words = {}

    def release(self) -> None:
        """Detach, and drop the text encoders, to free their memory."""
        self.detach()
        self._texts = {}

    def groups(self) -> list[dict[str, Any]]:
        """Build an optimizer parameter group for each token, without weight decay."""
        return [
            {
                "params": [vectors[i] for vectors in self.vectors.values()],
                "lr": config.learning_rate,
                "base_lr": config.learning_rate,
                "decays": False,
                "model": f"embedding {config.token}",
                "name": f"embedding {config.token}",
            }
            for i, config in enumerate(self._configs.values())
        ]

    def freeze(self, token: str) -> None:
        """Freeze the vectors of a token."""
        index = list(self._configs).index(token)
        for vectors in self.vectors.values():
            vectors[index].requires_grad_(False)

    @property
    def trainable(self) -> bool:
        """Whether any vector is trained."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @torch.no_grad()
    def keep_norms(self) -> None:
        """Rescale vectors of tokens with keep_norm whose length left the range of nearly all words."""
        for prefix, (low, high) in self._limits.items():
            for vectors, config in zip(self.vectors[prefix], self._configs.values(), strict=True):
                if config.keep_norm and vectors.requires_grad:
                    norms = vectors.float().norm(dim=1, keepdim=True)
                    vectors.mul_((norms.clamp(low, high) / norms.clamp(min=1e-12)).to(vectors.dtype))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Collect the vectors of each token by text encoder, (count, width) float32 on the CPU."""
        return {
            token: {prefix: vectors[i].detach().float().cpu() for prefix, vectors in self.vectors.items()}
            for i, token in enumerate(self._configs)
        }


def initial_vectors(table: Tensor, ids: Sequence[int], count: int, draws: torch.Generator) -> nn.Parameter:
    """Build the initial (count, width) float32 vectors of a token from the rows of `ids`.

    Too few rows are repeated, too many are averaged in groups. Without ids: noise of the table's average row length.
    """
    if table.is_meta:
        return nn.Parameter(torch.empty(count, table.shape[1], device="meta"))
    if not ids:
        noise = torch.randn(count, table.shape[1], generator=draws)
        length = table.float().norm(dim=1).mean().cpu()
        return nn.Parameter(noise / noise.norm(dim=1, keepdim=True) * length)
    rows = table[torch.tensor(ids, device=table.device)].float().cpu()
    if len(ids) > count:
        return nn.Parameter(torch.stack([group.mean(dim=0) for group in rows.tensor_split(count)]))
    return nn.Parameter(rows[torch.arange(count) % len(ids)])


class WithVectors(nn.Module):
    """Base class added to a frozen token embedding while trained vectors are attached."""

    vectors: nn.ParameterList

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the embeddings of ids, (..., width); ids below 0 are trained vectors, -1 the first."""
        frozen = super().forward(ids.clamp(min=0))
        trained = F.embedding((-1 - ids).clamp(min=0), torch.cat(list(self.vectors)))
        return torch.where(ids[..., None] < 0, trained.to(frozen.dtype), frozen)


@functools.cache
def _with_vectors(kind: type) -> type:
    return type(f"{kind.__name__}WithVectors", (WithVectors, kind), {})
