"""Check that the saves of a run fit on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..config import RunConfig, setting
from ..data.fit import BINS
from ..data.plan import Plan
from ..memory import DTYPES
from ..networks.of_model import learning_rates
from ..optim.noise_scale import looked_at
from .estimate import optimizer_state
from .outline import Outline

TENSOR_ENTRY = 350  # bytes in a file to describe a tensor: its name, its shape, its entry in the state
SMALL_FILES = 20_000  # bytes of the small files of a save


def check_disk(config: RunConfig, plan: Plan, outline: Outline, runs: Path, existing: int = 0) -> None:
    """Raise ValueError when the saves of a run do not fit into the folder of runs.

    While a save is written, keep_last older ones are on the disk. existing: bytes of saves that the run already has.
    """
    each, count = save_bytes(config, plan, outline), config.saves.keep_last + 1 if config.saves.save_every else 1
    needed = each * count - existing
    free = shutil.disk_usage(next(path for path in (runs, *runs.parents) if path.exists())).free
    if needed > free:
        raise ValueError(
            f"The saves of this run need {needed / 1e6:,.0f} MB ({count} of {each / 1e6:,.0f} MB each) and "
            f"{free / 1e6:,.0f} MB are free in {runs}; make room, or set {setting('saves.keep_last')} or "
            f"{setting('lora.rank')} lower."
        )


def save_bytes(config: RunConfig, plan: Plan, outline: Outline) -> int:
    """Estimate the bytes of one save of a run: weights, averages, optimizer and LoRA files."""
    base, network = outline.base, outline.network
    optimizer, train = config.optimizer, config.train
    rates = learning_rates(optimizer, base)
    groups = network.groups(rates, optimizer.conv_learning_rate, optimizer.lora_plus_ratio)
    parameters = [p for group in groups for p in group["params"]]
    with network.attached():  # the tensors of some layers are computed from the frozen weight
        file = [tensor.numel() for tensor in network.tensors().values()]
    weights = [t.nbytes for t in network.state_dict().values()] * (2 if train.keeps_by else 1)
    state = optimizer_state(parameters, optimizer.replace(ema_device="same"))  # the average is saved wherever it is
    sizes = [*weights, *(count * dtype.itemsize for count, dtype in state), sum(looked_at(parameters)) * 4]
    for dtype in [train.save_dtype] * (2 if optimizer.ema_decay else 1) + ["float32"] * bool(train.keeps_by):
        sizes += [count * DTYPES[dtype].itemsize for count in file]
    history = 8 * plan.steps * (1 + len(plan.concept_names())) + (8 + 4 * BINS) * len(plan.manifest.pictures)
    return sum(sizes) + TENSOR_ENTRY * len(sizes) + SMALL_FILES + history
