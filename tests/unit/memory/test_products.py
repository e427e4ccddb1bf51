"""Products with frozen weights: torch's own, by whichever library computes them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lora_atelier.trainer_core.memory import products

INPUTS = {
    "a few rows": lambda: torch.randn(3, 48),
    "many rows": lambda: torch.randn(2, 100, 48),
    "one vector": lambda: torch.randn(48),
    "no rows": lambda: torch.randn(2, 0, 48),
    "turned": lambda: torch.randn(48, 100, 2).permute(2, 1, 0),
    "repeated": lambda: torch.randn(1, 1, 48).expand(2, 100, 48),
    "every other": lambda: torch.randn(100, 96)[:, ::2],
}
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Counted(torch.Tensor):
    """A kind of tensor that no library knows."""


WEIGHTS = {
    "a tensor": lambda weight: weight,
    "a parameter": lambda weight: nn.Parameter(weight, requires_grad=False),
    "a view": lambda weight: torch.cat([weight, weight])[: len(weight)],
    "turned": lambda weight: weight.t().contiguous().t(),
    "of another kind": lambda weight: weight.as_subclass(Counted),
}


def close(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    bound = EXACT[expected.dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("given", INPUTS)
def test_products_are_those_of_torch(given, weight, dtype):
    torch.manual_seed(0)
    x = INPUTS[given]().to(dtype)
    matrix = WEIGHTS[weight](torch.randn(32, 48).to(dtype))
    bias = torch.randn(32).to(dtype)
    with torch.no_grad():
        assert close(products.linear(x, matrix), F.linear(x, matrix))
        assert close(products.linear(x, matrix, bias), F.linear(x, matrix, bias))
        assert close(products.input_gradient(x, matrix.t()), x @ matrix.t())


def test_a_torch_without_the_faster_library_computes_the_same(monkeypatch):
    torch.manual_seed(0)
    x, matrix = torch.randn(200, 48), torch.randn(32, 48)
    found = products.linear(x, matrix), products.input_gradient(x, matrix.t())
    monkeypatch.setattr(products, "_has_onednn", lambda: False)
    expected = products.linear(x, matrix), products.input_gradient(x, matrix.t())
    assert torch.equal(expected[0], F.linear(x, matrix))
    assert all(close(*pair) for pair in zip(found, expected, strict=True))
