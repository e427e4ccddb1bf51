"""Choose memory settings that fit, from estimates, before any model is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..common.devices import kind_of
from ..common.wording import names
from ..config import MemoryConfig, RunConfig, setting
from ..data.plan import Plan
from ..memory import (
    BUDGETS,
    DTYPES,
    IN_FILE,
    STORED,
    Stream,
    are_free,
    bytes_beside,
    describe,
    free_bytes,
    moves_weights,
    multiply_in,
    place,
    prepare,
    recompute,
    rungs,
    second_card,
    weight_bytes,
)
from ..models import BaseModel, word_ids
from ..networks.rounded import rounding_layers
from ..objective import Objective, other_captions, strengths, terms_of, texts_beside
from .budget import hold
from .estimate import Encoding, Estimate, LargestBatch, estimate_encoding, estimate_step
from .outline import Outline, outline_run, trains_text

ERROR = 0.1  # of the estimate; a run is refused only where it is larger by more than this
KEPT_BY_REMEDIES = ("attention", "encodings", "keep_free", "second_card", "second_card_share")  # settings of Memory
OTHER_WEIGHTS = ("float8", "nf4")  # proposed where a run does not fit


def fit_memory(
    config: RunConfig, plan: Plan, outline: Outline, device: torch.device, held: int = 0, vae: Any = None
) -> tuple[list[MemoryConfig], str]:
    """Choose the fastest memory settings that fit; return them, then the fallbacks, and a sentence on the memory.

    Settings that the user has fixed stay. Raises ValueError when none fits; it names the cheapest settings that would.
    held: bytes of the model's files that are already in RAM. vae: the autoencoder's outline, where it encodes while
    training.
    """
    kind, kept = kind_of(device), config.memory.kept_free
    free = free_bytes(device) - kind.reserve + (held if kind.shares_ram else 0) - kept
    card = second_card(config.memory, device)
    beside = 0 if card is None else free_bytes(card) - kind_of(card).reserve - kept
    if card is not None and not config.memory.second_card_share:
        config = config.replace(memory=config.memory.replace(second_card_share=share_of(beside, free)))
    error = 0 if kept else ERROR  # what others were promised is no room to be tight in
    shape = largest_micro_batch(config, plan, outline.base)
    ladder = _ladder(config, config.memory, outline, device, held)
    encoding = None if vae is None else encoding_of(config, plan, outline.base, vae, device)
    for i, memory in enumerate(ladder):
        estimate = estimate_run(config, outline, memory, shape, device, encoding)
        if estimate.fits(free, beside) or (i + 1 == len(ladder) and estimate.fits(free, beside, error)):
            tight = "" if estimate.fits(free, beside) else ", which is tight"
            left = f" beside {config.memory.keep_free:g} GB for other programs" if kept else ""
            second = f" and {beside / 1e9:.1f}" if card else ""
            room = f"{estimate.gigabytes} of {free / 1e9:.1f}{second} GB that are free{left}"
            # A model that is loaded whole has no weights in its file any more.
            in_file = memory.offload_weights == IN_FILE
            rest = [each for each in ladder[i:] if (each.offload_weights == IN_FILE) == in_file]
            return rest, f"Memory: about {room}, with {describe(memory)}{tight}."
    found = list(_remedies(config, shape, outline, device, (free, beside), encoding))
    if kept and (less := free + kept - estimate.total) >= 0:
        found.append(f"keep_free {math.floor(less / 1e8) / 10:g}")
    second = "" if card is None else _on_each(estimate, (device, free), (card, beside))
    remedies = "; or ".join(found) or "lower the resolution"
    raise ValueError(
        f"This run needs about {estimate.gigabytes} of memory with {describe(memory)}, and "
        f"{are_free(free, config.memory)}{second}: set {remedies}."
    )


def why_not_in_file(config: RunConfig) -> str:
    """Say why a run's frozen weights cannot stay in their file; "" if they can."""
    if config.base_model.connected is not None:
        return "ComfyUI reads the weights of a connected model itself"
    if config.lora.beneath:
        return "a LoRA beneath changes the weights, and the file has them as they were"
    if config.base_model.weights != "auto":
        return f"the file has weights in a format of its own, and {setting('base_model.weights')} asks for another"
    return ""


def check_in_file(config: RunConfig) -> None:
    """Raise ValueError for weights that should stay in their file and cannot."""
    if config.memory.offload_weights == IN_FILE and (why := why_not_in_file(config)):
        raise ValueError(f"Weights cannot stay in their file: {why}; set {setting('memory.offload_weights')} to auto.")


def _on_each(estimate: Estimate, first: tuple[torch.device, float], second: tuple[torch.device, float]) -> str:
    """Say what is free on the second card, and which of the cards lack room."""
    pairs = ((first, estimate.total), (second, estimate.beside))
    without = [str(device) for (device, free), needed in pairs if needed > free]
    lack = f"{names(without)} {'lack' if len(without) > 1 else 'lacks'} room"
    return f" on {first[0]} and {max(second[1], 0) / 1e9:.1f} GB on {second[0]}; {lack}"


def share_of(beside: float, free: float) -> float:
    """Share the blocks out as the free bytes of the second card and of the first one, (0, 0.95], to the percent."""
    both = max(beside, 0) + max(free, 0)
    return min(max(round(max(beside, 0) / both, 2) if both else 0.5, 0.01), 0.95)


def _ladder(
    config: RunConfig, memory: MemoryConfig, outline: Outline, device: torch.device, held: int
) -> list[MemoryConfig]:
    """List the memory settings to try; weights that RAM cannot hold stay in their file where they may.

    held: bytes of the model's files that are already in RAM.
    """
    ladder = rungs(memory, device)
    if memory.offload_weights != "auto" or memory.second_card or why_not_in_file(config):
        return ladder
    if kind_of(device).shares_ram:  # a read weight costs more time than all that is recomputed
        return [*ladder, ladder[-1].replace(offload_weights=IN_FILE)]
    fits = weight_bytes(outline.base.denoiser.module) <= free_bytes(torch.device("cpu")) + held
    return ladder if fits else rungs(memory.replace(offload_weights=IN_FILE), device)


def largest_micro_batch(config: RunConfig, plan: Plan, base: BaseModel) -> LargestBatch:
    """Find the shape of the run's largest micro-batch."""
    terms, words = terms_of(config), word_ids(config.lora.embeddings)
    size, count = max(plan.fullest_batches().items(), key=lambda batch: batch[1] * math.prod(batch[0]))
    captions = plan.captions()
    return LargestBatch(
        samples=count,
        latents=base.latents.axes(size),
        tokens=base.text.longest_batch(captions | other_captions(terms, plan), count, words),
        caption=max(sorted(captions), key=lambda caption: len(texts_beside(terms, caption))),
        masked=any(plan.has_mask(picture) for picture in plan.trained),
        # Several strengths have a backward pass each.
        accumulates=config.train.accumulate > 1 or len(strengths(terms, plan.step(0)[0])) > 1,
    )


def encoding_of(config: RunConfig, plan: Plan, base: BaseModel, vae: Any, device: torch.device) -> Encoding:
    """Estimate the memory of the models that encode while training; vae: the autoencoder's outline."""
    return estimate_encoding(
        base,
        vae,
        () if trains_text(config, base) else [text.model for text in base.text.encoders],
        size=max(((bucket[0], bucket[1]) for bucket in plan.fullest_batches()), key=math.prod),
        dtype=DTYPES.get(config.base_model.vae_precision, torch.float32),
        block=kind_of(device).block,
    )


def estimate_run(
    config: RunConfig,
    outline: Outline,
    memory: MemoryConfig,
    shape: LargestBatch,
    device: torch.device,
    encoding: Encoding | None = None,
) -> Estimate:
    """Estimate the peak memory of a run's steps with some memory settings, in a dry run.

    Prepares the outline for these settings; afterwards only settings that save more memory can be estimated on it.
    encoding: of models that encode while training.
    """
    base, meta = outline.base, torch.device("meta")
    place(base.denoiser.units(), memory, meta)
    if not trains_text(config, base):
        base.free("text")
    hold(base.denoiser.units(), 1)
    prepare(base, memory, config.base_model.weights, meta, Stream(meta))
    hold(base.denoiser.units(), BUDGETS.get(memory.checkpointing, 1))
    if memory.compute in STORED:
        for layers in rounding_layers(base).values():
            multiply_in(memory.compute, layers)
    for text in base.text.encoders:
        recompute(text.units(), memory.checkpointing)
    models = (base.denoiser.module, *(text.model for text in base.text.encoders))
    objective = Objective(config.objective, base.noise, config.train.seed, base.levels, terms_of(config))
    for term in objective.terms:
        term.begin(objective.path, config.train.seed, meta)
    step = estimate_step(
        base,
        outline.network,
        objective,
        shape,
        optimizer=config.optimizer,
        memory=memory,
        weight_bytes=sum(map(weight_bytes, models)),
        block=kind_of(device).block,
    )
    moves = moves_weights(memory) and not kind_of(device).shares_ram  # there they stay where they are
    apart = bytes_beside(base.denoiser.units())
    step = replace(step, weights=step.weights - apart, beside=step.beside + apart)
    return step if encoding is None else encoding.beside(step, moves=moves)


def _remedies(
    config: RunConfig,
    shape: LargestBatch,
    outline: Outline,
    device: torch.device,
    free: tuple[float, float],
    encoding: Encoding | None,
) -> Iterator[str]:
    """Yield the cheapest change of each kind that would make a run fit: memory settings, weights, batch size."""

    dtype = outline.base.denoiser.dtype

    def fits(config: RunConfig, memory: MemoryConfig, count: int) -> Estimate | None:
        outline = outline_run(config, dtype=dtype)
        beside = encoding if memory.encodings == "none" else None
        estimate = estimate_run(config, outline, memory, replace(shape, samples=count), device, beside)
        return estimate if estimate.fits(*free) else None

    own = MemoryConfig(**{name: getattr(config.memory, name) for name in KEPT_BY_REMEDIES})
    every = _ladder(config, own, outline, device, 0)
    smallest = every[-1]
    for memory in every if fits(config, smallest, shape.samples) else ():  # else each would be tried in vain
        if estimate := fits(config, memory, shape.samples):
            yield f"{describe(memory)} ({estimate.gigabytes})"
            return
    if encoding is not None and (estimate := fits(config, cached := smallest.replace(encodings="disk"), shape.samples)):
        yield f"encodings disk with {describe(cached)} ({estimate.gigabytes})"
    for weights in (each for each in OTHER_WEIGHTS if each != "float8" or kind_of(device).float8):
        small = config.replace(base_model=config.base_model.replace(weights=weights))
        if estimate := fits(small, smallest, shape.samples):
            yield f"weights {weights} with {describe(smallest)} ({estimate.gigabytes})"
            break
    for count in sorted({1, *(shape.samples // n for n in (2, 4) if shape.samples // n)}, reverse=True):
        if count < shape.samples and (estimate := fits(config, smallest, count)):
            yield f"batch_size {count} with {describe(smallest)} ({estimate.gigabytes})"
            return
