"""State of any shape goes to tensors and plain values and back, and a copy of it is gone when it is let go of."""

import gc
import weakref

import pytest
import torch

from lora_atelier.trainer_core.state import pack, unpack


def test_a_state_comes_back_and_shares_no_memory_with_its_copy():
    shared = torch.arange(6.0).view(2, 3)
    state = {"a": (shared, shared.t()), 3: [None, True, 1.5, "text", {"b": torch.zeros((), dtype=torch.bfloat16)}]}
    tensors, tree = pack(state, copy=True)
    shared.add_(1)
    back = unpack(tensors, tree)
    assert back.keys() == state.keys() and back[3][:4] == state[3][:4] and isinstance(back["a"], tuple)
    assert torch.equal(back["a"][0], shared - 1) and torch.equal(back["a"][1], shared.t() - 1)
    assert back[3][4]["b"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"\.x is a set, and a state of tensors"):
        pack({"x": {1}})


def test_a_copy_needs_no_garbage_collection_to_be_gone():
    gc.disable()
    try:
        packed = pack({"weights": [torch.zeros(9)]}, copy=True)
        copy = weakref.ref(next(iter(packed[0].values())))
        del packed
        assert copy() is None
    finally:
        gc.enable()
