"""Compare each algorithm of a network with LyCORIS' own, on the layers of two blocks of Stable Diffusion 1.5.

Both are attached to the same frozen layers, and run forward and backward in turn, in one process. LyCORIS has two
modes: it rebuilds the changed weight, or adds to the output (bypass). A network's own time is its excess over the
frozen pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.networks.build import build_layer
from lora_atelier.trainer_core.networks.choose import TrainedLayer
from lora_atelier.trainer_core.networks.network import Network

RANK, CONV_SIDE = 8, 16


class Shape(NamedTuple):
    """A layer of the two blocks: a resnet block and a transformer block with 640 channels, at 256 px."""

    title: str
    kernel: int  # 0: linear
    inputs: int
    outputs: int
    tokens: int  # of linear layers
    count: int


SHAPES = (
    Shape("attention", 0, 640, 640, 256, 6),
    Shape("cross attention to text", 0, 768, 640, 77, 2),
    Shape("mlp in", 0, 640, 5120, 256, 1),
    Shape("mlp out", 0, 2560, 640, 256, 1),
    Shape("1x1", 1, 640, 640, 0, 2),
    Shape("3x3", 3, 640, 640, 0, 2),
)
TINY = (Shape("linear", 0, 16, 32, 5, 1), Shape("3x3", 3, 16, 32, 0, 1))
BEST, TWICE = ("best", 1.0), ("rebuild", 2.0)  # this many times as fast as LyCORIS' best mode, or as rebuilding
# title -> (settings, LyCORIS' class in lycoris.modules, its settings, the goal of own time)
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], tuple[str, float] | None]] = {
    "LoRA / LoCon": ({}, "locon.LoConModule", {}, BEST),
    "LoCon, Tucker": ({"tucker": True}, "locon.LoConModule", {"use_tucker": True}, BEST),
    "DoRA": ({"dora": True}, "locon.LoConModule", {"weight_decompose": True, "wd_on_out": False}, BEST),
    "LoHa": ({"algorithm": "loha"}, "loha.LohaModule", {}, TWICE),
    "LoHa, rank 32": ({"algorithm": "loha", "rank": 32}, "loha.LohaModule", {"lora_dim": 32}, None),
    "LoKr": ({"algorithm": "lokr"}, "lokr.LokrModule", {}, BEST),
    "LoKr, full matrix": (
        {"algorithm": "lokr", "full_matrix": True},
        "lokr.LokrModule",
        {"full_matrix": True},
        BEST,
    ),
    "GLoRA": ({"algorithm": "glora"}, "glora.GLoRAModule", {}, None),
    "OFT": ({"algorithm": "oft"}, "diag_oft.DiagOFTModule", {}, TWICE),
    "BOFT": ({"algorithm": "boft", "rank": 10}, "boft.ButterflyOFTModule", {"lora_dim": 10}, None),
    "(IA)^3": ({"algorithm": "ia3"}, "ia3.IA3Module", {}, None),
    "full difference": ({"algorithm": "full"}, "full.FullModule", {}, None),
}


def build_base(shape: Shape) -> tuple[nn.Module, Tensor]:
    """Build a frozen layer and its input, which gets a gradient."""
    if shape.kernel:
        base: nn.Module = nn.Conv2d(shape.inputs, shape.outputs, shape.kernel, padding=shape.kernel // 2)
        return base.requires_grad_(False), torch.randn(1, shape.inputs, CONV_SIDE, CONV_SIDE, requires_grad=True)
    base = nn.Linear(shape.inputs, shape.outputs).requires_grad_(False)
    return base, torch.randn(1, shape.tokens, shape.inputs, requires_grad=True)


def beside(base: nn.Module, settings: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Attach our network to the frozen layer."""
    config = LoraConfig(**{"rank": RANK, "alpha": 1.0, **settings})
    network = Network([], LoraConfig(), seed=0)  # of no layers: the one that is measured comes in by hand
    layer = build_layer(TrainedLayer("lora_unet_to_k", base, config.rank, config.alpha), config, seed=0)  # type: ignore[arg-type]
    network._frozen, network._layers = {"x": base}, {"x": layer}
    network.attach()
    _fill(layer)
    return base


def lycoris(base: nn.Module, name: str, settings: dict[str, Any], *, bypass: bool) -> Callable[[Tensor], Tensor]:
    """Attach LyCORIS' network to the frozen layer, in one of its modes."""
    import importlib

    module, _, kind = name.partition(".")
    build = getattr(importlib.import_module(f"lycoris.modules.{module}"), kind)
    layer = build("x", base, 1.0, **{"lora_dim": RANK, "alpha": 1.0, **settings}, bypass_mode=bypass)
    layer.apply_to()
    layer.train()
    _fill(layer)
    base.__dict__["beside"] = layer
    return base


def _fill(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.01)


def contenders(shape: Shape, case: str) -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor]:
    """Build all contenders for a layer, with the same frozen weights, and the layer's input."""
    settings, name, theirs, _ = CASES[case]
    base, x = build_base(shape)

    def copy_base() -> nn.Module:
        copy, _ = build_base(shape)
        copy.load_state_dict(base.state_dict())
        return copy

    found: dict[str, Callable[[Tensor], Tensor]] = {"frozen": base, "ours": beside(copy_base(), settings)}
    found["rebuild"] = lycoris(copy_base(), name, theirs, bypass=False)
    if "weight_decompose" not in theirs and name != "full.FullModule":  # these have no other mode
        found["bypass"] = lycoris(copy_base(), name, theirs, bypass=True)
    return found, x


def time_layer(shape: Shape, case: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time the contenders in turn; return each one's seconds by round, and its MB stored for the backward pass."""
    found, x = contenders(shape, case)
    timings: dict[str, list[float]] = {name: [] for name in found}
    grad = torch.randn_like(found["frozen"](x))
    for turn in range(rounds + 1):
        names = list(found)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            found[name](x).backward(grad)
            timings[name].append(time.perf_counter() - began)
            x.grad = None
            _forget(found[name])
    return {name: values[1:] for name, values in timings.items()}, {name: _kept(run, x) for name, run in found.items()}


def _forget(run: Any) -> None:
    for layer in (run, run.__dict__.get("delta"), run.__dict__.get("beside")):
        for parameter in layer.parameters() if layer is not None else ():
            parameter.grad = None


def _kept(run: Any, x: Tensor) -> float:
    """Count the MB that one forward pass stores for its backward pass, without parameters and input."""
    known = {x.untyped_storage().data_ptr()}
    for layer in (run, run.__dict__.get("delta"), run.__dict__.get("beside")):
        tensors = (*layer.parameters(), *layer.buffers()) if layer is not None else ()
        known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(x)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 1e6
    del output
    return size


def time_case(case: str, shapes: tuple[Shape, ...], rounds: int) -> dict[str, Any]:
    """Measure one algorithm over all layers of the blocks: milliseconds, MB and ratios of own time."""
    sums: dict[str, list[float]] = {}
    kept: dict[str, float] = {}
    for shape in shapes:
        gc.collect()  # layers and what stands beside them know each other
        timings, size = time_layer(shape, case, rounds)
        for name, values in timings.items():
            old = sums.get(name, [0.0] * rounds)
            sums[name] = [a + shape.count * b for a, b in zip(old, values, strict=True)]
            kept[name] = kept.get(name, 0.0) + shape.count * size[name]
    middle = {name: 1000 * median(values) for name, values in sums.items()}
    own = {name: value - middle["frozen"] for name, value in middle.items() if name != "frozen"}
    # what is smaller than a hundredth of the frozen pass is noise, and no number to divide by
    least = {name: max(value, middle["frozen"] / 100) for name, value in own.items()}
    best = min(value for name, value in least.items() if name != "ours")
    return {
        "ms": middle,
        "own": own,
        "kept": {name: value - kept["frozen"] for name, value in kept.items()},
        "best": best / least["ours"],
        "rebuild": least["rebuild"] / least["ours"],
    }


def render(found: dict[str, dict[str, Any]], rounds: int) -> str:
    """Write the table: own milliseconds and MB of each contender, and the speed of ours relative to theirs."""
    lines = [
        "Own time: what a network adds to the forward and backward pass of a resnet block and a transformer block with "
        f"640 channels at 256 px (frozen alone {median(r['ms']['frozen'] for r in found.values()):.0f} ms), float32, "
        f"rank {RANK} unless stated otherwise, median of {rounds} rounds in turn. MB: kept for the backward pass. "
        "Own times below a hundredth of the frozen pass are noise, and count as that in ratios.",
        "",
        "| | ours, ms | LyCORIS rebuilt | bypass | LyCORIS' best / ours | rebuilt / ours | goal | | ours, MB | rebuilt "
        "| bypass |",
        "|---" * 11 + "|",
    ]
    for case, row in found.items():
        own, kept, goal = row["own"], row["kept"], CASES[case][3]
        cells = [case, *(f"{own[name]:.1f}" if name in own else "" for name in ("ours", "rebuild", "bypass"))]
        cells += [f"{row['best']:.2f}", f"{row['rebuild']:.2f}"]
        cells += [f"{goal[0]} ≥ {goal[1]:g}", "met" if row[goal[0]] >= goal[1] else "**missed**"] if goal else ["", ""]
        cells += [f"{kept[name]:.1f}" if name in kept else "" for name in ("ours", "rebuild", "bypass")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time every algorithm and write a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", help="one algorithm")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    shapes, rounds = (TINY, 1) if options.dry else (SHAPES, options.rounds)
    cases = [options.only] if options.only else list(CASES)
    found = {case: time_case(case, shapes, rounds) for case in cases}
    options.out.write_text(json.dumps({"table": render(found, rounds), "cases": found}))


if __name__ == "__main__":
    main()
