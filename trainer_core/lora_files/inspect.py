"""Tell what a LoRA is: what it was trained on, its layers, ranks, norms and singular values."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.side_by_side import cancelled_at_once
from ..common.wording import count
from .blocks import block_of, blocks_of
from .lora import HISTORY
from .read import LoraFile, list_some
from .resize import ReadWeight, decomposed, rank_of

ABOUT = {  # in the report -> keys of the metadata, the first that is there
    "title": ("modelspec.title", "ss_output_name"),
    "trained on": ("modelspec.architecture", "ss_base_model_version", "base_model"),
    "checkpoint": ("ss_sd_model_name",),
    "by": ("modelspec.implementation", "software", "ss_network_module"),
    "trigger words": ("modelspec.trigger_phrase", "trigger_word"),
    "steps": ("ss_steps", "ss_max_train_steps", "steps"),
    "learning rate": ("ss_learning_rate",),
    "pictures": ("ss_num_train_images",),
    "resolution": ("modelspec.resolution", "ss_resolution"),
    "date": ("modelspec.date",),
    "description": ("modelspec.description",),
}
LONGEST_TEXT = 200  # characters of a value in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """What is known of one layer."""

    name: str
    block: str
    kind: str
    rank: int  # 0: none
    norm: float  # of its change at strength 1, Frobenius; NaN where it depends on the model
    sigma: Tensor  # singular values of the change, (n,)

    @property
    def effective_rank(self) -> float:
        """Compute exp of the entropy of the singular values' shares (Roy & Vetterli 2007): how many count."""
        share = self.sigma / self.sigma.sum() if len(self.sigma) and self.sigma.sum() else torch.ones(1)
        return float(torch.special.entr(share).sum().exp())

    @property
    def knee(self) -> int:
        """Find after how many singular values their logarithm falls farthest below the line from first to last."""
        values = self.sigma[self.sigma > 0].log()
        if len(values) < 3:
            return len(values)
        line = torch.linspace(float(values[0]), float(values[-1]), len(values), dtype=values.dtype)
        return int((line - values).argmax()) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """What is known of a LoRA."""

    about: dict[str, str]
    history: list[str]  # what was done to it, oldest first
    layers: list[LayerFacts]
    blocks: dict[str, float]  # norm of all changes in a block, by its name, in the model's order
    words: tuple[str, ...]  # whose embeddings it holds


@cancelled_at_once
def inspect_lora(
    lora: LoraFile, weight: ReadWeight | None = None, progress: Callable[[float], None] | None = None
) -> Inspected:
    """Measure every layer of a LoRA. weight: the model's, for layers whose change depends on it."""
    layers = []
    for number, (name, layer) in enumerate(lora.layers.items()):
        look()
        if progress:
            progress(number / len(lora.layers))
        known = not layer.of_weight or weight is not None
        found = decomposed(layer, weight) if known else None
        norms = [float(tensor.double().norm()) for tensor in layer.tensors.values()] if layer.flat else [math.nan]
        norm = found.norm if found else math.hypot(*norms)
        sigma = found.sigma if found else torch.zeros(0, dtype=torch.float64)
        layers.append(
            LayerFacts(name=name, block=block_of(name), kind=layer.kind, rank=rank_of(layer), norm=norm, sigma=sigma)
        )
    blocks = {
        block: math.hypot(*(each.norm for each in layers if each.block == block and not math.isnan(each.norm)))
        for block in blocks_of(lora)
    }
    return Inspected(
        about=_about(lora.metadata), history=_history(lora.metadata), layers=layers, blocks=blocks, words=lora.tokens
    )


def _about(metadata: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for title, keys in ABOUT.items():
        text = next((metadata[key] for key in keys if metadata.get(key) not in (None, "", "None")), "")
        plain = "".join(character if character.isprintable() else " " for character in text).strip()
        if plain:
            found[title] = plain if len(plain) <= LONGEST_TEXT else f"{plain[:LONGEST_TEXT]}…"
    return found


def _history(metadata: Mapping[str, str]) -> list[str]:
    try:
        past = json.loads(metadata.get(HISTORY, "[]")[:100_000])
    except (ValueError, RecursionError):  # a stranger's
        return []
    entries = past if isinstance(past, list) else []
    return [json.dumps(entry, ensure_ascii=True)[:LONGEST_TEXT] for entry in entries[-20:]]


def describe_lora(found: Inspected, name: str, misfits: Mapping[str, str] | None = None) -> str:
    """Write the report. misfits: why layers would not be loaded, by name; None: no model is linked."""
    kinds = Counter(layer.kind for layer in found.layers)
    ranks = Counter(layer.rank for layer in found.layers if layer.rank)
    curves = [layer for layer in found.layers if len(layer.sigma)]
    lines = [
        f"{name}: {count(found.layers, 'layer')}, "
        f"{', '.join(f'{number} of {kind}' for kind, number in kinds.most_common())}.",
        *(f"{title}: {text}" for title, text in found.about.items()),
        *(f"then: {entry}" for entry in found.history),
    ]
    if ranks:
        lines.append("ranks: " + ", ".join(f"{rank} ({number})" for rank, number in sorted(ranks.items())))
    if found.words:
        lines.append(f"embeddings: {list_some(list(found.words))}")
    if curves:
        strongest = max(curves, key=lambda layer: layer.norm)
        still = [layer.name for layer in curves if not layer.norm]
        lines.append(
            f"norm of all changes: {math.hypot(*(layer.norm for layer in curves)):.4g}; largest: "
            f"{strongest.norm:.4g} ({strongest.name})"
        )
        lines.append(
            f"effective rank: {median(layer.effective_rank for layer in curves):.1f} in the middle of all layers; knee "
            f"of the singular values after {median(layer.knee for layer in curves):g}"
        )
        if still:
            lines.append(f"without effect: {count(still, 'layer')} ({list_some(still)})")
    if unknown := [layer.name for layer in found.layers if math.isnan(layer.norm)]:
        lines.append(
            f"{count(unknown, 'layer')} depend on the model ({list_some(unknown)}); link the MODEL to measure them."
        )
    if misfits is not None and not misfits:
        lines.append("All layers have their weight in the linked model.")
    for why in dict.fromkeys((misfits or {}).values()):
        names = [layer for layer, reason in (misfits or {}).items() if reason == why]
        lines.append(f"{count(names, 'layer')} would not be loaded, as {why}: {list_some(names)}")
    return "\n".join([*lines, *(f"{block}: {norm:.4g}" for block, norm in found.blocks.items())])
