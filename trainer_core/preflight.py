"""Will the run fit? Memory settings are chosen from estimates, and disks looked at, before any model is loaded."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .config import MemoryConfig, RunConfig
from .estimate import CUDA_BLOCK, Estimate, estimate_step, optimizer_state
from .existing import learning_rates, outline_network
from .gradient_noise import looked_at
from .memory import DTYPES, Stream, describe, free_bytes, kept_activations, prepare, recompute, rungs, weight_bytes
from .models import CHUNK, MAX_CHUNKS, Words, count_tokens, word_ids
from .plan import Plan

ERROR = 0.1  # of the estimate; only what is larger by more than this is refused
RESERVE = 250e6  # bytes that kernels and torch's own bookkeeping take on a GPU besides
ENTRY = 350  # bytes that a file takes to say of a tensor what it is, and where in the state
BESIDE = 20_000  # bytes of the small files of a save
OTHER_WEIGHTS = ("float8", "nf4")  # what to propose to somebody whose run does not fit


def fit_memory(
    config: RunConfig, plan: Plan, tokenizer: Any, dtype: torch.dtype, device: torch.device
) -> tuple[list[MemoryConfig], str]:
    """Return the memory settings to start with and those to fall back on, and a sentence on what is needed.

    The settings are the fastest of those that the person has not fixed and that fit into what is free. Raises
    ValueError that names the cheapest settings that would fit when those do not.
    """
    free = free_bytes(device) - (RESERVE if device.type == "cuda" else 0)
    shape = largest_micro_batch(plan, tokenizer, word_ids(config.lora.embeddings))
    ladder = rungs(config.memory, device)
    for i, memory in enumerate(ladder):
        estimate = estimate_run(config, memory, shape, dtype, device)
        if estimate.total <= free or (i + 1 == len(ladder) and estimate.total * (1 - ERROR) <= free):
            tight = "" if estimate.total <= free else ", which is tight"
            room = f"{estimate.gigabytes} of {free / 1e9:.1f} GB that are free"
            return ladder[i:], f"Memory: about {room}, with {describe(memory)}{tight}."
    remedies = "; or ".join(_remedies(config, shape, dtype, device, free)) or "lower the resolution"
    raise ValueError(
        f"This run needs about {estimate.gigabytes} of memory with {describe(memory)}, and {free / 1e9:.1f} GB are "
        f"free: set {remedies}."
    )


def check_disk(config: RunConfig, plan: Plan, runs: Path, there: int = 0) -> None:
    """Raise ValueError when the saves of a run cannot fit beside each other into the folder of runs.

    One more is there than are kept while a new one is written. there: bytes of those that the run has already.
    """
    each, count = save_bytes(config, plan), config.saves.keep_last + 1 if config.saves.save_every else 1
    needed = each * count - there
    free = shutil.disk_usage(next(path for path in (runs, *runs.parents) if path.exists())).free
    if needed > free:
        raise ValueError(
            f"The saves of this run need {needed / 1e6:,.0f} MB ({count} of {each / 1e6:,.0f} MB each) and "
            f"{free / 1e6:,.0f} MB are free in {runs}; make room, or lower keep_last or the rank."
        )


def save_bytes(config: RunConfig, plan: Plan) -> int:
    """Return about how many bytes one save of a run takes: weights, averages, optimizer and LoRA files."""
    base, network = outline_network(config)
    network.to(DTYPES[config.lora.dtype])
    optimizer, train = config.optimizer, config.train
    rates = learning_rates(optimizer, base)
    groups = network.groups(rates, optimizer.conv_learning_rate, optimizer.lora_plus_ratio)
    parameters = [p for group in groups for p in group["params"]]
    with network.attached():  # what some layers write needs the frozen weight
        file = [tensor.numel() for tensor in network.tensors().values()]
    network.let_go()
    weights = [t.nbytes for t in network.state_dict().values()] * (2 if train.keeps_by else 1)
    state = optimizer_state(parameters, optimizer.replace(ema_device="same"))  # the average is saved wherever it is
    sizes = [*weights, *(count * dtype.itemsize for count, dtype in state), sum(looked_at(parameters)) * 4]
    for dtype in [train.save_dtype] * (2 if optimizer.ema_decay else 1) + ["float32"] * bool(train.keeps_by):
        sizes += [count * DTYPES[dtype].itemsize for count in file]
    return sum(sizes) + ENTRY * len(sizes) + BESIDE + 8 * plan.steps * (1 + len(plan.concept_names()))


def largest_micro_batch(plan: Plan, tokenizer: Any, words: Words | None = None) -> tuple[int, tuple[int, int], int]:
    """Return (samples, (width, height) in pixels, tokens of the conditioning) of the run's largest micro-batch."""
    size, count = max(plan.fullest_batches().items(), key=lambda batch: batch[1] * math.prod(batch[0]))
    chunks = {min(MAX_CHUNKS, max(1, -(-count_tokens(tokenizer, text, words) // CHUNK))) for text in plan.captions()}
    return count, size, (CHUNK + 2) * (math.lcm(*chunks) if count > 1 else max(chunks))


def estimate_run(
    config: RunConfig,
    memory: MemoryConfig,
    shape: tuple[int, tuple[int, int], int],
    dtype: torch.dtype,
    device: torch.device,
) -> Estimate:
    """Estimate the peak memory of a run's steps with some memory settings, in a dry run; shape as above."""
    meta = torch.device("meta")
    base, network = outline_network(config, dtype)
    rates = learning_rates(config.optimizer, base)
    network.to(DTYPES[config.lora.dtype])
    if not config.lora.embeddings and not any(rates[text.kohya] > 0 for text in base.texts):
        base.texts = ()
    prepare(base.unet, memory, config.base_model.unet_weights, dtype, meta, Stream(meta))
    for text in base.texts:
        recompute(text.model, memory.checkpointing)
    count, (width, height), tokens = shape
    with kept_activations(memory, (base.unet, *(text.model for text in base.texts)), meta):
        return estimate_step(
            base,
            network,
            batch_size=count,
            latent_size=(height // 8, width // 8),
            context_length=tokens,
            optimizer=config.optimizer,
            accumulates=config.train.accumulate > 1,
            prior=any(
                c.role == "prior_prediction" or (c.masks is not None and c.masks.prior_weight > 0)
                for c in config.dataset.concepts
            ),
            attention=memory.attention,
            weight_bytes=sum(weight_bytes(m) for m in (base.unet, *(text.model for text in base.texts))),
            block=CUDA_BLOCK if device.type == "cuda" else 1,
        )


def _remedies(
    config: RunConfig,
    shape: tuple[int, tuple[int, int], int],
    dtype: torch.dtype,
    device: torch.device,
    free: float,
) -> Iterator[str]:
    """Yield the cheapest change of each kind that makes a run fit: memory settings, weights, batch size."""

    def fits(config: RunConfig, memory: MemoryConfig, count: int) -> Estimate | None:
        estimate = estimate_run(config, memory, (count, *shape[1:]), dtype, device)
        return estimate if estimate.total <= free else None

    every = rungs(MemoryConfig(attention=config.memory.attention), device)
    for memory in every:
        if estimate := fits(config, memory, shape[0]):
            yield f"{describe(memory)} ({estimate.gigabytes})"
            return
    smallest = every[-1]
    for weights in OTHER_WEIGHTS:
        small = config.replace(base_model=config.base_model.replace(unet_weights=weights))
        if estimate := fits(small, smallest, shape[0]):
            yield f"unet_weights {weights} with {describe(smallest)} ({estimate.gigabytes})"
            break
    for count in sorted({1, *(shape[0] // n for n in (2, 4) if shape[0] // n)}, reverse=True):
        if count < shape[0] and (estimate := fits(config, smallest, count)):
            yield f"batch_size {count} with {describe(smallest)} ({estimate.gigabytes})"
            return
