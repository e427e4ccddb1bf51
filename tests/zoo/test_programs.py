"""How many compiled programs the blocks of ComfyUI's models need for texts of any length."""

import pytest
import torch
from torch import nn
from zoo.passes import run_once
from zoo.zoo import build

from lora_atelier.trainer_core.memory import WHOLE, compile_blocks, room_for_programs


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flux_dev", "z_image", "qwen_image"])
def test_a_text_of_any_length_needs_as_many_programs_as_three(name):
    """torch makes a length a variable once it sees another; one that changes in two places takes a third text."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _ = build(name)
    inside = model.diffusion_model.named_modules()
    lists = [m for path, m in inside if isinstance(m, nn.ModuleList) and "." not in path and "embed" not in path]
    blocks, lengths, counts = [block for each in lists for block in each], (12, 20, 33, 64, 100), []
    plain = [run_once(model, name, length) for length in lengths]
    compile_blocks([(block, WHOLE) for block in blocks], pytest.fail, "eager")
    with room_for_programs(True):
        for length, expected in zip(lengths, plain, strict=True):
            assert torch.equal(run_once(model, name, length), expected)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert blocks and counts[2:] == [counts[2]] * 3 and counts[2] < 2.2 * counts[0]
    torch._dynamo.reset()
