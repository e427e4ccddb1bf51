"""LoRA layers of every kind whose factors are small and whose change is as large as is asked for.

As a program: do what a tool does with such a layer, and print the most memory that it took and its seconds.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lora_atelier.trainer_core.lora_files.combine import METHODS, Method, Summand, merge_loras
from lora_atelier.trainer_core.lora_files.inspect import inspect_lora
from lora_atelier.trainer_core.lora_files.lora import layers_of
from lora_atelier.trainer_core.lora_files.recipes import parse_recipes
from lora_atelier.trainer_core.lora_files.resize import RankRule, ReadWeight, resize, resize_by_recipes
from lora_atelier.trainer_core.lora_files.write import delta_norms

RECIPES = parse_recipes("fro_lora=1,thr=-9")

Tensors = dict[str, Tensor]


def lora(rows: int, columns: int) -> Tensors:
    return {"lora_up.weight": torch.randn(rows, 1), "lora_down.weight": torch.randn(1, columns)}


def tucker(rows: int, columns: int) -> Tensors:
    sides = {"lora_up.weight": torch.randn(rows, 1, 1, 1), "lora_down.weight": torch.randn(1, columns // 4, 1, 1)}
    return {**sides, "lora_mid.weight": torch.randn(1, 1, 2, 2)}


def loha(rows: int, columns: int, rank: int = 40) -> Tensors:  # 40 * 40 is more than a side: no thin product
    ends = {"a": (rows, rank), "b": (rank, columns)}
    return {f"hada_w{number}_{end}": torch.randn(shape) for number in (1, 2) for end, shape in ends.items()}


def loha_tucker(rows: int, columns: int, rank: int = 40) -> Tensors:
    shapes = {"w{}_a": (rank, rows), "w{}_b": (rank, columns // 4), "t{}": (rank, rank, 2, 2)}
    return {f"hada_{part.format(number)}": torch.randn(shape) for number in (1, 2) for part, shape in shapes.items()}


def lokr(rows: int, columns: int) -> Tensors:
    return {"lokr_w1": torch.randn(rows // 32, 32), "lokr_w2": torch.randn(32, columns // 32)}


def lokr_factors(rows: int, columns: int) -> Tensors:
    return {
        "lokr_w1_a": torch.randn(32, 2),
        "lokr_w1_b": torch.randn(2, 32),
        "lokr_w2_a": torch.randn(rows // 32, 2),
        "lokr_w2_b": torch.randn(2, columns // 32),
    }


def dora(rows: int, columns: int, rank: int = 40) -> Tensors:
    return {**loha(rows, columns, rank), "dora_scale": torch.rand(rows, 1)}


def glora(rows: int, columns: int) -> Tensors:
    shapes = {"a1": (columns, 1), "a2": (1, columns), "b1": (rows, 1), "b2": (1, columns)}
    return {f"{part}.weight": torch.randn(shape) for part, shape in shapes.items()}


def oft(rows: int, columns: int) -> Tensors:
    del columns
    return {"oft_blocks": torch.randn(rows // 64, 64, 64)}


def full(rows: int, columns: int) -> Tensors:
    return {"diff": torch.randn(rows, columns)}


SMALL: dict[str, Callable[[int, int], Tensors]] = {  # whose files are small however large the change is
    **{"LoRA": lora, "Tucker": tucker, "LoHa": loha, "LoHa Tucker": loha_tucker, "LoKr": lokr},
    **{"LoKr factors": lokr_factors, "DoRA": dora, "GLoRA": glora},
}
KINDS = {**SMALL, "OFT": oft, "full": full}
OF_WEIGHT = ("DoRA", "GLoRA", "OFT")


def given(kind: str, rows: int, columns: int) -> Tensors:
    return {f"a.{ending}": tensor for ending, tensor in KINDS[kind](rows, columns).items()}


def merged(method: Method) -> Callable[[Tensors, ReadWeight], object]:
    def merge(tensors: Tensors, _: ReadWeight) -> object:
        return merge_loras([Summand(layers_of(tensors, name), 0.5) for name in "xy"], method, rank=8)

    return merge


TOOLS: dict[str, Callable[[Tensors, ReadWeight], object]] = {
    "inspect": lambda tensors, weight: inspect_lora(layers_of(tensors, "x"), weight),
    "resize": lambda tensors, weight: resize(layers_of(tensors, "x"), RankRule(rank=8), weight),
    "recipe": lambda tensors, weight: resize_by_recipes(layers_of(tensors, "x"), RECIPES, weight),
    "save": lambda tensors, _: layers_of(tensors, "x") and delta_norms(tensors),
    **{f"merge {method}": merged(method) for method in METHODS},
}


def main(tool: str, kind: str, rows: int, columns: int) -> None:
    import resource  # not on Windows

    for size in ((64, 128), (rows, columns)):
        tensors, weight = given(kind, *size), torch.randn(size)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        with torch.no_grad():
            TOOLS[tool](tensors, lambda _, weight=weight: weight)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{used / rows / columns:.1f} {time.monotonic() - began:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
