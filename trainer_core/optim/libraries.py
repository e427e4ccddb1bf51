"""The libraries that optimizers come from, each with a function that imports it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Library(NamedTuple):
    """One library of optimizers."""

    package: str  # its name for pip
    load: Callable[[], Any]  # imports it; ImportError without it


def _torch() -> Any:
    return torch.optim


def _pytorch_optimizer() -> Any:
    import pytorch_optimizer

    return pytorch_optimizer


def _prodigyopt() -> Any:
    import prodigyopt

    return prodigyopt


def _prodigyplus() -> Any:
    import prodigyplus

    return prodigyplus


def _schedulefree() -> Any:
    import schedulefree

    return schedulefree


def _transformers() -> Any:
    import transformers.optimization

    return transformers.optimization


def _bitsandbytes() -> Any:
    import bitsandbytes.optim

    return bitsandbytes.optim


def _own() -> Any:
    from . import automagic

    return automagic


def _lion_pytorch() -> Any:
    import lion_pytorch

    return lion_pytorch


def _dadaptation() -> Any:
    import dadaptation

    return dadaptation


# By the names that users write, in the order in which a class is searched. No other module is ever imported by name:
# workflows may come from strangers, and importing a module runs it.
LIBRARIES = {
    "torch.optim": Library("torch", _torch),
    "pytorch_optimizer": Library("pytorch-optimizer", _pytorch_optimizer),
    "prodigyopt": Library("prodigyopt", _prodigyopt),
    "prodigyplus": Library("prodigy-plus-schedule-free", _prodigyplus),
    "schedulefree": Library("schedulefree", _schedulefree),
    "transformers.optimization": Library("transformers", _transformers),
    "bitsandbytes.optim": Library("bitsandbytes", _bitsandbytes),
    "lion_pytorch": Library("lion-pytorch", _lion_pytorch),
    "atelier": Library("torch", _own),
    "dadaptation": Library("dadaptation", _dadaptation),
}


def classes(library: str) -> dict[str, Any]:
    """List the optimizer classes of a library by name; raises ImportError without the library."""
    members = vars(LIBRARIES[library].load())
    return {
        name: member
        for name, member in members.items()
        if inspect.isclass(member) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
    }
