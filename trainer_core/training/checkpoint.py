"""A run's state as tensors, and a run restored from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.tensor_tree import load_state
from ..optim import arguments, describe, load_exactly
from ..runs import HISTORY, OPTIMIZER, WEIGHTS, Checkpoint
from .state import Best, Run

OF_GROUPS = ("lr", "base_lr", "weight_decay", "model", "decays")  # in an optimizer's groups: the settings' own


def state_of(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Collect everything needed to resume: weights and averages; the optimizer; losses and measurements so far."""
    best = run.best and {"steps": run.best.steps, "loss": run.best.loss, "weights": run.best.weights}
    weights = {
        "network": run.network.state_dict(),
        "ema": dict(zip(_names(run, run.ema.parameters), run.ema.averages, strict=True)) if run.ema else None,
        "best": best,
        "at": run.at,
        "saves": run.saves,
    }
    optimizer = {
        "optimizer": run.optimizer.state_dict(),
        "of": _identity(run),
        "scaler": run.scaler.state_dict(),
        "noise_scale": run.noise_scale.state_dict(),
    }
    course = {
        "losses": torch.tensor(run.losses, dtype=torch.float64),
        "concepts": {name: torch.tensor(losses, dtype=torch.float64) for name, losses in run.concepts.items()},
        "validation": run.validation,
        "best": run.best and (run.best.steps, run.best.loss),
    }
    return weights, optimizer, course


def restore(run: Run, weights: dict[str, Any], optimizer: dict[str, Any] | None, course: dict[str, Any] | None) -> None:
    """Let a run be where its state was taken, as `state_of` returns it; without an optimizer's that begins anew.

    Without losses and measurements these are not known.

    Raises ValueError for the state of another network, as a fork may name one.
    """
    own, network = run.network.state_dict(), weights["network"]
    odd = [k for k in {*own, *network} if k not in own or k not in network or own[k].shape != network[k].shape]
    if odd:
        raise ValueError(
            f"The save to go on with is of another network (it differs at {min(odd)}); set LoRA Config as it was then, "
            "or go on with its LoRA file by Existing LoRA."
        )
    run.network.load_state_dict(network)
    if run.ema is not None:  # of a fork that has none yet, it begins with the weights as they are
        saved = weights["ema"] or network
        for name, average in zip(_names(run, run.ema.parameters), run.ema.averages, strict=True):
            average.copy_(saved.get(name, network[name]))
    if weights["best"] is not None and run.config.train.keeps_by:
        run.best = Best(**weights["best"])
    run.at, run.saves = weights["at"], weights["saves"]
    none = torch.full((run.at,), math.nan)
    course = course or {"losses": none, "concepts": {}, "validation": []}
    run.losses[:], run.validation[:] = course["losses"].tolist(), course["validation"]  # the log reads these lists
    run.concepts = {name: course["concepts"].get(name, none).tolist() for name in run.concepts}
    if optimizer is not None:
        _restore_optimizer(run, optimizer)
        if run.scaler.is_enabled() and optimizer["scaler"]:  # the precision may be another one now
            run.scaler.load_state_dict(optimizer["scaler"])
        run.noise_scale.load_state_dict(optimizer["noise_scale"])


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Restore a run from a checkpoint; a damaged optimizer state or loss history is reset and reported."""

    def part(name: str, lost: str) -> Any:
        problem = checkpoint.problem(name)
        if problem:
            run.callbacks.note(f"{lost}, for in the save of step {checkpoint.step} {problem}.")
        return None if problem else load_state(checkpoint.path / name)

    optimizer = part(OPTIMIZER, "The optimizer begins anew")
    course = part(HISTORY, "Losses and measurements so far are lost")
    restore(run, load_state(checkpoint.path / WEIGHTS), optimizer, course)


def _restore_optimizer(run: Run, state: dict[str, Any]) -> None:
    """Give an optimizer its state back; settings that a fork has changed stay as they are now."""
    if state["of"] != _identity(run):
        run.callbacks.note(f"The optimizer begins anew after step {run.at}: the save is of another one.")
        return
    own = {*OF_GROUPS, *arguments(run.config.optimizer)}
    settings = [{key: group[key] for key in own if key in group} for group in run.optimizer.param_groups]
    load_exactly(run.optimizer, state["optimizer"])
    for group, kept in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(kept)


def _identity(run: Run) -> dict[str, Any]:
    """Describe the optimizer that a state belongs to: its class, and the parameters of each group."""
    groups = run.optimizer.param_groups
    return {"class": describe(run.config.optimizer, False), "groups": [_names(run, g["params"]) for g in groups]}


def _names(run: Run, parameters: Sequence[Tensor]) -> list[str]:
    """Return how the network calls parameters."""
    names = {id(parameter): name for name, parameter in run.network.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def read_course(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return losses, measurements and the best step up to a save."""
    return load_state(checkpoint.path / HISTORY)
