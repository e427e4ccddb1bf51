"""Choose memory settings that fit, from estimates, before any model is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..common.devices import kind_of
from ..config import MemoryConfig, RunConfig, setting
from ..data.plan import Plan
from ..memory import (
    DTYPES,
    IN_FILE,
    STORED,
    Stream,
    are_free,
    describe,
    free_bytes,
    moves_weights,
    multiply_in,
    prepare,
    recompute,
    rungs,
    weight_bytes,
)
from ..models import BaseModel, word_ids
from ..networks.rounded import rounding_layers
from ..objective import Objective, other_captions, strengths, terms_of, texts_beside
from .estimate import Encoding, Estimate, LargestBatch, estimate_encoding, estimate_step
from .outline import Outline, outline_run, trains_text

ERROR = 0.1  # of the estimate; a run is refused only where it is larger by more than this
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
    error = 0 if kept else ERROR  # what others were promised is no room to be tight in
    shape = largest_micro_batch(config, plan, outline.base)
    ladder = _ladder(config, config.memory, outline, device, held)
    encoding = None if vae is None else encoding_of(config, plan, outline.base, vae, device)
    for i, memory in enumerate(ladder):
        estimate = estimate_run(config, outline, memory, shape, device, encoding)
        if estimate.total <= free or (i + 1 == len(ladder) and estimate.total * (1 - error) <= free):
            tight = "" if estimate.total <= free else ", which is tight"
            left = f" beside {config.memory.keep_free:g} GB for other programs" if kept else ""
            room = f"{estimate.gigabytes} of {free / 1e9:.1f} GB that are free{left}"
            # A model that is loaded whole has no weights in its file any more.
            in_file = memory.offload_weights == IN_FILE
            rest = [each for each in ladder[i:] if (each.offload_weights == IN_FILE) == in_file]
            return rest, f"Memory: about {room}, with {describe(memory)}{tight}."
    found = list(_remedies(config, shape, outline, device, free, encoding))
    if kept and (less := free + kept - estimate.total) >= 0:
        found.append(f"keep_free {math.floor(less / 1e8) / 10:g}")
    remedies = "; or ".join(found) or "lower the resolution"
    raise ValueError(
        f"This run needs about {estimate.gigabytes} of memory with {describe(memory)}, and "
        f"{are_free(free, config.memory)}: set {remedies}."
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


def _ladder(
    config: RunConfig, memory: MemoryConfig, outline: Outline, device: torch.device, held: int
) -> list[MemoryConfig]:
    """List the memory settings to try; weights that RAM cannot hold stay in their file where they may.

    held: bytes of the model's files that are already in RAM.
    """
    ladder = rungs(memory, device)
    if memory.offload_weights != "auto" or why_not_in_file(config):
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
    if not trains_text(config, base):
        base.free("text")
    prepare(base, memory, config.base_model.weights, meta, Stream(meta))
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
    return step if encoding is None else encoding.beside(step, moves=moves)


def _remedies(
    config: RunConfig,
    shape: LargestBatch,
    outline: Outline,
    device: torch.device,
    free: float,
    encoding: Encoding | None,
) -> Iterator[str]:
    """Yield the cheapest change of each kind that would make a run fit: memory settings, weights, batch size."""

    dtype = outline.base.denoiser.dtype

    def fits(config: RunConfig, memory: MemoryConfig, count: int) -> Estimate | None:
        outline = outline_run(config, dtype=dtype)
        beside = encoding if memory.encodings == "none" else None
        estimate = estimate_run(config, outline, memory, replace(shape, samples=count), device, beside)
        return estimate if estimate.total <= free else None

    own = MemoryConfig(**{name: getattr(config.memory, name) for name in ("attention", "encodings", "keep_free")})
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
