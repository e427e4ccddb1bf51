"""The order of what is recomputed, by counted operations and bytes of Stable Diffusion at full size, without data."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lora_atelier.bench.bases import empty_unet, network_on
from lora_atelier.bench.contenders import build_batch
from lora_atelier.trainer_core.config import LoraConfig, MemoryConfig
from lora_atelier.trainer_core.memory import LEVELS, SEGMENTS, WHOLE, rungs
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.preflight.estimate import fused_attention

META = torch.device("meta")
BALANCE = 200  # operations in bfloat16 that a card computes while it moves a byte: RTX 4090 165, H100 295, A100 153
LINK = 6600  # the same for a byte between RAM and card: 165 TFLOP/s, 25 GB/s
ROUNDING = 1.1  # rungs that cost the same within a tenth may stand in any order


class Costs(TorchDispatchMode):
    """Count the operations of each unit that runs, and the bytes that its operators read and write."""

    def __init__(self, inside, operations, moved):
        super().__init__()
        self.inside, self.operations, self.moved = inside, operations, moved

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        operations = count(*args, **(kwargs or {}), out_val=out) if count else 0
        seen = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        touched = 0 if func.is_view or "empty" in str(func) else sum(t.numel() * t.itemsize for t in seen)
        for unit in self.inside:
            self.operations[unit] += operations
            self.moved[unit] += touched
        return out


def counted(name, resolution):
    """Map each unit to its least level, the bytes that it keeps beside its input, the operations of a pass, and those
    for each byte of its input.
    """
    unet = empty_unet(name).to(torch.bfloat16)
    with META:
        network = network_on(unet, LoraConfig(rank=16, preset="full"))
    batch, levels = build_batch(unet, resolution, 1, META, torch.bfloat16), dict(units(unet))
    weights = {t.untyped_storage()._cdata for t in (*unet.parameters(), *network.parameters())}
    inside, inputs, kept, operations, moved = [], Counter(), defaultdict(dict), Counter(), Counter()

    def enter(unit, args):
        inside.append(unit)
        inputs[unit] += args[0].nbytes

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            for unit in inside:
                kept[unit][storage._cdata] = (storage.nbytes(), storage)  # held, or its address would come again
        return tensor

    for unit in levels:
        unit.register_forward_pre_hook(enter)
        unit.register_forward_hook(lambda *_: inside.pop() and None)
    more = {"added_cond_kwargs": batch.added} if batch.added else {}
    with network.attached():
        network.set_micro_batch(0)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, fused_attention(), Costs(inside, Counter(), moved):
            unet(batch.noised.requires_grad_(), batch.timesteps, encoder_hidden_states=batch.context, **more)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Costs(inside, operations, Counter()):
            unet(batch.noised, batch.timesteps, encoder_hidden_states=batch.context, **more)
    saved = {unit: sum(size for size, _ in kept[unit].values()) - inputs[unit] for unit in levels}
    work = {unit: operations[unit] + BALANCE * moved[unit] for unit in levels}
    return {unit: (least, saved[unit], work[unit], work[unit] / inputs[unit]) for unit, least in levels.items()}


@pytest.mark.parametrize(
    ("name", "resolution"), [("sd15", 512), pytest.param("sdxl", 1024, marks=pytest.mark.thorough)]
)
def test_a_saved_byte_costs_more_from_rung_to_rung(name, resolution):
    found = counted(name, resolution)
    rows = [(0.0, 0.0)]  # bytes saved and operations at each level
    for level in range(1, len(LEVELS)):
        chosen = {unit for unit, (least, *_) in found.items() if least <= level}
        blocks = {unit for unit in chosen if found[unit][0] >= WHOLE}
        alone = chosen - {part for block in blocks for part in block.modules() if part is not block}
        rows.append((sum(found[unit][1] for unit in alone), sum(found[unit][2] for unit in alone)))
    costs = [(more - work) / (larger - saved) for (saved, work), (larger, more) in pairwise(rows)]
    assert all(before < ROUNDING * after for before, after in pairwise(costs)), costs
    assert costs[0] < 0.8 * costs[1]  # the feed-forward parts pay
    assert costs[-1] < 2 * LINK  # what is recomputed last costs less than to send what is left to RAM and back
    moved = [rung for rung in rungs(MemoryConfig(), torch.device("cuda")) if rung.checkpointing == "full"][1:]
    # An input of a block goes and comes once, a weight comes three times.
    assert [(each.offload_activations, each.offload_weights) for each in moved] == [
        ("on", "none"),
        ("on", "half"),
        ("on", "all"),
    ]
    # Where no input can go to RAM, a weight goes first, and then the block before computes an input again.
    again = [cost for unit, (*_, cost) in found.items() if type(unit).__name__ == "BasicTransformerBlock"]
    assert ROUNDING * min(again) > 3 * LINK
    stay = rungs(MemoryConfig(offload_activations="off"), torch.device("cuda"))[-4:]
    assert [(each.checkpointing, each.offload_weights) for each in stay] == [
        ("full", "half"),
        ("full", "all"),
        *((segments, "all") for segments in SEGMENTS),
    ]
