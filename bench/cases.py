"""List base models, cases, and settings that trade speed for memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_atelier.trainer_core.config import MemoryConfig, WeightPrecision

Part = dict[str, Any]  # what is measured: "what", and its settings

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bench"
# Seconds that a part may take on a GPU, the start of its process included; far more than is expected.
LIMITS = {
    "device": 90,
    "describe": 90,
    "race": 150,
    "alone": 90,
    "estimate": 60,
    "loop": 150,
    "stock": 240,
    "large": 300,
}
COMPILING = 400  # of a part that compiles
PATIENCE = 7200  # on the CPU
PLAIN = MemoryConfig(checkpointing="0", offload_weights="none", offload_activations="off")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base model: its name and its file."""

    title: str
    path: Path


BASES = {
    "tiny": Base(title="the tiny base of this pack", path=ROOT / "assets" / "atelier-tiny.safetensors"),
    "sd15": Base(title="Stable Diffusion 1.5 at full size", path=CACHE / "sd15-random.safetensors"),  # 2.1 GB
    "sd2": Base(title="Stable Diffusion 2.1 (v) at full size", path=CACHE / "sd2-random.safetensors"),  # 2.6 GB
    "sdxl": Base(title="Stable Diffusion XL at full size", path=CACHE / "sdxl-random.safetensors"),  # 6.9 GB
    "toy-sdxl": Base(title="a toy in the shape of Stable Diffusion XL", path=CACHE / "toy-sdxl-random.safetensors"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One base model at one size on one device, with the contenders and the number of steps."""

    name: str
    base: str  # of BASES
    resolution: int  # pixels
    batch: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    rank: int = 8
    preset: str = "full"
    contenders: tuple[str, ...] = ("frozen", "ours", "peft")
    race_steps: int  # of each contender per round
    stock_steps: int = 0  # of ComfyUI's node per round, in a process and at a time of its own; 0 = not measured so
    stock_needs: int = 0  # MB of RAM of a race in which ComfyUI's node takes turns; 0 = it takes none
    loop_steps: int = 0  # of the real training loop; 0 = not measured
    curve: bool = False  # the settings of CURVE are measured as well


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that make our training fit into less memory."""

    name: str
    memory: MemoryConfig = PLAIN
    weights: WeightPrecision = "auto"


FULL = PLAIN.replace(checkpointing="full")
CURVE = (
    Setting(name="checkpointing 0"),
    *(
        Setting(name=f"checkpointing {n}", memory=PLAIN.replace(checkpointing=n))
        for n in ("feed-forward", "1", "2", "3", "4", "full", "segments of 2", "segments of 4")
    ),
    Setting(name="checkpointing 0, activations in RAM", memory=PLAIN.replace(offload_activations="on")),
    Setting(name="full, half of the weights in RAM", memory=FULL.replace(offload_weights="half")),
    Setting(name="full, all weights in RAM", memory=FULL.replace(offload_weights="all")),
    Setting(name="full, weights in float8", memory=FULL, weights="float8"),
    Setting(name="full, weights in nf4", memory=FULL, weights="nf4"),
    Setting(
        name="full, all weights and activations in RAM",
        memory=FULL.replace(offload_weights="all", offload_activations="on"),
    ),
)


def _gpu(base: str, resolution: int, batch: int, **more: int) -> Case:
    return Case(
        name=f"{base}-{resolution}-{batch}-gpu",
        base=base,
        resolution=resolution,
        batch=batch,
        device="cuda",
        dtype="bfloat16",
        rank=16,
        preset="attn-mlp",
        contenders=("frozen", "ours", "compiled", "peft"),
        curve=batch == 1,
        race_steps=more.pop("race_steps"),
        **more,
    )


def _dry(base: str, batch: int, *contenders: str, stock_steps: int = 0) -> Case:
    return Case(
        name=f"{base}-{batch}-dry",
        base=base,
        resolution=64,
        batch=batch,
        rank=16,
        preset="attn-mlp",
        contenders=contenders,
        curve=batch == 1,
        race_steps=2,
        stock_steps=stock_steps,
    )


CPU: Sequence[Case] = (
    Case(name="tiny-cpu", base="tiny", resolution=128, race_steps=20, stock_needs=3_000, loop_steps=40),
    # The node takes 16 GB in its step, while the others hold their model of 4.
    Case(name="sd15-cpu", base="sd15", resolution=256, race_steps=5, stock_needs=20_500, loop_steps=6),
    # ComfyUI's node would need about 50 GB here, and the loop loads all models. Raced is the UNet alone: 16 GB while it
    # loads, 5 of them pages of the file. float32: bfloat16 takes 80 times as long on processors without it.
    Case(name="sdxl-cpu", base="sdxl", resolution=256, race_steps=2),
)
CPU_DRY: Sequence[Case] = (
    Case(name="tiny-cpu-dry", base="tiny", resolution=128, race_steps=3, stock_needs=3_000, loop_steps=8),
)
GPU: Sequence[Case] = (
    _gpu("sdxl", 1024, 4, race_steps=12),
    _gpu("sdxl", 1024, 1, race_steps=15, stock_steps=6),
    _gpu("sd15", 512, 1, race_steps=30, stock_steps=10, loop_steps=20),
    _gpu("sd15", 512, 4, race_steps=20),
)
GPU_DRY: Sequence[Case] = (
    _dry("tiny", 1, "frozen", "ours", "compiled", "peft", stock_steps=2),
    _dry("toy-sdxl", 2, "frozen", "ours", "peft"),  # compiling takes most of the time
)
CASES = {case.name: case for case in (*CPU, *CPU_DRY, *GPU, *GPU_DRY)}


def limit(part: Part) -> float:
    """The time limit of a part, in seconds."""
    if part.get("case") in [case.name for case in (*CPU, *CPU_DRY)]:
        return PATIENCE
    compiles = "compiled" in (part.get("contender"), *part.get("contenders", ()))
    return COMPILING if compiles else LIMITS[part["what"]]


def company(part: Part) -> tuple[str, str]:
    """The model that parts in one process share; none if they need none."""
    if part["what"] in ("device", "describe", "estimate"):
        return "counted", ""
    return part["what"], f"{part['case']} {part['side']}" if part["what"] == "large" else part["case"]
