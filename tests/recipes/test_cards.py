"""Two cards for one model: what is learned is what one card learns, and what cannot be is refused in a sentence."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace

import pytest
import second_device
import sessions
import torch
from durable import Cut, cut_at
from prepared import NeverLoaded
from safetensors.torch import save_file
from second_device import device_is  # noqa: F401 (a fixture)
from tiny_models import family_tensors
from tiny_runs import change, run, run_with_notes

from lora_atelier.trainer_core.common.world import ALONE
from lora_atelier.trainer_core.config import ConnectedConfig, EmbeddingConfig, MemoryConfig, OptimizerConfig
from lora_atelier.trainer_core.memory import WHOLE, place
from lora_atelier.trainer_core.optim import build_optimizer
from lora_atelier.trainer_core.preflight import memory as preflight
from lora_atelier.trainer_core.preflight.estimate import LargestBatch, LiveBytes
from lora_atelier.trainer_core.training import prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = sessions.make_scene(tmp_path_factory.mktemp("scenes") / "scene")
    config = change(config, train={"steps": 3, "batch_size": 2}, optimizer={"ema_decay": 0.0, "learning_rate": 1e-3})
    return config.replace(base_model=config.base_model.replace(precision="float32"))


@pytest.fixture
def places(monkeypatch):
    """Give the kinds of devices on which optimizers find their parameters."""
    built, found = prepare.build_optimizer, set()

    def build(settings, groups, seed):
        found.update(p.device.type for group in groups for p in group["params"])
        return built(settings, groups, seed)

    monkeypatch.setattr(prepare, "build_optimizer", build)
    return found


def job_of(config, **options):
    """Build as much of a request for a run as its check reads."""
    return SimpleNamespace(**{"config": config, "device": CPU, "dtype": torch.float32, "world": ALONE, **options})


WORD = EmbeddingConfig(token="thing", vectors=2, learning_rate=1e-2, stop=1, keep_norm=True)
CASES = {
    "words, text encoder, dropouts, average": {
        "lora": {"dropout": 0.2, "rank_dropout": 0.2, "dora": True, "embeddings": (WORD,), "scale_weight_norms": 0.05},
        "optimizer": {"text_encoder_learning_rate": 1e-3, "text_encoder_stop": 2, "ema_decay": 0.5},
        "memory": {"second_card_share": 0.5},
    },
    "8 bits, recomputed, by timestep": {
        "base_model": {"weights": "float8"},
        "lora": {"dropout": 0.0, "rank": 4, "timestep_rank": 1},
        "memory": {"checkpointing": "full", "second_card_share": 0.3},
    },
    "begun by gradients": {"lora": {"dropout": 0.0, "init": "lora_ga"}},
    "begun by inputs": {"lora": {"dropout": 0.0, "init": "eva", "channel_scaling": True}},
    "rounded at random": {"lora": {"algorithm": "glora", "dtype": "bfloat16", "dropout": 0.0}},
}
BOTH = [(name, "cpu", "card") for name in CASES] + [(name, "card", "cpu") for name in CASES]
OFTEN = BOTH[len(CASES) - 1]  # the quickest


def same(there, here, bound):
    """Check that two runs learned the same, within a share of the norm of all tensors in their files."""
    assert there.losses == pytest.approx(here.losses, rel=bound)
    assert [loss for _, loss in there.validation] == pytest.approx([loss for _, loss in here.validation], rel=bound)
    assert torch.allclose(there.samples, here.samples, atol=10 * bound)
    assert there.tensors.keys() == here.tensors.keys()
    mine, theirs = (torch.cat([t.float().flatten() for _, t in sorted(r.tensors.items())]) for r in (there, here))
    assert (mine - theirs).norm() < bound * theirs.norm()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [pytest.param(*each, marks=() if each == OFTEN else pytest.mark.thorough) for each in BOTH],
)
def test_two_cards_learn_what_one_learns(name, first, second, config, tmp_path, device_is, places):  # noqa: F811
    device_is("card")
    config = change(config, **CASES[name])
    here = run(config, tmp_path / "here", tmp_path / "cache")
    two = change(config, memory={"second_card": second})
    there = run(two, tmp_path / "there", tmp_path / "cache", device=torch.device(first))
    assert places == {"cpu", "card"}
    same(there, here, 1e-4)


@pytest.mark.thorough
def test_two_cards_learn_what_one_learns_of_xl(config, tmp_path, device_is, places):  # noqa: F811
    device_is("card")
    save_file(family_tensors("sdxl"), tmp_path / "toy-sdxl.safetensors")
    config = change(config, base_model={"path": str(tmp_path / "toy-sdxl.safetensors")}, train={"steps": 2})
    here = run(config, tmp_path / "here", tmp_path / "cache")
    two = change(config, memory={"second_card": "card", "second_card_share": 0.6})
    there = run(two, tmp_path / "there", tmp_path / "cache")
    assert places == {"cpu", "card"} and there.effect == here.effect != ""
    same(there, here, 1e-4)


def test_one_card_goes_on_with_what_two_began(config, tmp_path, device_is, places):  # noqa: F811
    device_is("card")
    two = change(config, memory={"second_card": "card"}, optimizer={"ema_decay": 0.5})
    plain = change(two, memory={"second_card": ""})
    here = run(plain, tmp_path / "here", tmp_path / "cache")
    for name, (before, after) in {"more": (plain, two), "fewer": (two, plain)}.items():
        with pytest.raises(Cut):
            run(before, tmp_path / name, tmp_path / "cache", step=cut_at(2))
        there = run(after, tmp_path / name, tmp_path / "cache")
        assert "Resumed after step 2" in there.origin
        same(there, here, 1e-4)
    assert places == {"cpu", "card"}


def test_scaled_gradients_of_two_cards_of_one_kind(config, tmp_path, device_is, monkeypatch):  # noqa: F811
    device_is("card")
    config = change(
        config, base_model={"precision": "float16"}, lora={"dropout": 0.0}, train={"keep_best": False, "steps": 2}
    )
    two = change(config, memory={"second_card": "card"})
    with pytest.raises(
        ValueError, match=r"^float16 needs two cards of one kind, and card is none of cpu; set precision"
    ):
        run(two, tmp_path / "there", tmp_path / "cache")
    # As between two GPUs: a copy from one to the other is there before it is read.
    copy = second_device.copy
    monkeypatch.setattr(second_device, "copy", lambda a, b, _, *, to_ram: copy(a, b, False, to_ram=to_ram))
    monkeypatch.setattr(prepare, "check_cards", lambda job: None)
    here = run(config, tmp_path / "here", tmp_path / "cache")
    same(run(two, tmp_path / "there", tmp_path / "cache"), here, 1e-2)


def test_a_library_updates_the_weights_of_both_cards(device_is):  # noqa: F811
    """Schedule-free AdamW has operators over lists of tensors, which take those of one device."""
    device_is("card")

    def updated(*devices):
        weights = [torch.nn.Parameter(torch.ones(3, 2).to(device)) for device in devices]
        optimizer = build_optimizer(OptimizerConfig(name="schedulefree_adamw"), [{"params": weights, "lr": 1e-2}])
        for weight in weights:
            weight.grad = torch.arange(6.0).view(3, 2).to(weight.device)
        optimizer.step()
        return [weight.detach().cpu() for weight in weights]

    for mine, plain in zip(updated("cpu", "card"), updated("cpu", "cpu"), strict=True):
        assert torch.allclose(mine, plain) and not torch.allclose(mine, torch.ones(3, 2))


# --- before the run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"memory": {"second_card": "cpu"}},
            r"cpu is the card that the run is on; clear second_card of Memory or name",
        ),
        (
            {"memory": {"second_card": "1"}},
            r"no second card 1, as this machine has 1 cpu device; clear second_card of M",
        ),
        (
            {"memory": {"second_card": "card:1"}},
            r"There is no second card card:1, .* 1 card device; clear second_card of",
        ),
        (
            {"memory": {"second_card": "mine"}},
            r"No device is called mine; clear second_card of Memory or write a number",
        ),
        (
            {"memory": {"offload_weights": "half"}},
            r"offload_weights .* two cards .*; set offload_weights of Memory to no",
        ),
        ({"memory": {"offload_weights": "file"}}, r"offload_weights does not work with two cards .* to none, or clear"),
        (
            {"memory": {"offload_activations": "on"}},
            r"set offload_activations of Memory to off, or clear second_card of",
        ),
        (
            {"memory": {"compile": True}},
            r"compile does not work with two cards for one model; set compile of Memory to o",
        ),
        (
            {"memory": {"compute": "int8"}},
            r"compute does not work .*; set compute of Memory to exact, or clear second_ca",
        ),
        (
            {"base_model": {"connected": ConnectedConfig()}},
            r"ComfyUI holds the weights of a linked model on one card; c",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(parts, words, config, device_is):  # noqa: F811
    device_is("card")
    config = change(change(config, memory={"second_card": "card"}), **parts)
    with pytest.raises(ValueError, match=words):
        prepare.check_cards(job_of(config))


def test_several_processes_have_a_card_each(config, device_is):  # noqa: F811
    device_is("card")

    with pytest.raises(ValueError, match=r"^Each process of a run has a card of its own, .*; clear second_card of Mem"):
        prepare.check_cards(job_of(change(config, memory={"second_card": "card"}), world=SimpleNamespace(size=2)))


def test_a_card_that_is_not_there_ends_the_run_before_it_begins(config, tmp_path):
    with pytest.raises(
        ValueError, match=r"^There is no second card cuda:7, as this machine has \w+ cuda devices?; clear"
    ):
        run(change(config, memory={"second_card": "cuda:7"}), tmp_path, source=NeverLoaded(config.base_model))
    assert not (tmp_path / "runs").exists()


def test_bytes_are_counted_card_by_card(config, device_is):  # noqa: F811
    device_is("card")
    shape = LargestBatch(samples=4, latents=(32, 32), tokens=77, accumulates=True)

    def estimate(**memory):
        settings = MemoryConfig(checkpointing="0", **memory)
        return preflight.estimate_run(config, preflight.outline_run(config), settings, shape, CPU)

    one = estimate()
    small, large = (estimate(second_card="card", second_card_share=share) for share in (0.3, 0.9))
    assert one.beside == 0 < small.beside < large.beside
    assert large.weights < 0.3 * one.weights < small.weights < one.weights
    for two in (small, large):  # what goes over is there twice for a moment
        assert one.total < two.total + two.beside < 1.1 * one.total


@pytest.mark.parametrize(("lacking", "room"), [("card", {"cpu": 2**40, "card": 1}), ("cpu", {"cpu": 1, "card": 2**40})])
def test_the_card_that_lacks_room_is_named(lacking, room, config, tmp_path, device_is, monkeypatch):  # noqa: F811
    device_is("card")
    two = change(config, memory={"second_card": "card", "second_card_share": 0.5})
    monkeypatch.setattr(preflight, "free_bytes", lambda device: room[device.type])
    with pytest.raises(ValueError, match=rf"free on cpu and .* GB on card; {lacking} lacks room: set "):
        run(two, tmp_path, source=NeverLoaded(config.base_model))


def test_blocks_are_shared_out_by_the_free_bytes(config, tmp_path, device_is, monkeypatch):  # noqa: F811
    device_is("card")
    room = {"cpu": 10**10, "card": 3 * 10**10 + second_device.devices.RESERVE}
    monkeypatch.setattr(preflight, "free_bytes", lambda device: room[device.type])
    two = change(config, memory={"second_card": "card"}, train={"steps": 1})
    _, notes = run_with_notes(two, tmp_path)
    said = next(note for note in notes if note.startswith("Memory: about"))
    assert "GB on the second card of 10.0 and 30.0 GB that are free" in said
    assert "75% of the blocks on the second card card" in said


def test_a_dry_run_counts_gradients_on_the_card_of_their_block():
    blocks = [torch.nn.Linear(1000, 1000, bias=False, device="meta") for _ in range(2)]
    place(
        [(block, WHOLE) for block in blocks],
        MemoryConfig(second_card="card", second_card_share=0.5),
        torch.device("meta"),
    )
    live = LiveBytes()
    with live:
        loss = blocks[1](blocks[0](torch.empty(1, 1000, device="meta"))).sum()
        before = live.now, live.now_beside
        loss.backward()
    gradient = blocks[0].weight.nbytes
    assert live.now - before[0] == pytest.approx(gradient, rel=0.01)
    assert live.now_beside - before[1] == pytest.approx(gradient, rel=0.01)


@pytest.mark.thorough
def test_a_step_takes_there_what_was_estimated(config, tmp_path, device_is, monkeypatch):  # noqa: F811
    device_is("card")
    live, now, begin = {}, [0, 0], second_device.There.__init__

    def counted(tensor, inner):
        begin(tensor, inner)
        storage = tensor.inner.untyped_storage()
        if (address := storage._cdata) not in live:
            live[address] = weakref.ref(storage, functools.partial(gone, address, storage.nbytes()))
            now[0] += storage.nbytes()
            now[1] = max(now)

    def gone(address, size, _):
        del live[address]
        now[0] -= size

    monkeypatch.setattr(second_device.There, "__init__", counted)
    save_file(family_tensors("sdxl"), tmp_path / "toy-sdxl.safetensors")
    config = change(config, base_model={"path": str(tmp_path / "toy-sdxl.safetensors")}, lora={"dropout": 0.0})
    memory = {"second_card": "card", "second_card_share": 0.5, "checkpointing": "0"}
    two = change(config, memory=memory, train={"steps": 2, "resolution": 128})
    outline = preflight.outline_run(two)
    shape = preflight.largest_micro_batch(two, run(two, tmp_path / "there").plan, outline.base)
    plain = two.memory.replace(attention="math")  # as the pretended card computes it
    assert preflight.estimate_run(two, outline, plain, shape, CPU).beside == pytest.approx(now[1], rel=0.1)
