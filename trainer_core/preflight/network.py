"""Count the size of a network before the run: layers, parameters and file size, by model and by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..config import DENOISER_ONLY, LoraConfig, RunConfig, fill_lora, setting
from ..lora_files.continued import file_remarks
from ..models import BaseModel, Source
from ..networks import Network, TrainedLayer, choose_layers, remarks_on_blocks
from .outline import Outline
from .report import table

BYTES = {"float16": 2, "float32": 4}  # of a number in the file; bfloat16 as float16


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSize:
    """The size of a network in one part of a base model, or in one block of the denoiser."""

    name: str
    layers: int
    parameters: int  # trained numbers
    numbers: int  # in the file
    ranks: tuple[int, ...]  # all that occur, rising; () for algorithms without a rank
    lr_factors: tuple[float, ...]  # all that occur, rising


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSize:
    """The size of a network, by model and by block."""

    models: list[PartSize]  # models with a trained layer, the denoiser first
    blocks: list[PartSize]  # all of the denoiser, in its order; empty when it is not trained
    remarks: list[str]


def measure_run(config: RunConfig, outline: Outline) -> NetworkSize:
    """Count a run's trained layers and parameters before anything is loaded."""
    size = measure_network(outline.base, outline.network, config.lora)
    return replace(size, remarks=[*size.remarks, *file_remarks(config), *_own_rank(config.lora, size)])


def _own_rank(lora: LoraConfig, size: NetworkSize) -> list[str]:
    """Say which rank counts where a LoRA is continued: that of its file."""
    ranks = sorted({rank for part in size.models for rank in part.ranks})
    if not lora.start or not ranks:
        return []
    own = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return [f"{Path(lora.start).name} is continued with its own rank, {own}; {setting('lora.rank')} has no effect."]


def outline_size(source: Source, config: LoraConfig) -> NetworkSize:
    """Count layers and parameters of a new network in all parts of a base model, from the file's header alone."""
    base = source.outline()
    config = fill_lora(config, base.defaults)
    parts = base.parts[:1] if config.preset in DENOISER_ONLY else base.parts
    with torch.device("meta"):
        network = Network(choose_layers(base, config, [part.prefix for part in parts]), config, 0)
    return measure_network(base, network, config)


def measure_network(base: BaseModel, network: Network, config: LoraConfig) -> NetworkSize:
    """Count a network's layers and parameters; base and network may be on the meta device."""
    numbers: Counter[str] = Counter()
    with network.attached():  # the tensors of some layers are computed from the frozen weight
        for name, tensor in network.tensors().items():
            numbers[name.partition(".")[0]] += tensor.numel()
    parameters = {name: sum(p.numel() for p in layer.parameters()) for name, layer in network.layers.items()}

    def part(name: str, chosen: Iterable[TrainedLayer]) -> PartSize:
        own = list(chosen)
        return PartSize(
            name=name,
            layers=len(own),
            parameters=sum(parameters[trained.name] for trained in own),
            numbers=sum(numbers[trained.name] for trained in own),
            ranks=tuple(sorted({trained.rank for trained in own})) if config.ranked else (),
            lr_factors=tuple(sorted({trained.lr_factor for trained in own})),
        )

    models = [part(p.title, (t for t in network.chosen if t.part == p.prefix)) for p in base.parts]
    if not models[0].layers:
        return NetworkSize(models=[model for model in models if model.layers], blocks=[], remarks=[])
    return NetworkSize(
        models=[model for model in models if model.layers],
        blocks=[part(name, (t for t in network.chosen if t.block == name)) for name in base.layers.blocks],
        remarks=remarks_on_blocks(base, config),
    )


def describe_network(size: NetworkSize) -> str:
    """Write a table of models with layers, parameters and file sizes, then the remarks."""
    rows = [_row(model.name, model.layers, model.parameters, model.numbers) for model in size.models]
    if len(rows) > 1:
        sums = [sum(getattr(m, field) for m in size.models) for field in ("layers", "parameters", "numbers")]
        rows.append(_row("total", *sums))
    head = ("LoRA in", "layers", "parameters", *(f"file in {dtype}" for dtype in BYTES))
    sentences = list(size.remarks)
    if idle := [block.name for block in size.blocks if not block.layers]:
        sentences.append(f"Blocks of the {size.models[0].name} without a trained layer: {', '.join(idle)}.")
    first = (
        table(head, rows) if rows else "Only words are trained: each gets an embedding's file, and there is no LoRA."
    )
    return "\n\n".join(filter(None, [first, "\n".join(f"- {sentence}" for sentence in sentences)]))


def count_numbers(number: int) -> str:
    """Format a number of parameters: 512, 17.4 K, 6.78 M."""
    for unit, name in ((1_000_000, "M"), (1_000, "K")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _row(name: str, layers: int, parameters: int, numbers: int) -> tuple[object, ...]:
    sizes = (f"{max(numbers * bytes_each / 1e6, 0.01):.3g} MB" for bytes_each in BYTES.values())
    return name, layers, count_numbers(parameters), *sizes
