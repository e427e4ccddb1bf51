"""Check that the saves of a run fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..config import MOST_LORAS, RunConfig, setting
from ..data.plan import Plan
from ..memory import DTYPES
from ..networks import Network
from ..networks.of_model import learning_rates
from .outline import Outline

TENSOR_ENTRY = 350  # bytes in a file to describe a tensor: its name, its shape, its entry in the state
SMALL_FILES = 20_000  # bytes of the small files of a save, and of values that nobody counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """What the size of a save follows from before a run begins; tensors are on the meta device."""

    config: RunConfig
    plan: Plan
    network: Network
    parameters: list[Tensor]  # that are trained


Content = Callable[[Ahead], list[int]]  # lists the bytes of each tensor of a run's state that a save holds


def check_disk(
    config: RunConfig, plan: Plan, outline: Outline, runs: Path, content: Content, existing: int = 0
) -> None:
    """Raise ValueError when the saves of a run do not fit into the folder of runs.

    While a save is written, keep_last older ones are on the disk. existing: bytes of saves that the run already has,
    and of LoRAs of its sampled steps.
    """
    each = save_bytes(config, plan, outline, content)
    count = config.saves.keep_last + 1 if config.saves.save_every else 1
    sampled = sampled_steps(config, plan)
    loras = sampled * sum(_files(config, outline))
    needed = each * count + loras - existing
    free = shutil.disk_usage(next(path for path in (runs, *runs.parents) if path.exists())).free
    if needed > free:
        with_samples = f", and {loras / 1e6:,.0f} MB for the LoRAs of {sampled} sampled steps" if loras else ""
        rarer = f", or {setting('saves.sample_every')} higher" if loras else ""
        raise ValueError(
            f"The saves of this run need {needed / 1e6:,.0f} MB ({count} of {each / 1e6:,.0f} MB each{with_samples}) "
            f"and {free / 1e6:,.0f} MB are free in {runs}; make room, or set {setting('saves.keep_last')} or "
            f"{setting('lora.rank')} lower{rarer}."
        )


def sampled_steps(config: RunConfig, plan: Plan) -> int:
    """Count the steps whose LoRA is kept because they draw samples; 1 where minutes decide, which nobody can count."""
    every, unit = config.saves.sample_every, config.saves.sample_unit
    if not every or not config.sample.prompts:
        return 0
    if unit == "minutes":
        return 1
    length = plan.steps if unit == "steps" else int(plan.epochs_after(plan.steps))
    return min(MOST_LORAS, max(0, length - 1) // every)  # the end is saved anyway


def save_bytes(config: RunConfig, plan: Plan, outline: Outline, content: Content) -> int:
    """Estimate the bytes of one save of a run: its state and its LoRA files."""
    optimizer, network = config.optimizer, outline.network
    rates = learning_rates(optimizer, outline.base)
    groups = network.groups(rates, optimizer.conv_learning_rate, optimizer.lora_plus_ratio)
    parameters = [p for group in groups for p in group["params"]]
    sizes = content(Ahead(config=config, plan=plan, network=network, parameters=parameters)) + _files(config, outline)
    return sum(sizes) + TENSOR_ENTRY * len(sizes) + SMALL_FILES


def _files(config: RunConfig, outline: Outline) -> list[int]:
    """List the bytes of each tensor in the LoRA files of a save."""
    network, train = outline.network, config.train
    with network.attached():  # the tensors of some layers are computed from the frozen weight
        counts = [tensor.numel() for tensor in network.tensors().values()]
    averages, best = 2 if config.optimizer.ema_decay else 1, ["float32"] * bool(train.keeps_by)
    return [count * DTYPES[dtype].itemsize for dtype in [train.save_dtype] * averages + best for count in counts]
