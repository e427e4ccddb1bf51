"""Compiled blocks: what the compiler's budget keeps, and when kernels are recorded."""

import pytest
import torch
import torch._functorch.config as functorch_config
from second_device import card, device_is  # noqa: F401 (fixtures)
from tiny_models import network_on, tiny_unet
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConnectedConfig,
    DatasetConfig,
    LoraConfig,
    MemoryConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.memory import (
    BUDGETS,
    WHOLE,
    Compiling,
    compile_blocks,
    moves_weights,
    room_for_programs,
    why_no_graphs,
)
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.preflight.budget import hold, kept_bytes

# Inductor's choice of what is kept, and its graphs run as they are: it needs no C++ compiler.
CHOOSING = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)


class Block(nn.Module):
    """Layers in a row with a residual, so that a budget has several outputs to choose among."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        wide = self.up(self.norm(x))
        for layer in self.inner:
            wide = layer(torch.tanh(wide))
        return x + self.down(torch.tanh(wide))


def chain():
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(2))


def passed(blocks, x):
    """Return the gradients of a pass, and the bytes that it keeps beside weights and inputs of blocks."""
    known = {t.untyped_storage()._cdata for t in (x, *blocks.parameters())}

    def forward():
        nonlocal out
        out = x
        for block in blocks:
            out = block(out)
            known.add(out.untyped_storage()._cdata)

    out = x
    kept = kept_bytes(forward, known)
    blocks.zero_grad()
    out.square().sum().backward()
    return [p.grad for p in blocks.parameters()], kept


@pytest.mark.parametrize(
    "backend", [pytest.param(CHOOSING, id="as it is"), pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_a_budget_keeps_less_and_gives_the_same_gradients(backend):
    torch._dynamo.reset()
    x, plain = torch.randn(4, 16, 8, requires_grad=True), chain()
    expected, whole = passed(plain, x)
    blocks, notes, sizes = chain(), [], []
    units = [(block, WHOLE) for block in blocks]
    programs = compile_blocks(units, notes.append, backend)
    torch._dynamo.utils.counters.clear()
    for number, budget in enumerate((1.0, BUDGETS["budget 0.75"], BUDGETS["budget 0.25"]), 1):
        programs.kind = Compiling(budget)
        found, kept = passed(blocks, x)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))
        assert kept <= budget * whole
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == number  # both blocks share a program
        sizes.append(kept)
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert functorch_config.activation_memory_budget == 1 and not notes  # of the process
    programs.kind = Compiling()
    assert passed(blocks, x)[1] == sizes[0]
    torch._dynamo.reset()


def test_the_estimate_holds_the_share_that_a_budget_allows():
    x, blocks = torch.randn(4, 16, 8), chain()
    units = [(block, WHOLE) for block in blocks]
    expected, whole = passed(blocks, x)
    for share in (0.75, 0.25):
        hold(units, share)
        found, kept = passed(blocks, x)
        assert all(map(torch.equal, found, expected))
        assert kept == 2 * round(share * whole / 2)
    hold(units, 1)
    assert passed(blocks, x)[1] == whole


@pytest.mark.thorough
def test_the_estimate_holds_what_compiled_blocks_of_a_unet_keep_or_little_more():
    """Counted in what autograd saves of compiled forward passes."""
    torch._dynamo.reset()
    unet = tiny_unet().requires_grad_(False).eval()
    network = network_on(unet, LoraConfig(rank=4, alpha=4, preset="full"))
    weights = {t.untyped_storage()._cdata for t in (*unet.parameters(), *network.parameters())}
    latents, words = torch.randn(1, 4, 16, 16), torch.randn(1, 77, 64)

    def kept():
        return kept_bytes(lambda: unet(latents, torch.tensor([5]), encoder_hidden_states=words), weights)

    with network.attached(), room_for_programs(True):
        for budget in (0.75, 0.1):
            hold(units(unet), budget)
            estimate = kept()
            hold(units(unet), 1)
            compile_blocks(units(unet), pytest.fail, CHOOSING).kind = Compiling(budget)
            assert 0.7 * estimate < kept() <= estimate
            for block in unet.modules():
                block.__dict__.pop("forward", None)
    torch._dynamo.reset()


RUN = RunConfig(base_model=BaseModelConfig(path=""), dataset=DatasetConfig(concepts=()))
ON = MemoryConfig(compile=True, cuda_graphs=True, checkpointing="0", offload_weights="none", offload_activations="off")


@pytest.mark.parametrize(
    ("run", "memory", "why"),
    [
        (RUN, ON, ""),
        (RUN, ON.replace(checkpointing="budget 0.5"), ""),
        (RUN, ON.replace(compile=False), "compile of Memory is off"),
        (RUN, ON.replace(checkpointing="full"), "gradient checkpointing full runs blocks again"),
        (RUN, ON.replace(offload_weights="half"), "weights move to the GPU"),
        (RUN, ON.replace(offload_weights="file"), "weights move to the GPU"),
        (RUN, ON.replace(offload_activations="on"), "activations move"),
        (RUN.replace(train=TrainConfig(batch_size=2)), ON, "more than one picture, by batch_size"),
        (RUN.replace(train=TrainConfig(accumulate=4)), ON, "more than one picture"),
        (RUN.replace(lora=LoraConfig(dropout=0.1)), ON, "dropout is drawn outside"),
        (RUN.replace(lora=LoraConfig(module_dropout=0.1)), ON, "dropout is drawn outside"),
        (RUN.replace(base_model=BaseModelConfig(path="", connected=ConnectedConfig())), ON, "ComfyUI moves"),
    ],
)
def test_kernels_are_recorded_only_where_every_step_finds_all_at_its_place(run, memory, why, card):  # noqa: F811
    found = why_no_graphs(run, memory, card)
    assert (why in found and bool(found)) if why else not found
    assert moves_weights(memory) == ("weights move" in why)


def test_only_a_card_records_kernels(device_is):  # noqa: F811
    for device in (torch.device("cpu"), device_is("mac")):
        assert "this run is on" in why_no_graphs(RUN, ON, device)


def test_kernels_are_recorded_of_passes_with_gradients_and_freed_with_the_run(monkeypatch):
    import torch._inductor.cudagraph_trees as trees

    torch._dynamo.reset()
    x, blocks, asked, calls = torch.randn(1, 4, 8), chain(), [], []

    def backend(graph, inputs, config_patches=None):
        asked.append((config_patches, functorch_config.activation_memory_budget))
        return graph.forward

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("step"))
    monkeypatch.setattr(trees, "reset_cudagraph_trees", lambda: calls.append("reset"))
    programs = compile_blocks([(blocks[0], WHOLE)], calls.append, backend)
    programs.begin_step()
    programs.free()
    assert not calls  # other programs' graphs stay
    programs.kind = Compiling(0.5, graphs=True)
    programs.begin_step()
    blocks[0](x)
    with torch.no_grad():
        blocks[0](x)
    assert asked == [({"triton.cudagraphs": True}, 0.5), (None, 1.0)]
    programs.in_use = False
    programs.begin_step()
    programs.free()
    programs.free()
    assert calls == ["step", "reset"]
    torch._dynamo.reset()
