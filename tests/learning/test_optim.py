"""Optimizers: 8-bit AdamW follows AdamW, and is refused in one sentence where it cannot run."""

import importlib.metadata

import pytest
import torch

from lora_atelier.trainer_core import optim
from lora_atelier.trainer_core.config import OptimizerConfig
from lora_atelier.trainer_core.optim import build_optimizer, check_optimizer

CPU = torch.device("cpu")


def descend(name: str, steps: int = 120) -> tuple[torch.Tensor, dict]:
    """Return where an optimizer gets to from one start on a quadratic bowl, and its state."""
    target = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(96, 128))
    config = OptimizerConfig(name=name, learning_rate=0.03, weight_decay=0.01)
    optimizer = build_optimizer(config, [{"params": [weight], "lr": 0.03, "base_lr": 0.03}])
    for _ in range(steps):
        ((weight - target) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach() - target, dict(optimizer.state[weight])


def test_adamw_in_8_bits_goes_where_adamw_goes_with_a_quarter_of_its_state() -> None:
    exact, state = descend("adamw")
    small, eighth = descend("adamw8bit")
    assert exact.norm() < 0.2 * torch.randn(96, 128).norm()
    assert (small - exact).norm() < 0.1 * exact.norm() + 0.02 * torch.randn(96, 128).norm()
    size = {n: sum(t.nbytes for t in s.values() if torch.is_tensor(t)) for n, s in (("32", state), ("8", eighth))}
    assert eighth["state1"].dtype == torch.uint8 and size["8"] < 0.3 * size["32"]


def test_8_bits_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimizerConfig(name="adamw8bit")
    check_optimizer(config, CPU)
    monkeypatch.setattr(optim, "SINCE_ON_CPU", (99, 0))
    with pytest.raises(ValueError, match=r"adamw8bit on cpu needs bitsandbytes 99\.0 or newer, and .* is installed"):
        build_optimizer(config, [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}])
    check_optimizer(config, torch.device("cuda"))
    check_optimizer(OptimizerConfig(), CPU)

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ValueError, match="needs the package bitsandbytes: pip install bitsandbytes"):
        check_optimizer(config, CPU)
