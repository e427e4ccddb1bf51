"""Products in int8 on any processor. One without instructions for them adds in 16 bits, and a run there stays exact."""

import pytest
import torch

from lora_atelier.trainer_core.memory.eight_bits import multiplies


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch):
    """Add products of int8 exactly in a test of a file that imports this."""
    if not multiplies("int8", torch.device("cpu")):
        monkeypatch.setattr(torch, "_int_mm", lambda left, right: (left.double() @ right.double()).int())
