"""Runs on linked models whose blocks are compiled: the gradients of eager ones, and nothing left on the MODEL."""

import pytest
import torch
from durable import equal
from safetensors.torch import load_file
from tiny_runs import change
from train_graph import draw_pictures
from zoo.linked import linked, live_of
from zoo.passes import run_once
from zoo.test_train import configure, run, state_of, unchanged
from zoo.zoo import build

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.compiling import as_they_lie
from lora_atelier.nodes.comfyui.connected.layers import units
from lora_atelier.trainer_core.memory import compile_blocks
from lora_atelier.trainer_core.training import compiling

COUNTERS = torch._dynamo.utils.counters


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("concept") / "pictures")


def compiled_and_eager(name, pictures, folder, monkeypatch, backend):
    """Train a model eagerly, then compiled; return both files' tensors and what the second run said of compiling."""
    monkeypatch.setattr(compiling, "compile_blocks", lambda units, note: compile_blocks(units, note, backend))
    torch._dynamo.reset()
    COUNTERS.clear()
    base, files = linked(name), []
    patcher = live_of(base).model
    for compiled in (False, True):
        (folder / str(compiled)).mkdir()
        result, notes = run(change(configure(base, pictures), memory={"compile": compiled}), folder / str(compiled))
        files.append(load_file(result.path))
        if not compiled:
            before, drawn = state_of(patcher), run_once(patcher.model, name)
    unchanged(before, state_of(patcher))
    assert torch.equal(run_once(patcher.model, name), drawn)
    return *files, [note for note in notes if "ompile" in note]


def apart(one, other):
    return max(float((one[name] - each).norm() / each.norm().clamp(min=1e-9)) for name, each in other.items())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "blocks"), [("wan21_t2v", 2), ("z_image", 6), ("sd15", 18), ("flux_dev", 4)])
def test_compiled_blocks_train_what_eager_ones_do(name, blocks, pictures, tmp_path, monkeypatch):
    eager, compiled, said = compiled_and_eager(name, pictures, tmp_path, monkeypatch, "eager")
    assert said == [f"{blocks} of {blocks} blocks are compiled."]
    assert COUNTERS["stats"]["unique_graphs"] and not COUNTERS["graph_break"]
    assert apart(eager, compiled) < 1e-3


@pytest.mark.thorough
def test_blocks_that_write_into_what_gradients_need_are_compiled_too(pictures, tmp_path, monkeypatch):
    eager, compiled, said = compiled_and_eager("flux_dev", pictures, tmp_path, monkeypatch, "aot_eager")
    assert said == ["4 of 4 blocks are compiled."] and not COUNTERS["graph_break"]
    assert apart(eager, compiled) < 1e-3


@pytest.mark.thorough
def test_blocks_that_hand_on_what_they_write_alone_stay_eager(pictures, tmp_path, monkeypatch):
    """Compiled they write into nothing, so that no gradient comes to them."""
    eager, compiled, said = compiled_and_eager("odd_weights", pictures, tmp_path, monkeypatch, "eager")
    assert said == ["The blocks stay uncompiled: compiled a gradient of the first batch differs by 1 of its length."]
    assert equal(eager, compiled)


@pytest.mark.thorough
def test_where_the_compiler_fails_the_run_stays_eager(pictures, tmp_path, monkeypatch):
    def failing(graph, _):
        raise NotImplementedError("no such operator")

    eager, compiled, said = compiled_and_eager("wan21_t2v", pictures, tmp_path, monkeypatch, failing)
    assert len(said) == 1
    assert said[0].startswith("The blocks stay uncompiled: torch.compile failed: ")
    assert "no such operator" in said[0]
    assert equal(eager, compiled)


@pytest.mark.thorough
def test_inductor_trains_what_eager_blocks_do(pictures, tmp_path, monkeypatch):
    eager, compiled, said = compiled_and_eager("wan21_t2v", pictures, tmp_path, monkeypatch, "inductor")
    assert said == ["2 of 2 blocks are compiled."] and not COUNTERS["graph_break"]
    assert apart(eager, compiled) < 1e-3


@pytest.mark.thorough
def test_where_compiled_gradients_differ_the_run_stays_eager(pictures, tmp_path, monkeypatch):
    def wrong(graph, _):
        return lambda *inputs: tuple(
            each * 1.1 if each.is_floating_point() else each for each in graph.forward(*inputs)
        )

    eager, compiled, said = compiled_and_eager("wan21_t2v", pictures, tmp_path, monkeypatch, wrong)
    assert "The blocks stay uncompiled: compiled a gradient of the first batch differs" in said[-1]
    assert equal(eager, compiled)


def test_blocks_whose_weights_are_patched_or_cast_are_left_out():
    _, patcher = build("wan21_t2v")
    blocks = units(patcher.model.diffusion_model)
    cpu = torch.device("cpu")
    with gradients.session(patcher):
        with as_they_lie(blocks, torch.float32, cpu) as chosen:
            assert len(chosen) == 2
        layer = next(m for m in chosen[0][0].modules() if hasattr(m, "in_features"))
        layer.weight_function = [lambda weight: weight]
        with as_they_lie(blocks, torch.float32, cpu) as rest:
            assert [block for block, _ in rest] == [chosen[1][0]]
        layer.weight_function = []
        with as_they_lie(blocks, torch.bfloat16, cpu) as none:
            assert not none
