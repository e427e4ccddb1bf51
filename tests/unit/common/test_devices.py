"""What kinds of devices can do is asked of one table, and the table is right for what torch tells of them."""

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from second_device import device_is  # noqa: F401 (a fixture)

from lora_atelier.trainer_core.commands.train import device_of
from lora_atelier.trainer_core.common import devices
from lora_atelier.trainer_core.config import MemoryConfig, OptimizerConfig
from lora_atelier.trainer_core.memory import check_weights, choose_dtype, free_bytes, peak_bytes, rungs, total_bytes
from lora_atelier.trainer_core.optim.build import check_device

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def test_no_other_line_asks_for_a_kind_by_name():
    kinds = "|".join(sorted({*devices.KINDS} - {"cpu", "meta"}))
    asks = re.compile(rf"""torch\.({kinds})\b|\.is_({kinds})\b|[=!]= *["']({kinds})["']|in \(["'](cpu|{kinds})["']""")
    allowed = {"torch.cuda.OutOfMemoryError"}
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("trainer_core", "nodes")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "devices.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if asks.search(line) and not any(each in line for each in allowed)
    }
    assert not found


@pytest.mark.parametrize(
    ("kind", "auto", "in_ram"),
    [("card", torch.bfloat16, False), ("mac", torch.bfloat16, True), ("old", torch.float32, False)],
)
def test_a_run_takes_of_a_device_what_it_has(kind, auto, in_ram, device_is):  # noqa: F811
    device = device_is(kind)
    assert choose_dtype("auto", device) == auto and choose_dtype("float16", device) == torch.float16
    moving = [rung for rung in rungs(MemoryConfig(), device) if rung.offload_weights != "none"]
    assert bool(moving) is not in_ram
    fixed = rungs(MemoryConfig(offload_weights="all", offload_activations="on"), device)
    assert {(rung.offload_weights, rung.offload_activations) for rung in fixed} == (
        {("none", "off")} if in_ram else {("all", "on")}
    )
    assert peak_bytes(device) is None  # it measures none


def test_bfloat16_that_is_only_imitated_is_not_chosen(monkeypatch):
    card = torch.device("cuda")
    monkeypatch.setattr(devices.torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))
    monkeypatch.setattr("lora_atelier.trainer_core.memory.device.computes", lambda *_: True)
    assert choose_dtype("auto", card) == torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8))
    assert choose_dtype("auto", card) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))
    monkeypatch.setattr(devices.torch.version, "hip", "6.4")  # AMD's say other numbers
    assert choose_dtype("auto", card) == torch.bfloat16


def test_free_memory_is_read_where_it_lies(device_is, monkeypatch):  # noqa: F811
    module = torch.card
    device = device_is("card")
    monkeypatch.setattr(module, "memory_reserved", lambda _: 5000)
    monkeypatch.setattr(module, "memory_allocated", lambda _: 2000)
    monkeypatch.setattr(module, "mem_get_info", lambda _: (10**9, 10**10))
    assert free_bytes(device) == 10**9 + 3000

    def untold(_):
        raise RuntimeError("The device does not support querying the available free memory.")  # some of Intel's

    monkeypatch.setattr(module, "mem_get_info", untold)
    total = SimpleNamespace(total_memory=10**10)
    monkeypatch.setattr(module, "get_device_properties", lambda _: total, raising=False)
    assert free_bytes(device) == 10**10 - 5000 + 3000 and total_bytes(device) == 10**10


def test_the_memory_of_a_mac_is_its_ram(device_is, monkeypatch):  # noqa: F811
    device = device_is("mac")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert free_bytes(device) == 10**9  # less than Metal would give
    monkeypatch.setattr(torch.card, "recommended_max_memory", lambda: 7 * 10**8)
    monkeypatch.setattr(torch.card, "current_allocated_memory", lambda: 10**8)
    assert free_bytes(device) == 6 * 10**8 and total_bytes(device) == 7 * 10**8
    assert free_bytes(CPU) == 10**9 and total_bytes(CPU) == 0


def test_what_a_device_cannot_store_is_refused_before_the_run(device_is):  # noqa: F811
    with pytest.raises(ValueError, match=r"^weights is float8, which card cannot store; set .*weights.* to int8\.$"):
        check_weights("float8", "weights", device_is("mac"))
    check_weights("float8", "weights", CPU)
    weights = torch.randn(6, 4).to(device_is("mac"))
    assert devices.for_linalg(weights).device == CPU and devices.for_linalg(torch.empty(6, 4, device="meta")).is_meta
    assert devices.for_linalg(weights.to(device_is("card"))).device.type == "card"
    with pytest.raises(ValueError, match=r"^bitsandbytes has no adamw8bit for card; set .* to adamw\.$"):
        check_device(OptimizerConfig(name="adamw8bit"), device_is("mac"))


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_the_fastest_device_that_is_there_is_found(name, monkeypatch):
    for each in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, each), "is_available", lambda each=each: each == name)
    assert device_of("") == torch.device(name)
    monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    assert device_of("") == CPU
