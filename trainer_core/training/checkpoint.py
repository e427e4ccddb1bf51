"""Collect a run's state as tensors, and restore a run from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.tensor_tree import load_state
from ..config import node, run_again
from ..optim import arguments, build_optimizer, check_shapes, describe, load_exactly
from ..runs import HISTORY, OPTIMIZER, WEIGHTS, Checkpoint
from .state import Best, Run

GROUP_SETTINGS = ("lr", "base_lr", "weight_decay", "model", "name", "decays")  # set by us in the optimizer's groups


def state_of(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Collect everything needed to resume: weights and averages, the optimizer's state, losses and measurements."""
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
        "terms": {type(term).__name__: term.state_dict() for term in run.objective.terms},
    }
    history = {
        "losses": torch.tensor(run.losses, dtype=torch.float64),
        "concepts": {name: torch.tensor(losses, dtype=torch.float64) for name, losses in run.concepts.items()},
        "validation": run.validation,
        "fits": run.fits.state_dict(),
        "best": run.best and (run.best.steps, run.best.loss),
    }
    # A file each: where that of the optimizer or the history is damaged, the weights resume without it.
    return weights, optimizer, history


def restore(
    run: Run, weights: dict[str, Any], optimizer: dict[str, Any] | None, history: dict[str, Any] | None
) -> None:
    """Restore a run from the state that `state_of` collected.

    Without an optimizer's state the optimizer starts afresh; without history the losses so far are NaN. Raises
    ValueError for the state of another network, which a fork may name.
    """
    own, network = run.network.state_dict(), weights["network"]
    different = [k for k in {*own, *network} if k not in own or k not in network or own[k].shape != network[k].shape]
    if different:
        raise ValueError(
            f"The save to resume is of another network (it differs at {min(different)}); set "
            f"{node('lora')} as it was then, or continue its LoRA file by {node('existing_lora')}."
        )
    run.network.load_state_dict(network)
    if run.ema is not None:  # a fork may switch it on; it then starts from the saved weights
        saved = weights["ema"] or network
        for name, average in zip(_names(run, run.ema.parameters), run.ema.averages, strict=True):
            average.copy_(saved.get(name, network[name]))
    if weights["best"] is not None and run.config.train.keeps_by:
        run.best = Best(**weights["best"])
    run.at, run.saves = weights["at"], weights["saves"]
    unknown = torch.full((run.at,), math.nan)
    history = history or {"losses": unknown, "concepts": {}, "validation": []}
    run.losses[:], run.validation[:] = history["losses"].tolist(), history["validation"]  # the log reads these lists
    run.fits.load_state_dict(history.get("fits"))
    run.concepts = {name: history["concepts"].get(name, unknown).tolist() for name in run.concepts}
    if optimizer is not None:
        _restore_optimizer(run, optimizer)
        if run.scaler.is_enabled() and optimizer["scaler"]:  # a fork may change the precision
            run.scaler.load_state_dict(optimizer["scaler"])
        run.noise_scale.load_state_dict(optimizer["noise_scale"])
        for term in run.objective.terms:
            if state := optimizer["terms"].get(type(term).__name__):  # a fork may switch one on
                term.load_state_dict(state)


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Restore a run from a checkpoint; a damaged optimizer state or loss history is reset and reported.

    Raises ValueError for a save whose files are whole, but hold what no run of ours writes.
    """

    def load_part(name: str, consequence: str) -> Any:
        problem = checkpoint.problem(name)
        if problem:
            run.callbacks.note(f"{consequence}: in the save of step {checkpoint.step} {problem}.")
        return None if problem else load_state(checkpoint.path / name)

    optimizer = load_part(OPTIMIZER, "The optimizer state is reset")
    history = load_part(HISTORY, "Losses and measurements so far are lost")
    weights = load_state(checkpoint.path / WEIGHTS)
    try:
        if weights["at"] != checkpoint.step:
            raise LookupError(f"the weights are of step {weights['at']!r:.20}")
        restore(run, weights, optimizer, history)
    # It is a RuntimeError as well, and no fault of the save.
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"The save {checkpoint.path} does not hold the state of a run; delete that folder, then {run_again()}."
        ) from error


def _restore_optimizer(run: Run, state: dict[str, Any]) -> None:
    """Restore an optimizer's state; settings that a fork changed keep their new values."""
    if state["of"] != _identity(run):
        run.callbacks.note(f"The optimizer state is reset after step {run.at}: the save is of another optimizer.")
        return
    own = {*GROUP_SETTINGS, *arguments(run.config.optimizer)}
    settings = [{key: group[key] for key in own if key in group} for group in run.optimizer.param_groups]
    check_shapes(run.optimizer, state["optimizer"], lambda groups: build_optimizer(run.config.optimizer, groups))
    load_exactly(run.optimizer, state["optimizer"])
    for group, own_settings in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(own_settings)


def _identity(run: Run) -> dict[str, Any]:
    """Describe the optimizer of a state: its class, and the parameters of each group."""
    groups = run.optimizer.param_groups
    return {"class": describe(run.config.optimizer, False), "groups": [_names(run, g["params"]) for g in groups]}


def _names(run: Run, parameters: Sequence[Tensor]) -> list[str]:
    """Look up the network's names of parameters."""
    names = {id(parameter): name for name, parameter in run.network.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def read_history(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read losses, measurements and the best step up to a save."""
    return load_state(checkpoint.path / HISTORY)
