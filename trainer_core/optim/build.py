"""Check the optimizer of the settings before a run, and build it from its library."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_has_kernel_for_dispatch_key, _dispatch_key_for_device

from ..common.devices import by_device, kind_of
from ..config import OPTIMIZERS, OptimizerConfig, SchedulerConfig, setting
from ..config.scheduler import RESTARTS
from .combined import Combined
from .custom import find_class, finds_step_size, read_arguments, try_out
from .libraries import classes
from .restore import lay_out_plainly
from .rounding import step_in_float32

UPDATE = "bitsandbytes::optimizer_update_8bit_blockwise"  # the operator of its 8-bit optimizers
SINCE_ON_CPU = (0, 50)  # first bitsandbytes whose 8-bit optimizers need no CUDA


def build_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]], seed: int = 0) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups {"params", "lr"}, as Network.groups makes them.

    In a group, "decays": False switches weight decay off, "model" names the parameters' model. Optimizers that
    estimate their step size are built once for each learning rate. bfloat16 parameters are rounded stochastically
    after each step, by `seed`. Schedule-free optimizers are ready to train. Raises ValueError as check_optimizer does.
    """
    kind, options = optimizer_class(config), arguments(config)
    parameters = [p for group in groups for p in group["params"]]
    check_device(config, parameters[0].device)
    # Set in each group, not as the class's default, about which Prodigy prints a line.
    decay = options.pop("weight_decay", None)
    known = inspect.signature(kind.__init__).parameters
    takes_decay = "weight_decay" in known
    if "lr" in known and known["lr"].default is inspect.Parameter.empty:
        options["lr"] = groups[0]["lr"]  # each group has its own
    if len(by_device(parameters)) > 1 and "foreach" in known and known["foreach"].default is True:
        options["foreach"] = False  # torch's own sort tensors by their device, and others do not
    apart, kinds = estimates(config), {kind: options}
    if rest := OPTIMIZERS[config.name].rest:
        other = OptimizerConfig(name=rest)
        kinds[optimizer_class(other)] = arguments(other)
        groups = [half for group in groups for half in _halves(group, *kinds)]
    parts: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        decays = group.get("decays", True)
        if takes_decay and (decay is not None or not decays):
            group = {**group, "weight_decay": decay if decays else 0.0}
        built_by = group.pop("kind", kind)
        parts.setdefault((built_by, _part(config, group) if apart else None), []).append(group)
    built: list[torch.optim.Optimizer] = []
    for part, ((built_by, _), members) in enumerate(parts.items()):
        optimizer = built_by(members, **kinds[built_by])
        if any(p.dtype == torch.bfloat16 for p in parameters):
            step_in_float32(optimizer, seed, part)
        if OPTIMIZERS[config.name].lays_out:
            lay_out_plainly(optimizer)
        if averages(config):
            optimizer.train()
        built.append(optimizer)
    return built[0] if len(built) == 1 else Combined(built)


def _halves(group: dict[str, Any], of_matrices: Any, of_rest: Any) -> Iterator[dict[str, Any]]:
    """Split a group into the matrices, which one class trains, and all else, which another does (Jordan 2024).

    Embeddings and magnitudes, which do not decay, are rows of numbers and no matrices.
    """
    halves: dict[Any, list[Tensor]] = {of_matrices: [], of_rest: []}
    for parameter in group["params"]:
        matrix = is_matrix(parameter.shape) and group.get("decays", True)
        halves[of_matrices if matrix else of_rest].append(parameter)
    return ({**group, "params": members, "kind": own} for own, members in halves.items() if members)


def is_matrix(shape: Sequence[int]) -> bool:
    """Tell whether weights of a shape are a matrix to an optimizer that trains matrices alone."""
    return len(shape) == 2 and min(shape) > 1


def _part(config: OptimizerConfig, group: dict[str, Any]) -> Any:
    """Compute the key of groups that share an optimizer: one step size is estimated per learning rate (and model)."""
    return group.get("lr"), group.get("model") if config.options.get("separate") else None


def estimates(config: OptimizerConfig) -> bool:
    """Tell whether the optimizer estimates its step size, which learning rates multiply.

    Raises ValueError as optimizer_class does.
    """
    if config.name != "custom":
        return OPTIMIZERS[config.name].estimates
    return finds_step_size(find_class(config.options["optimizer"]), config.options["arguments"])


def optimizer_class(config: OptimizerConfig) -> Any:
    """Import the optimizer's class; raises ValueError if its package is missing or too old."""
    if config.name == "custom":
        return find_class(config.options["optimizer"])
    kind = OPTIMIZERS[config.name]
    library, _, name = kind.path.rpartition(".")
    wanted = f"{kind.package} {kind.wanted} or newer" if kind.wanted else kind.package
    try:
        found = classes(library).get(name)
    except ImportError as error:
        raise ValueError(
            f"{config.name} needs the package {wanted}, which cannot be imported ({error}); install it with ComfyUI's "
            f"Python, or choose {kind.instead}."
        ) from error
    known = () if found is None else inspect.signature(found.__init__).parameters
    if lacking := [argument for argument in _own_arguments(config) if argument not in known]:
        lack = f"no class {name}" if found is None else f"no parameter {lacking[0]}"
        raise ValueError(
            f"{config.name} needs the package {wanted}, and the installed one has {lack}; update it with ComfyUI's "
            f"Python, or choose {kind.instead}."
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Convert the optimizer's settings to the arguments of its class."""
    if config.name == "custom":
        return read_arguments(find_class(config.options["optimizer"]), config.options["arguments"])
    return _own_arguments(config)


def _own_arguments(config: OptimizerConfig) -> dict[str, Any]:
    """Convert the settings of an optimizer of the table OPTIMIZERS to the arguments of its class."""
    given, kind = dict(config.options), OPTIMIZERS[config.name]
    given.pop("separate", None)
    if kind.own_beta1:
        given["beta1"] = given["beta1"] or None
    elif "beta1" in given:
        given["betas"] = tuple(given.pop(name) for name in ("beta1", "beta2", "beta3") if name in given)
    return {**given, **kind.fixed}


def averages(config: OptimizerConfig) -> bool:
    """Tell whether the optimizer is schedule-free: the weights to use are an average, which `eval` swaps in."""
    return OPTIMIZERS[config.name].averages or (
        config.name == "custom" and hasattr(find_class(config.options["optimizer"]), "eval")
    )


def check_optimizer(config: OptimizerConfig, scheduler: SchedulerConfig, device: torch.device) -> None:
    """Raise ValueError if the optimizer cannot run on this device, or with this schedule."""
    optimizer_class(config)
    check_device(config, device)
    if config.name == "custom":
        try_out(config, optimizer_class(config), arguments(config))
    if averages(config) and scheduler.name != "constant":
        raise ValueError(
            f"{describe(config, False)} replaces the schedule, which is {scheduler.name}; set "
            f"{setting('scheduler.name')} to constant."
        )
    if averages(config) and config.ema_decay:
        raise ValueError(
            f"{describe(config, False)} averages the weights already; set {setting('optimizer.ema_decay')} to 0."
        )
    if estimates(config) and config.lora_plus_ratio != 1:  # of a class by name; the table's own are refused earlier
        raise ValueError(
            f"lora_plus_ratio is {config.lora_plus_ratio:g}, but {describe(config, False)} estimates one step size for "
            f"all parts of a layer; set {setting('optimizer.lora_plus_ratio')} to 1."
        )
    if estimates(config) and scheduler.name in RESTARTS:
        raise ValueError(
            f"{describe(config, False)} does not work with restarts, because its step size never shrinks. Set "
            f"{setting('scheduler.name')} from {scheduler.name} to constant, cosine or rex."
        )
    if config.options.get("relative_step") and scheduler.name != "constant":
        raise ValueError(
            f"relative_step of {config.name} sets the learning rate itself, and the schedule is {scheduler.name}. Set "
            f"{setting('scheduler.name')} to constant, or {setting('options.relative_step')} to off."
        )


def check_device(config: OptimizerConfig, device: torch.device) -> None:
    """Raise ValueError if the optimizer does not support this kind of device."""
    kind, instead = OPTIMIZERS[config.name], OPTIMIZERS[config.name].instead
    if kind.package != "bitsandbytes" or kind_of(device).pages:
        return
    if kind.pages:
        raise ValueError(f"{config.name} needs an NVIDIA GPU; set {setting('optimizer.name')} to {instead}.")
    import bitsandbytes

    version = bitsandbytes.__version__
    if _numbers(version) < SINCE_ON_CPU:
        wanted = ".".join(map(str, SINCE_ON_CPU))
        raise ValueError(
            f"{config.name} on {device.type} needs bitsandbytes {wanted} or newer, and {version} is installed; upgrade "
            f"it, or choose {instead}."
        )
    if not _dispatch_has_kernel_for_dispatch_key(UPDATE, _dispatch_key_for_device(device.type)):
        missing = f"bitsandbytes has no {config.name} for {device.type}"
        raise ValueError(f"{missing}; set {setting('optimizer.name')} to {instead}.")


def remarks(config: OptimizerConfig) -> list[str]:
    """List remarks on settings that are allowed, but seldom intended."""
    found = []
    odd = {name: rate for name, rate in config.rates.items() if not 0.5 <= rate <= 2}
    if odd and estimates(config):
        name, rate = next(iter(odd.items()))
        found.append(
            f"{describe(config, False)} estimates its step size, and {name} {rate:g} multiplies it; set "
            f"{setting(f'optimizer.{name}')} to 1 unless you want that."
        )
    if config.options.get("relative_step"):
        found.append(f"{config.name} with relative_step ignores the size of learning rates; only 0 has an effect.")
    return found


def describe(config: OptimizerConfig, whole: bool = True) -> str:
    """Name an optimizer's class; whole: with its module and arguments, as in the metadata of LoRA files."""
    kind = optimizer_class(config)
    if not whole:
        return config.name if config.name != "custom" else kind.__name__
    given = ",".join(f"{name}={value!r}" for name, value in arguments(config).items())
    return f"{kind.__module__}.{kind.__qualname__}({given})"
