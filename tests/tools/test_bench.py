"""The benchmark itself, at toy size: it runs, its contenders compute the same, and it reports what it measured."""

import copy
import itertools
import json
import logging
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import concept
import pytest
import torch
import warm
from clip_tokenizer import TOKENIZER
from durable import apart
from PIL import Image
from safetensors.torch import save_file
from tiny_models import family_tensors, tiny_unet
from torchvision.transforms.functional import pil_to_tensor

from lora_atelier.bench import (
    cases,
    checkpoints,
    clips,
    connected,
    contenders,
    estimates,
    full_size,
    gpu_report,
    large,
    layers,
    learning,
    loop,
    networks,
    parts,
    report,
    results,
    run,
    saves,
    share,
    slider,
    stock,
    tools,
    worker,
)
from lora_atelier.dev import script
from lora_atelier.trainer_core import runs, train
from lora_atelier.trainer_core.config import BaseModelConfig, LoraConfig, MemoryConfig
from lora_atelier.trainer_core.lora_files import merge
from lora_atelier.trainer_core.models import sd
from lora_atelier.trainer_core.models.files.safetensors_file import FileHeader
from lora_atelier.trainer_core.models.sd import Conditions, load_base_model
from lora_atelier.trainer_core.models.sd.family import FAMILIES, UNET, declared_prediction, detect_family
from lora_atelier.trainer_core.models.sd.unet import fill_unet, outline_unet, unet_shape
from lora_atelier.trainer_core.networks.layers.lora import LoraLayer
from lora_atelier.trainer_core.training import sample, saving

CPU = torch.device("cpu")
PARTS = {"seconds", "forward", "backward", "update", "loss"}
LORA = LoraConfig(rank=8, alpha=8, preset="full")


@pytest.fixture
def unet():
    return tiny_unet().requires_grad_(False).eval()


@pytest.fixture
def warm_children(monkeypatch):
    """Start the processes of the benchmark with libraries imported, where the system can."""
    if warm.POSSIBLE:
        monkeypatch.setattr(results, "subprocess", warm)


def xl_unet():
    tensors = {k.removeprefix(UNET): v for k, v in family_tensors("sdxl").items() if k.startswith(UNET)}
    outline = outline_unet({k: tuple(v.shape) for k, v in tensors.items()}, FAMILIES["sdxl"], "toy")
    return fill_unet(outline, tensors, "toy").requires_grad_(False).eval()


def batch_for(unet, count=1):
    return contenders.build_batch(unet, 64, count, next(unet.parameters()).device, torch.float32)


@pytest.mark.parametrize("build", [tiny_unet, pytest.param(xl_unet, marks=pytest.mark.thorough)])
def test_contenders_take_turns_on_one_set_of_weights(build):
    unet = build().requires_grad_(False).eval()
    before = copy.deepcopy(unet.state_dict())
    steps, without = contenders.race(unet, batch_for(unet, 2), LORA, ["frozen", "ours", "peft"], 2)
    assert len(steps) == 2 and not without
    for step in steps:
        assert set(step) == {"frozen", "ours", "peft"}
        assert all(set(taken) == PARTS and taken["seconds"] > 0 for taken in step.values())
    assert steps[0]["frozen"]["loss"] == steps[1]["frozen"]["loss"]  # frozen: ours is attached to a UNet of its own
    assert steps[1]["ours"]["loss"] < (1 - 1e-5) * steps[1]["frozen"]["loss"]
    assert apart(steps[0]["ours"]["loss"], steps[1]["ours"]["loss"])
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())


def test_a_contender_that_computes_something_else_is_out_of_the_race(unet, monkeypatch):
    others = [tiny_unet().requires_grad_(False), unet]  # ours is built on the first, popped last
    with torch.no_grad():
        next(p for n, p in unet.named_parameters() if n == "conv_out.weight").mul_(3)
    monkeypatch.setattr(contenders, "share_weights", lambda unet: others.pop())
    steps, without = contenders.race(unet, batch_for(unet), LORA, ["frozen", "ours"], 1)
    assert set(steps[0]) == {"frozen"} and "it does not compute the same: a first loss of" in without["ours"]


def cannot_compile(*_, **__):
    raise torch._dynamo.exc.TorchDynamoException("no C compiler\nwas found")


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_failing_contender_costs_itself_alone(unet, monkeypatch):
    import torch._dynamo

    right = contenders.build_frozen(unet, batch_for(unet), LORA)()["loss"]

    def in_the_third_step(unet, batch, lora):
        turns = iter([{"loss": right}, {"loss": right}])
        return lambda: next(turns, None) or out_of_memory()

    monkeypatch.setattr(torch, "compile", lambda forward, backend: cannot_compile)
    for name, failing in (("no memory", out_of_memory), ("later", in_the_third_step)):
        monkeypatch.setitem(contenders.CONTENDERS, name, contenders.Contender(failing))
    monkeypatch.setitem(sys.modules, "peft", None)  # not installed
    names = ["no memory", "compiled", "frozen", "later", "peft", "ours"]
    steps, without = contenders.race(unet, batch_for(unet), LORA, names, 2)
    assert [set(step) for step in steps] == [{"frozen", "later", "ours"}, {"frozen", "ours"}]
    assert without.pop("compiled").endswith("so training continues without it: no C compiler was found")
    assert without.pop("peft").startswith("import of peft halted")
    assert set(without) == {"no memory", "later"}
    assert set(without.values()) == {"it runs out of memory on this device"}
    with pytest.raises(RuntimeError, match="All contenders failed"):
        contenders.race(unet, batch_for(unet), LORA, ["no memory", "compiled"], 1)


def test_a_contender_of_another_process_takes_its_turn_in_each_and_costs_itself_alone(unet):
    told = itertools.count(1)

    def step():
        if (number := next(told)) == 4:
            raise results.PartFailed("it ended with status 1")
        return {"seconds": float(number)}

    steps, without = contenders.race(unet, batch_for(unet), LORA, ["frozen", "ours"], 4, {"stock": step})
    assert [step.get("stock", {}).get("seconds") for step in steps] == [2.0, 3.0, None, None]  # the first was warm-up
    assert all({"frozen", "ours"} <= set(step) for step in steps) and without == {"stock": "it ended with status 1"}


def test_a_race_without_room_for_the_node_is_run_without_it(monkeypatch):
    monkeypatch.setattr(worker, "stock_left_out", lambda case: "it needs more.")
    monkeypatch.setattr(worker, "Node", None)
    (part,) = parts.races_of(cases.CASES["tiny-cpu-dry"], 1)
    assert part["contenders"] == ["frozen", "ours", "peft", "stock"]
    raced = worker.measure(part | {"contenders": ["frozen", "stock"]})
    assert raced["without"] == {"stock": "it needs more."} and set(raced["steps"][0]) == {"frozen"}


def test_preparing_a_twin_leaves_the_shared_weights_alone(unet):
    before = copy.deepcopy(unet.state_dict())
    memory = MemoryConfig(checkpointing="full", channels_last="on", offload_weights="all", offload_activations="off")
    twin = contenders.prepare(contenders.share_weights(unet), memory, "float8", torch.bfloat16, CPU)
    contenders.build_frozen(twin, contenders.build_batch(twin, 64, 1, CPU, torch.bfloat16), LORA)()
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())


def test_the_second_unet_holds_the_very_same_tensors(unet):
    mine, twin = unet.state_dict(), contenders.share_weights(unet).state_dict()
    assert set(mine) == set(twin)
    assert all(mine[name].data_ptr() == twin[name].data_ptr() for name in mine)


def test_work_is_counted_without_weights_and_grows_with_the_batch():
    unet = xl_unet().to("meta")
    one, two = (contenders.count_flops(unet, batch_for(unet, count)) for count in (1, 2))
    assert two == 2 * one
    conv = unet.conv_in  # the last of the backward pass: it is counted there and back
    assert one > 2 * 2 * conv.weight.numel() * 8 * 8


def test_the_training_loop_is_timed_in_parts():
    rows = loop.time_loop(cases.Case(name="x", base="tiny", resolution=64, race_steps=1, loop_steps=2))
    assert len(rows) == 2
    assert all(0 < share < 1 for share in report.bookkeeping(rows))


@pytest.mark.parametrize(
    ("name", "channels", "text_width", "count", "prediction"),
    [
        ("sd15", (320, 640, 1280, 1280), 768, 1_066_235_307, "epsilon"),
        ("sd2", (320, 640, 1280, 1280), 1024, 1_303_597_228, "v_prediction"),
        ("sdxl", (320, 640, 1280), 2048, 3_468_837_868, "epsilon"),
    ],
)
def test_a_full_size_base_is_a_whole_checkpoint(name, channels, text_width, count, prediction, tmp_path):
    architecture = checkpoints.ARCHITECTURES[name]
    shapes = {k: tuple(tensor.shape) for k, tensor in checkpoints.checkpoint_shapes(architecture).items()}
    header = FileHeader(path=tmp_path / "x.safetensors", shapes=shapes, metadata={"modelspec.prediction_type": ""})
    family = FAMILIES[architecture.family]
    assert detect_family(header) is family
    assert (declared_prediction(header, family) or ("epsilon", "silence"))[0] == prediction
    shape = unet_shape({k.removeprefix(UNET): s for k, s in shapes.items() if k.startswith(UNET)}, family)
    assert shape["block_out_channels"] == channels and shape["cross_attention_dim"] == text_width
    assert sum(torch.Size(s).numel() for s in shapes.values()) == count  # that of the published model


def test_a_checkpoint_is_written_tensor_by_tensor_and_gives_finite_values(tmp_path, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    path = tmp_path / "toy.safetensors"
    checkpoints.write_checkpoint(path, checkpoints.ARCHITECTURES["toy-sdxl"])
    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(path)))
    batch = contenders.build_batch(base.unet, 64, 1, CPU, torch.float32)
    conditions = Conditions(context=batch.context, pooled=batch.added["text_embeds"], sizes=batch.added["time_ids"])
    with torch.no_grad():
        prediction = base.denoiser.predict(batch.noised, batch.timesteps, conditions)
        hidden = base.texts[1].model(torch.arange(77)[None], output_hidden_states=True)
    assert prediction.isfinite().all() and prediction.std() > 0.01
    assert hidden.text_embeds.isfinite().all() and hidden.text_embeds.std() > 0.01
    assert not list(tmp_path.glob("*.tmp"))


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


def test_algorithms_are_timed_beside_lycoris():
    found = {case: networks.time_case(case, networks.TINY, rounds=1) for case in ("LoHa", "full difference")}
    assert set(found["LoHa"]["own"]) == {"ours", "rebuild", "bypass"} > set(found["full difference"]["own"])
    found["LoHa"] |= {"rebuild": 3.0}
    table = networks.render(found, 1)
    assert "| 3.00 | rebuild ≥ 2 | met |" in table and table.count("\n| full difference |") == 1


def test_forms_are_timed():
    assert set(layers.time_shape(True, (1, 4, 6), (1, 4, 10), 1, 1, rounds=1)) == set(layers.FORMS)
    assert sum(layers.layer_shapes().values()) == 282


def measured(ours=2.2, case=cases.CASES["sd15-cpu"]):
    parts = {"forward": 1.0, "backward": 1.0, "update": 0.1}
    race = [{name: {"seconds": s, **parts} for name, s in (("frozen", 2.0), ("ours", ours), ("peft", 2.5))}] * 5
    machine = {"device": "CPU", "cpu": "a CPU", "cores": 2, "threads": 2, "simd": "AVX2", "load": 0}
    stock = {"seconds": [11.0, 11.0], "loaded": 4000, "peak": 16000, "compute_dtype": ["float32"]}
    return {
        "case": asdict(case),
        "described": {
            "title": "a base",
            "machine": machine | {"torch": "2", "python": "3"},
            "layers": 282,
            "flops": 8e12,
        },
        "rounds": [{"race": race, "stock": stock | {"tensors": 9, "adapters": 3}}],
        "memory": {name: {"loaded": 4000, "peak": 4800} for name in ("frozen", "ours", "peft")},
        "loop": [{"seconds": 2.0, "forward": 1.0, "backward": 0.9, "optimizer": 0.08}],
        "left_out": [],
        "date": "2026-01-01",
        "commit": "abc",
        "command": "python3 dev.py bench",
    }


def test_ratios_are_those_of_pairs():
    ratios = report.build_ratios(measured(ours=2.05))
    assert [r.middle for r in ratios] == pytest.approx([1.025, 0.82, 11 / 2.05, 0.3, 0.01])
    assert all(ratio.met for ratio in ratios)


def test_the_nodes_ratio_is_of_turns_where_it_takes_turns():
    result = measured()
    turns = [step | {"stock": {"seconds": 22.0}} for step in result["rounds"][0]["race"]]
    result["rounds"] = [{"race": turns, "stock": {**result["rounds"][0]["stock"], "seconds": [22.0] * 5}}]
    ratio = next(each for each in report.build_ratios(result) if each.name == "seconds per step, TrainLoraNode / ours")
    assert (ratio.middle, ratio.count) == (pytest.approx(10.0), 5)


def test_a_missed_target_is_printed_as_missed():
    assert "**missed**" not in report.render(measured(ours=2.05))
    text = report.render(measured(ours=2.6))
    assert text.count("**missed**") == 2
    assert "| seconds per step, ours / frozen pass | 1.300 | 1.300 – 1.300, n = 5 | ≤ 1.03 | **missed** |" in text


def test_without_stock_node_and_loop_the_rest_is_reported():
    result = measured() | {"left_out": ["TrainLoraNode was left out: no room."], "loop": []}
    del result["rounds"][0]["stock"]
    text = report.render(result)
    assert "TrainLoraNode was left out: no room." in text and "TrainLoraNode / ours" not in text


def test_a_block_of_the_page_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- bench:a -->\nold\n<!-- /bench:a -->\n\nprose\n", encoding="utf-8")
    report.write_block(page, "a", "new \\1\n")
    report.write_block(page, "b", "more")
    assert page.read_text(encoding="utf-8") == (
        "# Title\n\n<!-- bench:a -->\nnew \\1\n<!-- /bench:a -->\n\nprose\n"
        "\n<!-- bench:b -->\nmore\n<!-- /bench:b -->\n"
    )


def test_a_case_is_described_from_the_header_of_its_base():
    told = worker.measure({"what": "describe", "case": "tiny-1-dry"})
    assert told["layers"] == 84 and told["case"]["resolution"] == 64 and told["flops"] > 1e8


def here(measure):
    """Measure parts in this process."""

    class Here:
        def __init__(self, part):
            pass

        def measure(self, part, seconds):
            return measure(part)

        def end(self):
            pass

    return Here


def test_a_file_to_show_has_no_path_and_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(share.platform, "node", lambda: "annas-tower")
    monkeypatch.setattr(share.getpass, "getuser", lambda: "anna.b")
    machine = {"device": "NVIDIA GeForce RTX 4090", "torch": "2.11.0+cu130", "python": "3.13.1"}
    paths = (
        r"C:\Users\anna.b\ComfyUI",
        "/home/anna.b/x y/z.json",
        r"\\nas\models\a.safetensors",
        r"D:\a",
        "/mnt/big/x.py",
        r"C:\Users\Anna Maria Beer\it's here.py",
    )
    reason = "it failed (" + "; ".join(f"no file '{path}' on Annas-Tower of anna.b" for path in paths) + ")"
    reason += r"; File C:\Users\Anna Maria Beer\x.py, line 3; /home/anna.b/Maria Beer/x, 2 s/step"
    data = {
        **{
            "sources": "ab12",
            "date": "2026-11-27",
            "commit": "unknown",
            "command": "python3 dev.py bench --results /home/anna.b",
        },
        "parts": {results.key(parts.device(cases.GPU)): {"machine": machine, "megabytes": 24000, "measured": 1.6e14}},
        "left_out": {results.key({"what": "race"}): reason},
    }
    path = share.write(data, machine["device"], tmp_path)
    text = path.read_text(encoding="utf-8")
    assert path.name == "lora-atelier-nvidia-geforce-rtx-4090-2026-11-27.json"
    for name in ("anna", "tower", "beer", "users", "home", "nas", "models", "mnt", "d:"):
        assert name not in text.lower(), name
    assert "2 s/step" in text
    kept = share.read(path)
    assert kept["parts"] == data["parts"] and kept["command"] == share.COMMAND and kept["date"] == data["date"]


def test_several_cards_are_one_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr(run, "PAGE", page)
    files = []
    for number, name in enumerate(("NVIDIA L4", "NVIDIA A100")):
        machine = {"device": name, "torch": "2", "python": "3"}
        device = {results.key(parts.device(cases.GPU)): {"machine": machine, "megabytes": 24000, "measured": 1e14}}
        data = {"sources": "x", "date": "2026-11-27", "commit": "abc", "command": "", "parts": device, "left_out": {}}
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench", "--render", *map(str, files)])
    assert run.main() == 0
    text = page.read_text(encoding="utf-8")
    assert text.index("### One card: NVIDIA A100") < text.index("### One card: NVIDIA L4")
    for wrong in ("{", "[]", "{}"):
        files[0].write_text(wrong, encoding="utf-8")
        with pytest.raises(SystemExit, match=r"^bench: 0\.json is no file of `python3 dev\.py bench --gpu --share`"):
            run.main()
    files[0].write_text(files[1].read_text(encoding="utf-8").replace("NVIDIA A100", "CPU"), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^bench: 0\.json was measured without a card, in a dry run\. Leave it out$"):
        run.main()
    files[0].unlink()
    with pytest.raises(SystemExit, match=r"^bench: .*0\.json cannot be read: No such file or directory$"):
        run.main()


def test_a_python_that_reads_no_environment_finds_the_benchmarks(tmp_path):
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    (tmp_path / "it's.py").write_text("import sys, beside, lora_atelier.dev\nprint(sys.argv[1:])", encoding="utf-8")
    python, *rest = script(sys.executable, tmp_path / "it's.py")
    ended = subprocess.run([python, "-I", *rest, "--out", "x"], capture_output=True, text=True)
    assert ended.stdout == "['--out', 'x']\n", ended.stderr


@pytest.mark.parametrize("others", [(), ("--gpu", "--data")])
def test_a_file_to_show_is_of_the_gpu_suite_alone(others, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--share", *others])
    with pytest.raises(SystemExit):
        run.main()
    assert capsys.readouterr().err.endswith(": write --gpu --share\n")


@pytest.mark.thorough
def test_the_gpu_suite_runs_dry_and_is_not_measured_twice(tmp_path, monkeypatch):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    # bitsandbytes compiles its 4-bit kernel for each shape on the CPU
    curve = [setting for setting in cases.CURVE if setting.weights != "nf4"]
    monkeypatch.setattr(parts, "CURVE", curve)
    path = tmp_path / "gpu.json"
    order = []
    monkeypatch.setitem(contenders.CONTENDERS, "peft", contenders.Contender(out_of_memory))

    def measure(part):
        order.append((part["what"], part.get("case")))
        return worker.measure(part)

    first = results.Results(path, here(measure), "dry", resume=True)
    first.measure(parts.gpu_parts(cases.GPU_DRY, 1, first), share_process=True, seconds=9 * 60)
    assert not first.failed and not first.waiting()
    tiny, toy = "tiny-1-dry", "toy-sdxl-2-dry"
    once = list(dict.fromkeys(order))
    assert once[:3] == [("device", None), ("describe", tiny), ("describe", toy)]
    assert once[3:7] == [("race", tiny), ("race", toy), ("alone", tiny), ("estimate", tiny)]
    text = gpu_report.render(first.data, parts.suite(first.data))
    for title in ("frozen pass", "**LoRA Atelier** |", "**LoRA Atelier**, compiled |"):
        assert text.count(f"\n| {title}") == (1 if "compiled" in title else 2)
    assert "| diffusers + peft" not in text
    assert text.count("\npeft was left out: it runs out of memory on this device.") == 2
    assert "TrainLoraNode was left out: COMFYUI_PATH names no ComfyUI folder." in text
    assert all(f"\n| {setting.name} |" in text for setting in curve)
    assert text.count("| not measured |") == 4  # of the full-size cases; the estimate was held against toys
    again = results.Results(path, here(cannot_compile), "dry", resume=True)
    again.measure(parts.gpu_parts(cases.GPU_DRY, 1, again), share_process=True)
    assert gpu_report.render(again.data, parts.suite(again.data)) == text


def test_the_goals_come_first_and_models_are_loaded_few_times(tmp_path):
    kept = results.Results(tmp_path / "r.json", here(None), "c", resume=False)
    plan = parts.gpu_parts(cases.GPU, 1, kept)
    assert len({results.key(part) for part in plan}) == len(plan)
    shared = [cases.company(part) for part in plan]
    starts = [one for before, one in zip([None, *shared], shared, strict=False) if one != before]
    wanted = [
        "counted",
        "race sdxl-1024-4-gpu",
        "race sdxl-1024-1-gpu",
        "alone sd15-512-1-gpu",
        "alone sdxl-1024-1-gpu",
    ]
    assert [" ".join(start).strip() for start in starts[:6]] == [*wanted, "counted"] and len(starts) <= 15
    assert max(map(cases.limit, plan)) < 9 * 60  # every part fits into a call


def test_results_of_other_sources_are_not_kept(tmp_path, monkeypatch):
    path, part = tmp_path / "r.json", {"what": "device", "device": "cpu"}

    def measured(number, resume=True):
        kept = results.Results(path, here(lambda part: {"n": number}), "c", resume=resume)
        kept.measure([part])
        return results.found(json.loads(path.read_text()), part)

    assert [measured(1), measured(2), measured(3, resume=False)] == [{"n": 1}, {"n": 1}, {"n": 3}]
    monkeypatch.setattr(results, "sources_digest", lambda: "other")
    assert measured(4) == {"n": 4}


def test_what_does_not_fit_into_the_time_waits_for_the_next_call(tmp_path):
    path, plan = tmp_path / "r.json", [parts.alone(cases.GPU[0], name) for name in ("compiled", "ours")]
    seconds = [cases.limit(part) for part in plan]
    assert seconds[0] > seconds[1]
    kept = results.Results(path, here(lambda part: {"n": 1}), "c", resume=True)
    kept.measure(plan, seconds=sum(seconds) / 2)
    assert results.found(kept.data, plan[0]) == {"left_out": results.WAITS} and kept.waiting() == 1
    again = results.Results(path, here(lambda part: {"n": 2}), "c", resume=True)
    again.measure(plan)
    assert [results.found(again.data, part)["n"] for part in plan] == [2, 1] and not again.waiting()


def test_a_part_that_fails_costs_itself_alone_and_is_tried_again_last(tmp_path, monkeypatch):
    lines = ["import os, sys", "for n, line in enumerate(sys.stdin):", "    assert 'peft' not in line, 'no peft'"]
    lines += ["    out = f'{sys.argv[2]}/{n}.json'", "    open(out + '.tmp', 'w').write(f'[{os.getpid()}, {n}]')"]
    (tmp_path / "worker.py").write_text("\n".join([*lines, "    os.replace(out + '.tmp', out)"]))
    monkeypatch.setattr(results, "WORKERS", tmp_path)
    path, names = tmp_path / "r.json", ["frozen", "ours", "peft", "compiled"]
    plan = [parts.alone(cases.GPU[0], name) for name in names]
    kept = results.Results(path, results.Child, "c", resume=True)
    kept.measure(plan, share_process=True)
    (one, first), (same, second), failed, (other, third) = (results.found(kept.data, part) for part in plan)
    assert one == same != other and (first, second, third) == (0, 1, 0)
    assert failed == {"left_out": "it failed (AssertionError: no peft)"} and kept.failed == [results.key(plan[2])]
    order = []
    again = results.Results(path, here(lambda part: order.append(part) or {"n": 1}), "c", resume=True)
    again.measure([plan[2], parts.describe(cases.GPU[0])])
    assert order == [parts.describe(cases.GPU[0]), plan[2]] and not again.failed


def test_a_part_that_takes_too_long_ends_with_all_it_has_started(tmp_path, monkeypatch):
    script, told = tmp_path / "worker.py", tmp_path / "pid"
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    lines = ["import subprocess, sys, time", f"open({str(told)!r}, 'w').write(str({start}.pid))", "time.sleep(600)"]
    script.write_text("\n".join(lines))
    monkeypatch.setattr(results, "WORKERS", tmp_path)
    process = results.Child({"what": "race"})
    while not told.is_file() or not told.read_text():  # on a busy machine it starts slowly
        assert process._process.poll() is None
        time.sleep(0.1)
    with pytest.raises(results.PartFailed, match="longer than its limit of 3 s"):
        process.measure({"what": "race"}, 3)
    process.end()
    assert not alive(process._process.pid)
    until = time.monotonic() + 300  # half of its life: a busy machine may take a while to end what was killed
    while alive(int(told.read_text())):
        assert time.monotonic() < until
        time.sleep(0.1)


def alive(pid):
    try:
        return "\nState:\tZ" not in open(f"/proc/{pid}/status").read()
    except FileNotFoundError:
        return False


def test_a_contender_whose_memory_could_not_be_measured_keeps_its_seconds():
    full, result = measured(), measured()
    del result["memory"]["frozen"], result["memory"]["ours"]
    table = [line for line in report.render(result).splitlines() if line.startswith("| frozen pass")]
    whole = [line for line in report.render(full).splitlines() if line.startswith("| frozen pass")]
    assert table[0].split("|")[2] == whole[0].split("|")[2] and "MB" in whole[0] and "MB" not in table[0]
    assert "peak memory, ours" not in report.render(result)


def test_a_case_without_race_memory_or_node_is_still_reported(tmp_path, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    case = cases.CASES["sdxl-1024-1-gpu"]
    described = measured(case=case)["described"] | {"case": asdict(case)}

    def measure(part):
        if part["what"] == "describe":
            return described
        if part["what"] == "alone" and part["contender"] == "ours":
            return {"seconds": [0.5, 0.5], "loaded": 1, "peak": 9, "reserved": 10, "overhead": 2}
        return {"left_out": f"no {part['what']} here"}

    kept = results.Results(tmp_path / "r.json", here(measure), "c", resume=False)
    kept.measure(parts.case_parts(case, 1, kept))
    result = parts.case_result(case, kept.data)
    assert result["left_out"] == [
        "The race, first round, was left out: no race here.",
        "TrainLoraNode was left out: no stock here.",
        "The race was left out: no race here.",
        "frozen alone was left out: no alone here.",
        "compiled alone was left out: no alone here.",
        "peft alone was left out: no alone here.",
    ]
    device = {"machine": described["machine"], "measured": 1e14, "megabytes": 1}
    text = gpu_report.render(STAMP, {"device": device, case.name: result})
    assert "| **LoRA Atelier** | 2 | 0.5000 – 0.5000 |  | 16.0% | 9 MB | 10 MB | 12 MB |" in text


STAMP = {"date": "2026-01-01", "commit": "abc", "command": "python3 dev.py bench --gpu"}


def suite(compiled=1.8, held=4400, estimated=3120):
    result = measured(case=cases.CASES["sdxl-1024-4-gpu"])
    for step in result["rounds"][0]["race"]:
        step["compiled"] = {"seconds": compiled, "forward": 1, "backward": 1, "update": 0}
    device = result["described"]["machine"] | {"device": "NVIDIA H200"}
    curve = {
        "checkpointing 0": {"seconds": [1.0], "peak": 9000, "reserved": 9500, "overhead": 500, "estimated": 9000},
        "checkpointing full": {
            "seconds": [1.5],
            "peak": 3000,
            "reserved": held - 500,
            "overhead": 500,
            "estimated": estimated,
        },
        "full, weights in nf4": {"left_out": "bitsandbytes is not there", "estimated": 2000},
    }
    parts = {"sdxl-1024-4-gpu": result, "sdxl-1024-1-gpu-curve": curve}
    return {"device": {"machine": device, "measured": 8e14, "megabytes": 150_000}, **parts}


def test_goals_of_the_gpu_suite_are_judged():
    text = gpu_report.render(STAMP, suite())
    assert "989 TFLOP/s by the maker's data sheet, 800 TFLOP/s measured" in text
    assert "0.4% of the peak, 111.1% of the frozen pass | met |" in text
    assert "1.39x at the least (sdxl-1024-4-gpu; cases measured: 1) | met |" in text
    assert "4,400 MB on the card (3,000 MB of tensors), checkpointing full | met |" in text and "4.0% off" in text
    assert "| full, weights in nf4 | | | | | | bitsandbytes is not there |" in text
    assert re.search(r"\| sd15-512-1-gpu: < 2,000 MB .*\| not measured \| its turn has not come \|", text)
    text = gpu_report.render(STAMP, suite(compiled=2.4, held=4600, estimated=3600))
    assert "0.4% of the peak, 90.9% of the frozen pass | **missed** |" in text
    assert "1.04x at the least (sdxl-1024-4-gpu; cases measured: 1) | **missed** |" in text
    assert "4,600 MB on the card (3,000 MB of tensors), checkpointing full | **missed** |" in text
    assert "20.0% off at the most (sdxl-1024-1-gpu-curve checkpointing full; 2 of 3 settings) | **missed** |" in text


def of_large(seconds, stated="NVIDIA H100 80GB HBM3"):
    """Render a suite in which each side of Krea 2 takes some seconds, or is left out; without empty lines."""
    rows = {
        side: {"seconds": [value], "parameters": 12_800_000_000, "loaded": 1, "peak": 27_000} for side, value in seconds
    }
    sides = {side: row | {"reserved": 28_000, "overhead": 500} for side, row in rows.items()}
    left = {side: {"left_out": "it is too large"} for side in large.SIDES if side not in sides}
    return "\n".join(large.render({"linked-krea2-1024-1-gpu": sides | left}, stated))


def test_large_models_stand_beside_bfloat16_the_frozen_pass_and_what_others_claim():
    text = of_large([("frozen", 0.8), ("bfloat16", 1.0), ("int8", 0.6)])
    assert "**Krea 2, 12.80 B random weights, 1024 px, batch 1**" in text
    row = "| weights in int8, multiplied in int8 | 0.600 | 0.60x | 0.75x | 27,000 MB | 28,000 MB | 28,500 MB |"
    assert row in text
    assert "| weights in float8 | not measured: it is too large |" in text
    claims = {
        line.split(" | ")[1] + line.split(" | ")[2]: line
        for line in text.splitlines()
        if "PR 1008" in line or "guide" in line
    }
    assert claims["1024 px, bfloat16, checkpointingH100"].endswith("| 1.000, bfloat16 | **missed** |")
    assert claims["1024 px, int8RTX PRO 6000"].endswith("| on NVIDIA H100 80GB HBM3 |")  # another card: no verdict
    assert claims["1024 px, float8RTX 3090"].endswith("| not measured |  |") and "| met |" not in text
    assert "| 0.980, bfloat16 | met |" in of_large([("bfloat16", 0.98)])


def test_large_models_come_after_the_goals_each_side_in_a_process_of_its_own(tmp_path, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    kept = results.Results(tmp_path / "r.json", here(None), "c", resume=False)
    plan = parts.gpu_parts(cases.GPU, 1, kept, large.LARGE)
    of_models = [part for part in plan if part["what"] == "large"]
    assert len({cases.company(part) for part in of_models}) == len(of_models) == 3 * len(large.SIDES)
    assert max(map(cases.limit, of_models)) < 9 * 60
    first, last = plan.index(of_models[0]), plan.index(of_models[-1])
    assert plan[first - 1]["what"] == "estimate" and last - first + 1 == len(of_models)
    alone = parts.gpu_parts([], 1, kept, large.LARGE[:1])
    assert [part["what"] for part in alone] == ["device", *["large"] * len(large.SIDES)]
    monkeypatch.delenv("COMFYUI_PATH")
    assert [part["what"] for part in parts.gpu_parts([], 1, kept, large.LARGE[:1])] == ["device"]
    why = parts.suite(kept.data)["linked-z-image-1024-1-gpu"]["int8"]
    assert why == {"left_out": "COMFYUI_PATH names no ComfyUI folder"}


@pytest.mark.thorough
def test_large_models_run_dry(tmp_path, monkeypatch, comfyui, warm_children):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    monkeypatch.setattr(results, "commit", lambda: "unknown")  # the quick processes take no other program
    dry = results.Results(tmp_path / "r.json", results.Child, "dry", resume=False)
    dry.measure(parts.gpu_parts([], 1, dry, large.LARGE_DRY))
    assert not dry.failed
    for model in large.LARGE_DRY:
        for side, row in parts.suite(dry.data)[model.name].items():
            assert len(row["seconds"]) == large.STEPS and row["parameters"] > 100_000, (model.name, side)


def test_a_goal_without_a_figure_says_why():
    without = suite()
    for step in without["sdxl-1024-4-gpu"]["rounds"][0]["race"]:
        step.pop("compiled", None)  # all steps are one and the same
    without["sdxl-1024-4-gpu"]["left_out"] = ["compiled was left out: no C compiler was found."]
    text = gpu_report.render(STAMP, without)
    assert "diffusers + peft | not measured | compiled was left out: no C compiler was found. |" in text
    assert "Nothing has been measured yet" in gpu_report.render(STAMP, {})


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12), ("GTX 9", None)],
)
def test_the_peak_of_a_card_is_found_by_its_name(device, peak):
    assert gpu_report.listed_peak(device) == peak


@pytest.mark.thorough
def test_one_step_goes_all_the_way_into_comfyui(tmp_path, monkeypatch, comfyui, warm_children):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    lora = tmp_path / "lora.safetensors"
    train = full_size.train_one_step("tiny", lora)
    load = results.child("full_size.py", "load", "--model", "tiny", "--lora", str(lora))
    full_size.check("tiny", {"train": train, "load": load})
    assert train["layers"] == {"unet": 119, "te": 18} and load["unet"] == 119 and load["text"] == 18


@pytest.fixture
def train_nothing(monkeypatch):
    """Give `train_nothing(act, **result)`: a benchmark's run calls `act(run, output, callbacks)`, and comes to that."""

    def replaced(act, **result):
        def train_lora(run, output, cache, device="cpu", callbacks=None, source=None):
            act(run, output, callbacks)
            return SimpleNamespace(**result)

        monkeypatch.setattr(train, "train_lora", train_lora)

    return replaced


def test_the_step_of_a_full_size_model_is_counted_by_layers(train_nothing, tmp_path, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    lora, runs = tmp_path / "lora.safetensors", []

    def act(run, output, _):
        runs.append(run)
        output.write_bytes(bytes(2_000_000))

    one, none = torch.ones(2), torch.zeros(2)
    ups = {"lora_unet_a": one, "lora_unet_b": none, "lora_te_a": one}
    tensors = {f"{name}.lora_up.weight": up for name, up in ups.items()} | {"lora_te_a.lora_down.weight": one}
    train_nothing(act, tensors=tensors, losses=[0.5])
    found = full_size.train_one_step("tiny", lora)
    assert found["layers"] == {"unet": 2, "te": 1} and (found["moved"], found["loss"], found["megabytes"]) == (
        2,
        0.5,
        2,
    )
    (run,) = runs
    assert run.train.steps == 1 and run.lora.preset == "full" and run.optimizer.text_encoder_learning_rate > 0


def test_what_comfyui_patches_is_counted_and_what_it_says_is_kept(monkeypatch):
    def say(text, found):
        logging.getLogger().warning(text)
        return found

    patched = SimpleNamespace(patches="ab"), SimpleNamespace(patcher=SimpleNamespace(patches="a"))
    sd, utils = ModuleType("comfy.sd"), ModuleType("comfy.utils")
    sd.load_checkpoint_guess_config = lambda *_, **__: say("left over keys: x", ("model", "clip", None))
    sd.load_lora_for_models = lambda *_: say("lora key not loaded: y", patched)
    utils.load_torch_file = lambda *_, **__: {}
    for name, module in (("comfy", ModuleType("comfy")), ("comfy.sd", sd), ("comfy.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["comfy"].sd, sys.modules["comfy"].utils = sd, utils
    monkeypatch.setattr(stock, "register_tiny", lambda: None)
    found = full_size.load_in_comfyui(Path("a"), Path("b"))
    assert (found["unet"], found["text"]) == (2, 1)
    assert (found["checkpoint_log"], found["lora_log"]) == (["left over keys: x"], ["lora key not loaded: y"])


def test_a_lora_is_whole_where_every_trained_layer_moved_and_is_patched():
    train = {"layers": {"unet": 119, "te": 18}, "moved": 137, "precision": "float32", "resolution": 64, "peak": 900.0}
    result = {"train": train, "load": {"unet": 119, "text": 18, "lora_log": [], "peak": 1_800.0}}
    full_size.check("tiny", result)
    told = {"stamp": "today", "command": "bench --full-size"}
    row = (
        "| tiny | float32 | 64 | 119 unet + 18 te | 119 + 18 | 0 | {} MB | 1,800 MB | {} | today, `bench --full-size` |"
    )
    assert row.format("900", "met") in full_size.render({"tiny": result | told})
    assert row.format("24,000", "**missed**") in full_size.render(
        {"tiny": result | told | {"train": train | {"peak": 24_000.0}}}
    )
    for part, values, sentence in (
        ("load", {"unet": 117}, r"patches 117 \+ 18 of 137 layers"),
        ("load", {"lora_log": ["lora key not loaded: x"]}, "logs .'lora key not loaded: x'"),
        ("train", {"moved": 136}, "changed 136 of 137 layers"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            full_size.check("tiny", result | {part: result[part] | values})


@pytest.mark.thorough
def test_saves_are_measured_against_steps(monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    result = saves.measure("tiny", "cpu")
    assert len(result["saves"]) == saves.SAVES and len(result["steps"]) == saves.SAVES + 1
    assert result["megabytes"] > 0.5 and all(seconds > 0 for seconds in result["saves"])


def test_the_first_and_the_last_save_are_not_among_those_measured(train_nothing, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    monkeypatch.setattr(saving, "save", lambda seconds: time.sleep(seconds))
    monkeypatch.setattr(runs, "open_run", lambda _: SimpleNamespace(checkpoints=lambda: [SimpleNamespace(size=3e6)]))

    def act(run, _, callbacks):
        assert (run.saves.save_every, run.saves.save_unit, run.train.steps) == (1, "steps", saves.SAVES + 2)
        for step in range(run.train.steps):
            callbacks.step(SimpleNamespace(seconds=float(step)))
            saving.save(0.0 if 0 < step <= saves.SAVES else 0.2)

    train_nothing(act, run=None)
    found = saves.measure("tiny", "cpu")
    assert found["steps"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and found["megabytes"] == 3
    assert len(found["saves"]) == saves.SAVES and statistics.median(found["saves"]) < 0.2


def test_saves_are_judged_by_their_share_of_a_run():
    machine = {"device": "CPU", "cpu": "a CPU", "cores": 2}
    told = {"title": "a base", "machine": machine, "resolution": 64, "minutes": 5, "megabytes": 3.0}
    quick = saves.render({**told, "steps": [0.5, 0.25, 1.0], "saves": [2.0, 1.0, 2.5]}, "bench --saves", "today")
    assert "| 0.66% | 0.33% – 0.83%, n = 3 | ≤ 1% | met |" in quick
    assert "| seconds of a step | 0.500 | 0.250 – 1.000, n = 3 |" in quick
    assert "| a save / a step | 4.000 | 2.000 – 5.000, n = 3 |" in quick
    slow = saves.render({**told, "steps": [0.5], "saves": [4.0, 3.1, 5.0]}, "bench --saves", "today")
    assert "| 1.32% | 1.02% – 1.64%, n = 3 | ≤ 1% | **missed** |" in slow


@pytest.mark.thorough
def test_tools_are_measured_beside_whole_decompositions():
    result = tools.measure("toy")
    assert result["layers"] > 100 and result["whole"] > 0 and result["extracted"] > 0 and len(result["ours"]) == 6
    assert tools.render(result, "bench --tools", "today").count("| Resize LoRA, ") == 6


def test_tools_are_reported_with_their_goal():
    told = {"machine": {"cpu": "a CPU", "cores": 2}, "layers": 794, "megabytes": 190.0, "extracted": 30.0}
    ours = {"rank 8": 20.5, "sv_fro 0.9": 4.0}
    text = tools.render({**told, "whole": 300.0, "ours": ours}, "bench --tools", "today")
    assert "| Resize LoRA, sv_fro 0.9 | 4.0 | ≤ 20 | met |" in text and "| 20.5 | ≤ 20 | **missed** |" in text
    assert "| whole decompositions / Resize LoRA, sv_fro | 75.000 |" in text


@pytest.mark.thorough
def test_settings_are_measured_by_what_the_example_concept_looks_like(monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    found = learning.measure(learning.configure("preservation class", 0, steps=2, size=64), drawn=2)
    assert found["circles"] < 0.5
    assert found["motif"] < 0.5 and found["bleed"] < 0.5 and 0 <= found["kept"] <= 1
    assert found["loss"] > 0 and found["seconds"] > 0


def test_each_variant_of_settings_is_another_run(monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    runs = [learning.configure(name, seed) for name in learning.VARIANTS for seed in (0, 1)]
    alike = len(learning.DRAWN) * 2  # as the first variant, but for the pictures that are drawn before
    assert len({repr(run) for run in runs}) == len(runs) - alike  # each other variant is another run


@pytest.fixture
def draw_nothing(monkeypatch):
    """Let a benchmark's base draw gray pictures, with as much more red than blue as a fifth of a LoRA's strength."""

    def sample_images(base, sample):
        for prompt in sample.prompts:
            picture = torch.full((1, 8, 8, 3), 0.5)
            picture[..., 0] += base.strength / 10
            picture[..., 2] -= base.strength / 10
            yield SimpleNamespace(prompt=prompt), picture

    def merge_beneath(base, beneath):
        (base.strength,) = (each.strength for each in beneath)

    monkeypatch.setattr(sd, "load_base_model", lambda _: SimpleNamespace(strength=0.0))
    monkeypatch.setattr(sample, "sample_images", sample_images)
    monkeypatch.setattr(merge, "merge_beneath", merge_beneath)


@pytest.mark.usefixtures("draw_nothing")
def test_a_setting_is_judged_by_the_motif_where_it_was_asked_for_and_elsewhere(train_nothing, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    motif = next(picture for picture in concept.load_pictures() if picture.shape[:2] == (128, 128))
    gray, taught = torch.full_like(motif, 0.5), []
    parts = len(learning.GROUNDS), len(learning.PLAIN), len(learning.CIRCLES)
    drawn = torch.stack([each for each, count in zip((motif, gray, motif), parts, strict=True) for _ in range(count)])
    losses = [9.0] * 8 + [1.0, 2.0]  # the last fifth counts

    def act(run, _, callbacks):
        taught.extend(sorted(path.name for path in Path(run.dataset.concepts[-1].folder).iterdir()))
        assert (run.dataset.concepts[-1].role, run.dataset.concepts[-1].batch_size) == ("regularisation", 3)
        for _ in range(3):
            callbacks.step(None)

    train_nothing(act, samples=drawn, losses=losses)
    monkeypatch.setattr(concept, "read_plain", lambda pictures, plain: (len(pictures), len(plain) // 2, None))
    found = learning.measure(learning.configure("regularisation pictures", 0, steps=2), drawn=2, batch=3)
    assert found["motif"] > 0.7 and found["bleed"] <= 0 and found["circles"] > 0.7
    assert (found["kept"], found["loss"]) == (0.75, 1.5) and found["seconds"] >= 0
    assert taught == ["00.png", "00.txt", "01.png", "01.txt"]


@pytest.mark.usefixtures("draw_nothing")
def test_the_mean_of_seeds_is_judged_beside_them_by_the_pictures_of_each(train_nothing, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    seeds, judged = [], []

    def act(run, output, _):
        assert not run.sample.prompts
        seeds.append(run.train.seed)
        factors = {"lora_down": torch.ones(1, 4), "lora_up": torch.full((4, 1), float(run.train.seed))}
        save_file({f"lora_unet_a.{name}.weight": factor for name, factor in factors.items()}, output)

    train_nothing(act)
    monkeypatch.setattr(learning, "judge", lambda pictures: judged.append(len(pictures)) or {"motif": len(judged)})
    found = learning.measure_mean((1, 2), steps=2)
    assert (
        seeds == [1, 2] and judged == [18] * 8
    )  # of two seeds, the mean and one of their rank, with both seeds' noise
    assert {name: [row["motif"] for row in rows] for name, rows in found.items()} == {
        "seeds": [1.5, 3.5],
        "mean": [5.5],
        f"mean at rank {learning.RANK}": [7.5],
    }


def test_settings_are_reported_beside_the_first():
    plain = {"motif": 0.25, "bleed": -0.5, "circles": -0.25, "kept": 0.75, "loss": 0.05, "seconds": 2.0}
    text = learning.render(
        {"adamw": [plain, {**plain, "motif": 0.35}], "muon": [{**plain, "seconds": 3.0}] * 2}, "b", "d"
    )
    assert "| adamw | 0.300 | 0.250 to 0.350 | -0.500 | -0.250 | 75% | 0.0500 | 1.00 |" in text
    assert (
        "| muon | 0.250 | 0.250 to 0.250 | -0.500 | -0.250 | 75% | 0.0500 | 1.50 |" in text and "2 seeds each" in text
    )


@pytest.mark.thorough
def test_settings_of_flow_models_are_measured_on_the_tiny_one(monkeypatch, comfyui, warm_children):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    found = results.child("learning.py", "--variant", learning.FLOW[1], "--seed", "0", "--steps", "2")
    assert found["motif"] < 0 and found["kept"] > 0.5 and found["loss"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("of", slider.OF)
def test_a_slider_is_measured_by_what_its_file_draws_at_several_strengths(of, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    found = slider.measure(of, steps=2, size=64)
    assert list(found) == ["-1", "-0.5", "0", "0.5", "1"] and all(abs(each) <= 1 for each in found.values())


@pytest.mark.usefixtures("draw_nothing")
@pytest.mark.parametrize("of", slider.OF)
def test_a_slider_is_trained_from_red_to_blue_and_reported_by_strength(of, train_nothing, monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    pixels = []

    def act(run, *_):
        (taught,) = run.dataset.concepts
        colours = [Path(taught.folder), *map(Path, taught.controls.folders if taught.controls else ())]
        pixels.extend(torch.stack([as_tensor(path) for path in sorted(folder.glob("*.png"))]) for folder in colours)
        assert (run.objective.slider == "prompts") == (of == "two prompts") == (taught.controls is None)
        if of == "two prompts":
            assert "red circle" in run.objective.slider_positive and "blue circle" in run.objective.slider_negative
        else:
            assert taught.controls.use == "slider"
        captions = {path.read_text(encoding="utf-8").split(" --")[0] for path in colours[0].glob("*.txt")}
        assert captions == {"a gray circle on a white background"}

    train_nothing(act, path=Path("slider.safetensors"))
    found = slider.measure(of, 1, steps=2, size=64)
    assert found == pytest.approx({"-1": -0.2, "-0.5": -0.1, "0": 0.0, "0.5": 0.1, "1": 0.2}, abs=1e-6)
    assert all(len(each) == slider.PICTURES for each in pixels)
    if of == "pairs of pictures":  # in one place, and red and blue in nothing but that place
        red, blue = pixels
        assert torch.equal(red, blue.flip(-1)) and not torch.equal(red, blue)
        assert (red[..., 0] - blue[..., 0]).min() == 0
    told = slider.render([{of: {"-1": -0.1, "1": 0.2}}, {of: {"-1": -0.3, "1": 0.2}}], "bench --slider", "today")
    assert f"| {of} | -0.200 (-0.300 to -0.100) | +0.200 (+0.200 to +0.200) |" in told and "2 seeds" in told


def as_tensor(path):
    with Image.open(path) as picture:
        return pil_to_tensor(picture.convert("RGB")).movedim(0, -1).int()


@pytest.mark.thorough
@pytest.mark.thorough
def test_the_node_takes_turns_with_all_others_step_by_step(monkeypatch, comfyui):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    case = cases.CASES["tiny-cpu-dry"]
    (part,) = parts.races_of(case, 1)
    raced = worker.measure(part)
    assert not raced["without"] and len(raced["steps"]) == case.race_steps
    assert all(set(step) == {"frozen", "ours", "peft", "stock"} for step in raced["steps"])
    told = raced["stock"]
    assert told["seconds"] == [step["stock"]["seconds"] for step in raced["steps"]]
    assert told["adapters"] > 80 and told["tensors"] > told["adapters"] and told["peak"] > told["loaded"] > 0
    described = measured(case=case)["described"] | {"case": asdict(case)}
    known = {results.key(part): raced, results.key(parts.describe(case)): described}
    result = parts.case_result(case, {"rounds": 1, "parts": known, "left_out": {}})
    text = report.render(result | STAMP)
    assert "| seconds per step, TrainLoraNode / ours | " in text and f"n = {case.race_steps} | " in text
    assert f"trained {told['tensors']} tensors, {told['adapters']} LoRA layers" in text


@pytest.mark.thorough
def test_linked_models_race_against_the_node_and_only_its_gradients_are_wrong(monkeypatch, comfyui, warm_children):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    result = connected.race("flux", 1, toy=True)
    assert {connected.OURS, *result["steps"]} == set(connected.SIDES)
    for other, (pair,) in result["steps"].items():
        assert set(pair) == {connected.OURS, other}
        assert all(step["seconds"] > 0 and step["peak"] >= step["loaded"] > 0 for step in pair.values())
    errors = results.child("gradient_errors.py", "--model", "Flux")
    row = errors["Flux"]
    assert max(row.pop("slope")) < 1e-3
    assert all(error > 0.01 if name.startswith("node") else error < 1e-5 for name, error in row.items())
    assert connected.render({"flux": result}, errors | {"Flux": row | {"slope": (1e-5, 1e-5)}}, "b", "today")


@pytest.mark.thorough
def test_clips_are_encoded_and_trained_beside_comfyuis_own_nodes(monkeypatch, comfyui, warm_children):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    found = results.child("clips.py", "--size", "toy")
    assert len(found["rows"]) == clips.SIZES["toy"][-1] and all(min(row.values()) > 0 for row in found["rows"])
    assert 0 < found["apart"] < 0.05  # of the latents of both
    raced = connected.race("clip", 1, toy=True)
    assert {connected.OURS, *raced["steps"]} == set(connected.SIDES)
    assert "clips of 17 frames" in clips.render(found, connected.race_lines(raced), "bench --clips", "today")


def test_the_encoding_of_clips_is_reported_with_its_goal():
    machine = {"cpu": "a CPU", "cores": 2, "threads": 2, "torch": "2", "load": 0}
    about = {"width": 16, "side": 64, "frames": 17, "clips": 4}
    rows = [{"stock": 2.0, "ours": ours} for ours in (2.0, 2.2, 2.6)]
    encoding = {"rows": rows, "apart": 0.004, "about": about, "machine": machine}
    text = clips.render(encoding, ["the race"], "bench --clips", "today")
    assert "VAE Encode | 1.100 | 1.000 – 1.300, n = 3 | ≤ 1.15 | met |" in text
    assert "Latents differ by 0.4% at most" in text and text.endswith("the race\n")


def test_our_side_takes_turns_with_each_other_and_the_first_turn_does_not_count(monkeypatch):
    living, order = [], []

    class Side:
        def __init__(self, part):
            self.side, self.turns = part["side"], 0
            living.append(self.side)

        def measure(self, part, seconds):
            assert part["side"] == self.side and part["model"] == "flux"
            order.append(self.side)
            self.turns += 1
            return {"turn": self.turns, "about": self.side}

        def end(self):
            living.remove(self.side)

    monkeypatch.setattr(connected, "Child", Side)
    found = connected.race("flux", 2, toy=True)
    assert {connected.OURS, *found["steps"]} == set(connected.SIDES) and not living
    for number, (side, pairs) in enumerate(found["steps"].items()):
        assert [{name: told["turn"] for name, told in pair.items()} for pair in pairs] == [
            {side: turn, connected.OURS: 3 * number + turn} for turn in (2, 3)
        ]
    assert order[:6] == ["frozen", "ours", "ours", "frozen", "frozen", "ours"] and found["about"] == "ours"


def test_races_of_linked_models_are_reported_with_their_goals():
    machine = {"cpu": "a CPU", "cores": 2, "threads": 2, "torch": "2", "load": 0}
    about = {"machine": machine, "title": "Flux", "parameters": 2e6, "pixels": 64}
    sides = {"frozen": 1.6, "stock": 6.0, "stock, plain": 4.0, "ours, full": 3.0, "ours, float8": 2.0}
    told = {name: {"seconds": s, "peak": 1e3 * s, "loaded": 900.0} for name, s in (sides | {"ours": 2.0}).items()}
    steps = {name: [{"ours": told["ours"], name: told[name]}] for name in sides}
    errors = {"Flux": {"ours": 2e-6, "node, depth 1": 0.25, "node, depth 2": "it fails", "slope": (1e-5, 2e-5)}}
    text = connected.render({"flux": {"steps": steps, "about": about}}, errors, "bench --connected", "today")
    assert "| seconds per step, ours / frozen pass | 1.250 | 1.250 – 1.250, n = 1 | ≤ 1.1 | **missed** |" in text
    assert "| seconds per step, TrainLoraNode / ours | 3.000 | 3.000 – 3.000, n = 1 | ≥ 2.5 | met |" in text
    assert "| peak memory, ours / TrainLoraNode | 0.333 | 0.333 – 0.333, n = 1 | ≤ 0.5 | met |" in text
    assert "| **LoRA Atelier** | 2.000 | 2.000 – 2.000 | 2,000 MB | 1,100 MB |" in text
    assert "| Flux (node 1.0e-05, ours 2.0e-05) | 2e-06 | 25.0% | it fails |" in text


def test_memory_is_estimated_by_settings_and_falls_with_each(monkeypatch):
    case = next(case for case in cases.GPU if case.base == "sd15")
    chosen = [setting for setting in cases.CURVE if setting.name in ("checkpointing 0", "full, weights in nf4")]
    text = estimates.render([case], chosen)
    assert "| Stable Diffusion 1.5 at full size, 512 px, batch 1 |" in text
    fastest, smallest = (int(found.replace(",", "")) for found in re.findall(r"\| ([\d,]+) MB \|", text))
    assert 2_500 < fastest < 3_000 and 600 < smallest < 1_000  # 1,719 MB of weights in bfloat16, a quarter in nf4
