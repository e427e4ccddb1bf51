"""The optimizer of a configuration, checked before the run and built from its library."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

from ..config import OPTIMIZERS, OptimizerConfig, SchedulerConfig
from .custom import find_class, read_arguments, try_out
from .rounding import step_in_float32
from .together import Together

SINCE_ON_CPU = (0, 50)  # the bitsandbytes whose 8-bit optimizers need no CUDA

# What the node does not ask. Prodigy Plus would split by group, where ours split by learning rate and model; it would
# draw from torch's own generator to round; decoupled decay is what the setting's tooltip says.
FIXED: dict[str, dict[str, Any]] = {
    "adamw": {"fused": True},
    "radam": {"decoupled_weight_decay": True},
    "adopt": {"weight_decouple": True},
    "prodigy_plus_schedule_free": {"split_groups": False, "stochastic_rounding": False},
}


def build_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]], seed: int = 0) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups {"params", "lr"}, as Network.groups makes them.

    A group's "decays": False keeps weight decay off it, its "model" says whose parameters these are. Optimizers that
    estimate their step size are built once for each learning rate. bfloat16 parameters are rounded stochastically
    after each step, by `seed`. Schedule-free optimizers are ready to train. Raises ValueError as check_optimizer does.
    """
    kind, options = optimizer_class(config), arguments(config)
    parameters = [p for group in groups for p in group["params"]]
    check_device(config, parameters[0].device)
    # By group, not as a default: for all of them the same, and Prodigy prints a line about a default.
    decay = options.pop("weight_decay", None)
    takes_decay = "weight_decay" in inspect.signature(kind.__init__).parameters
    parts: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        decays = group.get("decays", True)
        if takes_decay and (decay is not None or not decays):
            group = {**group, "weight_decay": decay if decays else 0.0}
        parts.setdefault(_part(config, group), []).append(group)
    built: list[torch.optim.Optimizer] = []
    for part, members in enumerate(parts.values()):
        optimizer = kind(members, **options)
        if any(p.dtype == torch.bfloat16 for p in parameters):
            step_in_float32(optimizer, seed, part)
        if averages(config):
            optimizer.train()
        built.append(optimizer)
    return built[0] if len(built) == 1 else Together(built)


def _part(config: OptimizerConfig, group: dict[str, Any]) -> Any:
    """Return what groups must share to be one optimizer's: one step size is estimated for equal rates alone."""
    if not OPTIMIZERS[config.name].estimates:
        return None
    return group.get("lr"), group.get("model") if config.options["separate"] else None


def optimizer_class(config: OptimizerConfig) -> Any:
    """Import the optimizer's class; raises ValueError when its package is missing, too old, or does not know it."""
    kind = OPTIMIZERS[config.name]
    if config.name == "custom":
        return find_class(config.options["optimizer"])
    _check_package(config.name)
    module, _, name = kind.path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _check_package(name: str) -> str:
    """Return the version of an optimizer's package; raises ValueError when it is missing or too old."""
    kind = OPTIMIZERS[name]
    asked = f'pip install "{kind.package}>={kind.wanted}"' if kind.wanted else f"pip install {kind.package}"
    try:
        version = importlib.metadata.version(kind.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{name} needs the package {kind.package}: {asked}; or choose {kind.instead}.") from error
    if _numbers(version) < _numbers(kind.wanted):
        raise ValueError(
            f"{name} needs {kind.package} {kind.wanted} or newer, and {version} is installed: {asked}; or choose "
            f"{kind.instead}."
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Return what the class is built with, from the optimizer's own parameters."""
    if config.name == "custom":
        return read_arguments(find_class(config.options["optimizer"]), config.options["arguments"])
    given = dict(config.options)
    given.pop("separate", None)
    if config.name == "adafactor":
        given["beta1"] = given["beta1"] or None
    elif betas := tuple(given.pop(name) for name in ("beta1", "beta2", "beta3") if name in given):
        given["betas"] = betas
    return {**given, **FIXED.get(config.name, {})}


def averages(config: OptimizerConfig) -> bool:
    """Return whether the optimizer is schedule-free: what is used is an average, which `eval` brings forth."""
    return OPTIMIZERS[config.name].averages or (
        config.name == "custom" and hasattr(find_class(config.options["optimizer"]), "eval")
    )


def check_optimizer(config: OptimizerConfig, scheduler: SchedulerConfig, device: torch.device) -> None:
    """Raise ValueError when the optimizer cannot run on this device, or not with this schedule."""
    optimizer_class(config)
    check_device(config, device)
    if config.name == "custom":
        try_out(config, optimizer_class(config), arguments(config))
    if averages(config) and scheduler.name != "constant":
        raise ValueError(
            f"{describe(config, False)} takes the place of a schedule, and the schedule is {scheduler.name}; set that "
            "to constant."
        )
    if averages(config) and config.ema_decay:
        raise ValueError(f"{describe(config, False)} averages the weights already; set ema_decay to 0.")
    if OPTIMIZERS[config.name].estimates and "restart" in scheduler.name:
        raise ValueError(
            f"{config.name} does not go with the schedule {scheduler.name}: its step size never shrinks, so that each "
            "restart would be at the largest; choose constant, cosine or rex."
        )
    if config.options.get("relative_step") and scheduler.name != "constant":
        raise ValueError(
            f"With relative_step the learning rate of {config.name} follows from the steps alone, and the schedule is "
            f"{scheduler.name}; set that to constant, or relative_step off."
        )


def check_device(config: OptimizerConfig, device: torch.device) -> None:
    """Raise ValueError when the optimizer has no code for this kind of device."""
    if device.type == "cuda" or OPTIMIZERS[config.name].package != "bitsandbytes":
        return
    version = _check_package(config.name)
    if config.name == "paged_adamw8bit":
        raise ValueError("paged_adamw8bit needs an NVIDIA GPU, whose driver moves the pages; choose adamw8bit.")
    if _numbers(version) < SINCE_ON_CPU:
        wanted = ".".join(map(str, SINCE_ON_CPU))
        raise ValueError(
            f"{config.name} on {device.type} needs bitsandbytes {wanted} or newer, and {version} is installed; upgrade "
            f"it, or choose {OPTIMIZERS[config.name].instead}."
        )


def remarks(config: OptimizerConfig) -> list[str]:
    """Return sentences about settings that are allowed and seldom meant."""
    found = []
    odd = {name: rate for name, rate in config.rates.items() if not 0.5 <= rate <= 2}
    if OPTIMIZERS[config.name].estimates and odd:
        name, rate = next(iter(odd.items()))
        found.append(
            f"{config.name} finds its step size by itself, and {name} {rate:g} multiplies it: unless that is meant, "
            "set it to 1."
        )
    if config.options.get("relative_step"):
        found.append(f"{config.name} with relative_step: learning rates above 0 only say what learns, not how fast.")
    return found


def describe(config: OptimizerConfig, whole: bool = True) -> str:
    """Return the class of an optimizer, and as a whole its parameters as well, as LoRA files tell it."""
    kind = optimizer_class(config)
    if not whole:
        return config.name if config.name != "custom" else kind.__name__
    given = ",".join(f"{name}={value!r}" for name, value in arguments(config).items())
    return f"{kind.__module__}.{kind.__qualname__}({given})"
