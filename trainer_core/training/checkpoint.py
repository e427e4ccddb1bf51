"""Collect a run's state as tensors, tell their size ahead, and restore a run from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.tensor_tree import load_state
from ..config import node, run_again
from ..data.fit import BYTES
from ..optim import arguments, build_optimizer, check_shapes, describe, load_exactly
from ..optim.noise_scale import looked_at
from ..preflight.disk import Ahead
from ..preflight.estimate import optimizer_state
from ..runs import HISTORY, OPTIMIZER, WEIGHTS, Checkpoint
from .state import Best, Run

GROUP_SETTINGS = ("lr", "base_lr", "weight_decay", "model", "name", "decays")  # set by us in the optimizer's groups


class Field(NamedTuple):
    """A value in a file of a save: how it is taken from a run, how a run takes it back, and how large it is."""

    name: str
    of: Callable[[Run], Any]
    # Given all values of its file. A field that older saves lack reads them by `get`.
    put: Callable[[Run, Mapping[str, Any]], None] = lambda run, saved: None
    bytes: Callable[[Ahead], list[int]] = lambda ahead: []  # of each tensor; a few numbers count as nothing


def _put(name: str) -> Callable[[Run, Mapping[str, Any]], None]:
    """Set the attribute of that name; a save of before the line was added leaves it as the run starts with it."""
    return lambda run, saved: setattr(run, name, saved.get(name, getattr(run, name)))


def _averages_of(run: Run) -> dict[str, Tensor] | None:
    return dict(zip(_names(run, run.ema.parameters), run.ema.averages, strict=True)) if run.ema else None


def _put_averages(run: Run, saved: Mapping[str, Any]) -> None:
    """Take the averages; a fork may have switched them on, and they then start from the saved weights."""
    if run.ema is not None:
        averages, network = saved["ema"] or saved["network"], saved["network"]
        for name, average in zip(_names(run, run.ema.parameters), run.ema.averages, strict=True):
            average.copy_(averages.get(name, network[name]))


def _best_of(run: Run) -> dict[str, Any] | None:
    return run.best and {"steps": run.best.steps, "loss": run.best.loss, "weights": run.best.weights}


def _put_best(run: Run, saved: Mapping[str, Any]) -> None:
    if saved["best"] is not None and run.config.train.keeps_by:
        run.best = Best(**saved["best"])


def _put_optimizer(run: Run, saved: Mapping[str, Any]) -> None:
    """Take an optimizer's state; settings that a fork changed keep their new values."""
    if saved["of"] != _identity(run):
        run.callbacks.note(f"The optimizer state is reset after step {run.at}: the save is of another optimizer.")
        return
    own = {*GROUP_SETTINGS, *arguments(run.config.optimizer)}
    settings = [{key: group[key] for key in own if key in group} for group in run.optimizer.param_groups]
    check_shapes(run.optimizer, saved["optimizer"], lambda groups: build_optimizer(run.config.optimizer, groups))
    load_exactly(run.optimizer, saved["optimizer"])
    for group, own_settings in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(own_settings)


def _put_scaler(run: Run, saved: Mapping[str, Any]) -> None:
    if run.scaler.is_enabled() and saved["scaler"]:  # a fork may change the precision
        run.scaler.load_state_dict(saved["scaler"])


def _terms_of(run: Run) -> dict[str, Any]:
    return {type(term).__name__: term.state_dict() for term in run.objective.terms}


def _put_terms(run: Run, saved: Mapping[str, Any]) -> None:
    for term in run.objective.terms:
        if state := saved["terms"].get(type(term).__name__):  # a fork may switch one on
            term.load_state_dict(state)


def _put_losses(run: Run, saved: Mapping[str, Any]) -> None:
    run.losses[:] = saved["losses"].tolist()  # the log reads this list


def _put_validation(run: Run, saved: Mapping[str, Any]) -> None:
    run.validation[:] = saved["validation"]  # as losses


def _concepts_of(run: Run) -> dict[str, Tensor]:
    return {name: _series(each) for name, each in run.concepts.items()}


def _put_concepts(run: Run, saved: Mapping[str, Any]) -> None:
    run.concepts = {name: saved["concepts"].get(name, _unknown(run.at)).tolist() for name in run.concepts}


def _series(losses: Sequence[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def _unknown(steps: int) -> Tensor:
    return torch.full((steps,), math.nan)


def _bytes_of_weights(ahead: Ahead) -> list[int]:
    return [tensor.nbytes for tensor in ahead.network.state_dict().values()]


def _bytes_of_averages(ahead: Ahead) -> list[int]:
    return [4 * p.numel() for p in ahead.parameters] if ahead.config.optimizer.ema_decay else []


def _bytes_of_best(ahead: Ahead) -> list[int]:
    return _bytes_of_weights(ahead) if ahead.config.train.keeps_by else []


def _bytes_of_optimizer(ahead: Ahead) -> list[int]:
    apart = ahead.config.optimizer.replace(ema_device="cpu")  # the average has a line of its own
    return [count * dtype.itemsize for count, dtype in optimizer_state(ahead.parameters, apart)]


def _bytes_of_concepts(ahead: Ahead) -> list[int]:
    return [8 * ahead.plan.steps] * len(ahead.plan.concept_names())


def _own(name: str, size: Callable[[Ahead], list[int]]) -> Field:
    """Describe the state of an object of a run; it takes None from saves that lack it."""

    def put(run: Run, saved: Mapping[str, Any]) -> None:
        getattr(run, name).load_state_dict(saved.get(name))

    return Field(name, lambda run: getattr(run, name).state_dict(), put, size)


# ALL THAT A SAVE HOLDS of a run, beside its LoRA files: a new value is one line here. Each key is a file of its own, so
# that the weights resume where that of the optimizer or the history is damaged.
CONTENT: dict[str, tuple[Field, ...]] = {
    WEIGHTS: (
        _own("network", _bytes_of_weights),
        Field("ema", _averages_of, _put_averages, _bytes_of_averages),
        Field("best", _best_of, _put_best, _bytes_of_best),
        Field("at", lambda run: run.at, _put("at")),
        Field("saves", lambda run: run.saves, _put("saves")),
        Field("multiplies_in", lambda run: run.multiplies_in, _put("multiplies_in")),
        Field("exact_blocks", lambda run: run.exact_blocks, _put("exact_blocks")),
    ),
    OPTIMIZER: (
        Field("optimizer", lambda run: run.optimizer.state_dict(), _put_optimizer, _bytes_of_optimizer),
        Field("of", lambda run: _identity(run)),  # of which optimizer the state is
        Field("scaler", lambda run: run.scaler.state_dict(), _put_scaler),
        _own("noise_scale", lambda ahead: [4 * sum(looked_at(ahead.parameters))]),
        Field("terms", _terms_of, _put_terms),
    ),
    HISTORY: (
        Field("losses", lambda run: _series(run.losses), _put_losses, lambda ahead: [8 * ahead.plan.steps]),
        Field("concepts", _concepts_of, _put_concepts, _bytes_of_concepts),
        Field("validation", lambda run: run.validation, _put_validation),
        _own("fits", lambda ahead: [BYTES * len(ahead.plan.manifest.pictures)]),
        Field("best", lambda run: run.best and (run.best.steps, run.best.loss)),  # for the result
    ),
}


def sizes_ahead(ahead: Ahead) -> list[int]:
    """List the bytes of each tensor that `state_of` will collect."""
    return [size for fields in CONTENT.values() for field in fields for size in field.bytes(ahead)]


def state_of(run: Run) -> dict[str, dict[str, Any]]:
    """Collect everything needed to resume, by the file of a save."""
    return {file: {field.name: field.of(run) for field in fields} for file, fields in CONTENT.items()}


def restore(run: Run, saved: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Restore a run from the state that `state_of` collected.

    Without an optimizer's state the optimizer starts afresh; without history the losses so far are NaN. Raises
    ValueError for the state of another network, which a fork may name.
    """
    weights = saved[WEIGHTS] or {}
    own, network = run.network.state_dict(), weights["network"]
    different = [k for k in {*own, *network} if k not in own or k not in network or own[k].shape != network[k].shape]
    if different:
        raise ValueError(
            f"The save to resume is of another network (it differs at {min(different)}); set "
            f"{node('lora')} as it was then, or continue its LoRA file by {node('existing_lora')}."
        )
    lost = {HISTORY: {"losses": _unknown(weights["at"]), "concepts": {}, "validation": []}}
    for file, fields in CONTENT.items():
        if values := saved[file] or lost.get(file):
            for field in fields:
                field.put(run, values)


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
        restore(run, {WEIGHTS: weights, OPTIMIZER: optimizer, HISTORY: history})
    except torch.OutOfMemoryError:  # a RuntimeError as well, and no fault of the save
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"The save {checkpoint.path} does not hold the state of a run; delete that folder, then {run_again()}."
        ) from error


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
