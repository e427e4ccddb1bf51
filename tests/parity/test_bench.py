"""The benchmark itself, at toy size: it runs, its contenders compute the same, and it reports what it measured."""

import copy

import pytest
import torch
from tiny_models import tiny_unet

from lora_atelier.bench import bases, contenders, layers, loop, report, worker
from lora_atelier.trainer_core.models.family import FAMILIES, UNET, detect_family
from lora_atelier.trainer_core.models.header import FileHeader
from lora_atelier.trainer_core.models.unet import unet_shape
from lora_atelier.trainer_core.networks.lora import LoraLayer

CPU = torch.device("cpu")
PARTS = {"seconds", "forward", "backward", "update", "loss"}


@pytest.fixture
def unet():
    return tiny_unet().requires_grad_(False).eval()


def test_contenders_take_turns_on_one_set_of_weights(unet):
    before = copy.deepcopy(unet.state_dict())
    steps = contenders.race(unet, contenders.build_batch(unet, 64), 2)
    assert len(steps) == 2
    for step in steps:
        assert set(step) == {"frozen", "ours", "peft"}
        assert all(set(taken) == PARTS and taken["seconds"] > 0 for taken in step.values())
    assert steps[0]["frozen"]["loss"] == steps[1]["frozen"]["loss"]  # frozen, and ours is detached again
    assert steps[0]["ours"]["loss"] != steps[1]["ours"]["loss"]
    assert steps[1]["ours"]["loss"] < steps[1]["frozen"]["loss"]
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())


def test_the_second_unet_holds_the_very_same_tensors(unet):
    mine, twin = unet.state_dict(), contenders.share_weights(unet).state_dict()
    assert set(mine) == set(twin)
    assert all(mine[name].data_ptr() == twin[name].data_ptr() for name in mine)


def test_memory_of_one_contender_alone(unet):
    measured = worker.measure_memory(unet, 64, "ours", CPU)
    assert 0 < measured["loaded"] <= measured["peak"]


def test_the_training_loop_is_timed_in_parts(checkpoint):
    rows = loop.time_loop(checkpoint, 64, 2, CPU)
    assert len(rows) == 2
    assert all(0 < share < 1 for share in report.bookkeeping(rows))


def test_the_full_size_base_is_a_whole_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(bases, "_random", lambda name, tensor, seeded: tensor)  # shapes only
    shapes = {name: tuple(tensor.shape) for name, tensor in bases.sd15_tensors()}
    assert detect_family(FileHeader(path=tmp_path / "sd15.safetensors", shapes=shapes, metadata={})) is FAMILIES["sd1"]
    shape = unet_shape({k.removeprefix(UNET): s for k, s in shapes.items() if k.startswith(UNET)}, FAMILIES["sd1"])
    assert shape["block_out_channels"] == (320, 640, 1280, 1280) and shape["cross_attention_dim"] == 768
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 1_066_235_307  # Stable Diffusion 1.5 itself


@pytest.mark.parametrize("name", [name for name in layers.FORMS if not name.startswith("kept")])
@pytest.mark.parametrize(
    ("base", "shape"),
    [
        (torch.nn.Linear(6, 10), (2, 5, 6)),
        (torch.nn.Conv2d(6, 10, 1), (2, 6, 4, 5)),
        (torch.nn.Conv2d(6, 10, 3, padding=1), (2, 6, 4, 5)),
        (torch.nn.Conv2d(6, 10, 3, 2, padding=1), (2, 6, 4, 6)),
    ],
)
def test_every_form_of_a_layer_computes_the_same(name, base, shape):
    base.requires_grad_(False)
    layer = LoraLayer(base, 4, 2.0, name="x", seed=0)
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.up)
    x = torch.randn(shape, requires_grad=True)
    results = []
    for form in (layers.kept, layers.FORMS[name]):
        output = form(layer, x, base(x))
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, layer.down, layer.up])])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_forms_are_timed():
    assert set(layers.time_shape(True, (1, 4, 6), (1, 4, 10), 1, 1, rounds=1)) == set(layers.FORMS)
    assert sum(layers.layer_shapes().values()) == 282


def measured(ours=2.2):
    parts = {"forward": 1.0, "backward": 1.0, "update": 0.1}
    race = [{name: {"seconds": s, **parts} for name, s in (("frozen", 2.0), ("ours", ours), ("peft", 2.5))}] * 5
    machine = {"device": "CPU", "cpu": "a CPU", "cores": 2, "threads": 2, "simd": "AVX2", "load": 0}
    stock = {"seconds": [11.0, 11.0], "loaded": 4000, "peak": 16000, "compute_dtype": ["float32"]}
    return {
        "title": "a base",
        "resolution": 256,
        "precision": "float32",
        "layers": 282,
        "targets": True,
        "machine": machine | {"torch": "2", "python": "3"},
        "rounds": [{"race": race, "stock": stock | {"tensors": 9, "adapters": 3}}],
        "memory": {name: {"loaded": 4000, "peak": 4800} for name in ("frozen", "ours", "peft")},
        "loop": [{"seconds": 2.0, "forward": 1.0, "backward": 0.9, "optimizer": 0.08}],
        "skipped": "",
        "date": "2026-01-01",
        "commit": "abc",
        "command": "python3 dev.py bench",
    }


def test_ratios_are_those_of_pairs():
    ratios = report.build_ratios(measured())
    assert [r.middle for r in ratios] == pytest.approx([1.1, 0.88, 5.0, 0.3, 0.01])
    assert all(ratio.met for ratio in ratios)


def test_a_missed_target_is_printed_as_missed():
    assert "**missed**" not in report.render(measured())
    text = report.render(measured(ours=2.6))
    assert text.count("**missed**") == 2
    assert "| seconds per step, ours / frozen pass | 1.300 | 1.300 – 1.300, n = 5 | ≤ 1.15 | **missed** |" in text


def test_without_memory_for_the_stock_node_the_rest_is_reported():
    result = measured() | {"skipped": "TrainLoraNode was left out."}
    del result["rounds"][0]["stock"]
    text = report.render(result)
    assert "TrainLoraNode was left out." in text and "TrainLoraNode / ours" not in text


def test_a_block_of_the_page_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- bench:a -->\nold\n<!-- /bench:a -->\n\nprose\n", encoding="utf-8")
    report.write_block(page, "a", "new \\1\n")
    report.write_block(page, "b", "more")
    assert page.read_text(encoding="utf-8") == (
        "# Title\n\n<!-- bench:a -->\nnew \\1\n<!-- /bench:a -->\n\nprose\n"
        "\n<!-- bench:b -->\nmore\n<!-- /bench:b -->\n"
    )


def test_a_base_is_described_from_its_header():
    told = worker.describe_base(bases.BASES["tiny"], 128)
    assert told["layers"] == 119 and told["path"].endswith("atelier-tiny.safetensors")
