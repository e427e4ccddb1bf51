"""State of any shape goes to tensors and plain values and back, and a copy of it is gone when it is let go of."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import save_file

from lora_atelier.trainer_core.common.tensor_tree import load_state, pack, save_state, unpack


def test_a_state_comes_back_and_shares_no_memory_with_its_copy():
    shared = torch.arange(6.0).view(2, 3)
    state = {"a": (shared, shared.t()), 3: [None, True, 1.5, "text", {"b": torch.zeros((), dtype=torch.bfloat16)}]}
    tensors, tree = pack(state, copy=True)
    shared.add_(1)
    back = unpack(tensors, tree)
    assert back.keys() == state.keys() and back[3][:4] == state[3][:4] and isinstance(back["a"], tuple)
    assert torch.equal(back["a"][0], shared - 1) and torch.equal(back["a"][1], shared.t() - 1)
    assert back[3][4]["b"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"\.x is a set; only tensors"):
        pack({"x": {1}})


def test_tensors_keep_their_order_in_memory(tmp_path):
    rows = torch.arange(24.0).view(2, 3, 4)
    state = {"rows": rows, "permuted": rows.permute(2, 0, 1), "turned": [rows[0].t()], "gaps": rows[:, :, ::2]}
    state["row"] = rows[0, :, :1].clone().t()
    save_state(tmp_path / "state.safetensors", state)
    for back in (load_state(tmp_path / "state.safetensors"), unpack(*pack(state, copy=True))):
        assert all(torch.equal(back[name], state[name]) for name in ("rows", "permuted", "gaps"))
        assert torch.equal(back["turned"][0], rows[0].t()) and back["turned"][0].stride() == (1, 4)
        assert back["rows"].is_contiguous() and back["permuted"].stride() == (1, 12, 4)
        assert back["row"].stride() == state["row"].stride() == (1, 1)
        assert back["gaps"].is_contiguous()  # a file holds no gaps


def test_a_copy_needs_no_garbage_collection_to_be_gone():
    gc.disable()
    try:
        packed = pack({"weights": [torch.zeros(9)]}, copy=True)
        copy = weakref.ref(next(iter(packed[0].values())))
        del packed
        assert copy() is None
    finally:
        gc.enable()


WRONG_TREES = (
    *("[" * 100_000, "{", '{"a": 1, "b": 2}', '{"dict": 3}', '{"dict": [[1]]}', '{"tensor": "b"}', '{"tensor": []}'),
    *('{"tensor": "a", "strides": [1000000000000, 1]}', '{"tensor": "a", "strides": [-2, 1]}'),
    *('{"tensor": "a", "strides": ["1", 2]}', '{"tensor": "a", "strides": [1]}'),
)


@pytest.mark.parametrize("tree", WRONG_TREES, ids=list(range(len(WRONG_TREES))))
def test_a_tree_that_was_never_packed_is_no_state(tree, tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "state.safetensors", {"tree": tree})
    with pytest.raises(ValueError, match=r"state.safetensors holds no state"):
        load_state(tmp_path / "state.safetensors")
