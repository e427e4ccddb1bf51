"""A stand-in for the package xformers, which has no kernels for the CPU: the function that we call, by torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from lora_atelier.trainer_core.common.devices import KINDS


class StandIn(ModuleType):
    """The package, of which the function that we call computes by torch's own operators, on any device."""

    def __init__(self):
        super().__init__("xformers")
        self.ops = ModuleType("xformers.ops")
        self.ops.LowerTriangularMask = type("LowerTriangularMask", (), {})
        self.ops.memory_efficient_attention = self.attend
        self.calls = []

    def attend(self, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        """Compute attention of (B, M, H, K) rows as xformers' documentation writes it down."""
        assert op is None and output_dtype is None and p == 0
        assert all(each.stride(-1) == 1 for each in (query, key, value))
        scores = torch.einsum("bmhk,bnhk->bhmn", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        kind = "none"
        if isinstance(attn_bias, self.ops.LowerTriangularMask):
            kind, rows = "triangle", torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~rows, -torch.inf)
        elif attn_bias is not None:
            kind = "bias"
            assert attn_bias.shape == scores.shape and attn_bias.dtype == query.dtype
            assert all(step % (16 // query.element_size()) == 0 for step in attn_bias.stride()[:-1])
            scores = scores + attn_bias
        self.calls.append((kind, torch.is_grad_enabled()))
        return torch.einsum("bhmn,bnhk->bmhk", scores.softmax(-1), value)


@pytest.fixture
def package(monkeypatch):
    """Give a stand-in for the package, which runs on the CPU, too."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "xformers", stand_in)
    monkeypatch.setitem(sys.modules, "xformers.ops", stand_in.ops)
    monkeypatch.setitem(KINDS, "cpu", replace(KINDS["cpu"], kernels=True))
    return stand_in
