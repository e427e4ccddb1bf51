"""Runs whose frozen layers multiply in 8 bits: near to the exact one, measured on the first batch, decided once."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from old_processor import exact_sums  # noqa: F401 (a fixture)
from prepared import prepared
from tiny_runs import change, run_with_notes, tiny_config

from lora_atelier.trainer_core.memory import weights
from lora_atelier.trainer_core.memory.weights import KeptLinear, kept_layers
from lora_atelier.trainer_core.training import compute
from lora_atelier.trainer_core.training.compute import nearness, settle_compute
from lora_atelier.trainer_core.training.prepare import apply_memory

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")
KINDS = ("int8", pytest.param("float8", marks=pytest.mark.thorough))


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(checkpoint, pictures, train={"steps": 4, "seed": 5}, lora={"preset": "attn-mlp"})


def settled(config, folder, kind="int8"):
    """Prepare a run, and let it decide how it multiplies; return it and its notes."""
    notes: list[str] = []
    made = prepared(change(config, memory={"compute": kind}), folder, note=notes.append)
    with made.network.attached():
        apply_memory(made, made.config.memory)
        settle_compute(made)
    return made, notes


def in_eight(made):
    """List the layers that multiply in 8 bits."""
    return [m for m in made.base.denoiser.module.modules() if isinstance(m, KeptLinear) and m.kept.compute]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_8_bits_is_near_and_told_and_goes_on_as_it_began(config, tmp_path, kind):
    exact, _ = run_with_notes(config, tmp_path / "exact")
    config = change(config, memory={"compute": kind}, saves={"save_every": 2})
    whole, notes = run_with_notes(config, tmp_path / "whole")
    assert whole.losses != exact.losses
    assert whole.losses == pytest.approx(exact.losses, rel=0.01)
    told = [note for note in notes if f"In {kind}, the first batch's prediction has a cosine of 0.99" in note]
    assert len(told) == 1 and "in block" in told[0], notes
    assert any(f"multiply in {kind}, all others exactly" in note for note in notes)
    # A run that is cut at its half and resumed has the same bits, and does not look again.
    first = change(config, train={"steps": 2}, existing={"on_existing": "resume"})
    run_with_notes(first, tmp_path / "cut")
    rest, later = run_with_notes(change(config, existing={"on_existing": "resume"}), tmp_path / "cut")
    assert rest.losses[-2:] == whole.losses[-2:]
    assert not any("cosine of" in note for note in later)
    assert whole.path.read_bytes()[8:] != exact.path.read_bytes()[8:]


def test_what_stays_exact(config, tmp_path):
    made, _ = settled(config, tmp_path)
    unet = made.base.denoiser.module
    eight = {name for name, m in unet.named_modules() if isinstance(m, KeptLinear) and m.kept.compute}
    linear = {name for name, m in unet.named_modules() if isinstance(m, torch.nn.Linear)}
    assert eight and all("transformer_blocks" in name for name in eight)
    assert {name for name in linear - eight if "transformer_blocks" in name} == set()
    assert any(name.startswith("time_embedding") for name in linear - eight)
    assert not any(m.kept.compute for m in unet.modules() if hasattr(m, "kept") and not isinstance(m, KeptLinear))
    assert {kept.kind for kept in kept_layers(unet) if kept.compute} == {"int8"}  # packed, for good


def test_blocks_below_the_bound_stay_exact_and_are_named(config, tmp_path, monkeypatch):
    multiply, forward, spoiled = compute._multiply, weights._Rounded.forward, []

    def spoil(kind, blocks, chosen):
        """Let one block lose its way where it multiplies in 8 bits."""
        multiply(kind, blocks, chosen)
        spoiled[:] = list(blocks)[:1]
        for layer in blocks[spoiled[0]]:
            layer.kept.lost = True

    def passed(ctx, x, kept, bias):
        output = forward(ctx, x, kept, bias)
        return output.flip(0).neg() if hasattr(kept, "lost") else output

    monkeypatch.setattr(compute, "_multiply", spoil)
    monkeypatch.setattr(weights._Rounded, "forward", staticmethod(passed))
    made, notes = settled(config, tmp_path)
    assert made.exact_blocks == spoiled and made.multiplies_in == "int8"
    assert any(note.startswith(f"{spoiled[0]} stays exact: in int8") for note in notes), notes
    assert in_eight(made)


def test_where_no_block_is_near_the_run_is_exact_and_says_so(config, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "BOUND", 1.1)
    made, notes = settled(config, tmp_path)
    assert not in_eight(made)
    assert any(note.startswith("All blocks stay exact: in int8") for note in notes), notes


@pytest.mark.parametrize(("times", "expected"), [((2.0, 1.0), "int8"), ((1.0, 0.95), "exact"), ((1.0, 3.0), "exact")])
def test_auto_takes_what_takes_less_time_here(config, tmp_path, monkeypatch, times, expected):
    seconds = itertools.cycle((*times, *times[::-1]))  # exact, in int8, in int8, exact
    looks = compute.first_pass
    monkeypatch.setattr(compute, "first_pass", lambda *of: replace(looks(*of), seconds=next(seconds)))
    made, notes = settled(config, tmp_path, "auto")
    assert made.multiplies_in == expected and bool(in_eight(made)) == (expected == "int8")
    word = "exactly" if expected == "exact" else "in int8"
    assert any(note.startswith(f"Frozen layers multiply {word}: a pass of the first batch") for note in notes), notes


def test_auto_times_no_rounding_that_is_done_once(config, tmp_path, monkeypatch):
    """The steps find weights that are stored rounded; a look still rounds them at each use."""
    clock, seen = SimpleNamespace(at=0.0), []
    for module in (compute, weights):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.at))
    round_rows, looks = weights.rounded, compute.first_pass

    def slowly(*given):
        clock.at += 1
        return round_rows(*given)

    def look(*given):
        began = clock.at
        found = looks(*given)
        seen.append((clock.at - began, found.seconds))
        return found

    monkeypatch.setattr(weights, "rounded", slowly)
    monkeypatch.setattr(compute, "first_pass", look)
    made, _ = settled(config, tmp_path, "auto")
    assert made.multiplies_in == "int8" and {took for took, _ in seen} > {0.0}
    assert {seconds for _, seconds in seen} == {0.0}
    assert all(kept.rounding is None for kept in kept_layers(made.base.denoiser.module))


def test_auto_is_exact_where_the_blocks_that_are_near_spare_too_little(config, tmp_path, monkeypatch):
    seconds = {0: 2.0, 1: 1.9}  # by the blocks that are in 8 bits; of more 1
    chosen, multiply, looks, near = [], compute._multiply, compute.first_pass, compute.nearness
    monkeypatch.setattr(compute, "_multiply", lambda k, b, c: multiply(k, b, chosen.append(list(c)) or chosen[-1]))
    monkeypatch.setattr(
        compute, "first_pass", lambda *of: replace(looks(*of), seconds=seconds.get(len(chosen[-1]), 1.0))
    )

    def of_the_first_alone(*passes):
        first = next(names for names in chosen if names)[:1]
        return near(*passes) if chosen[-1] == first else replace(near(*passes), prediction=0.0)

    monkeypatch.setattr(compute, "nearness", of_the_first_alone)
    made, notes = settled(config, tmp_path, "auto")
    assert made.multiplies_in == "exact" and not in_eight(made)
    assert [note.split(":")[0] for note in notes if note.startswith("Frozen layers multiply")] == [
        "Frozen layers multiply in int8",
        "Frozen layers multiply exactly",
    ]


def test_looking_leaves_no_gradient_and_the_numbers_of_the_network(config, tmp_path):
    made, _ = settled(config, tmp_path)
    other = prepared(config, tmp_path / "other")
    for name, layer in made.network.layers.items():
        for part, tensor in layer.state_dict().items():
            assert torch.equal(tensor, other.network.layers[name].state_dict()[part])
        assert all(parameter.grad is None for parameter in layer.parameters())


def test_numbers_that_are_not_finite_are_not_near():
    seen = compute.FirstPass(torch.ones(4), {"a": torch.ones(3)}, 1.0)
    broken = compute.FirstPass(torch.ones(4), {"a": torch.tensor([1.0, float("nan"), 1.0])}, 1.0)
    assert nearness(seen, seen).least == pytest.approx(1)
    assert not nearness(seen, broken).least >= compute.BOUND
