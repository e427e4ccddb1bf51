"""Singular values of a layer's delta: by its small factors, the same as of the whole matrix."""

import pytest
import torch

from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.read import parse_lora
from lora_atelier.trainer_core.lora_files.singular import decompose

LAYERS = {  # shapes by part; how many singular values the factors leave of the matrix' 24; the kernel
    "LoRA": ({"lora_up.weight": (24, 4), "lora_down.weight": (4, 36)}, 4, ()),
    "convolution": ({"lora_up.weight": (24, 4, 1, 1), "lora_down.weight": (4, 4, 3, 3)}, 4, (3, 3)),
    "Tucker LoRA": (
        {"lora_up.weight": (24, 4, 1, 1), "lora_mid.weight": (4, 3, 3, 3), "lora_down.weight": (3, 4, 1, 1)},
        4,
        (3, 3),
    ),
    "LoHa": ({"hada_w1_a": (24, 3), "hada_w1_b": (3, 36), "hada_w2_a": (24, 2), "hada_w2_b": (2, 36)}, 6, ()),
    "LoHa of a high rank": ({f"hada_w{s}_{f}": (24, 5) if f == "a" else (5, 36) for s in "12" for f in "ab"}, 24, ()),
    "Tucker LoHa": (
        {
            **{f"hada_w{side}_a": (2, 24) for side in (1, 2)},
            **{f"hada_w{side}_b": (3, 4) for side in (1, 2)},
            **{f"hada_t{side}": (2, 3, 3, 3) for side in (1, 2)},
        },
        4,
        (3, 3),
    ),
    "LoKr": ({"lokr_w1": (6, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 18)}, 8, ()),
    "LoKr of a convolution": ({"lokr_w1": (6, 2), "lokr_w2": (4, 2, 3, 3)}, 8, (3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_factors_give_the_singular_values_of_the_whole_matrix(name):
    shapes, count, kernel = LAYERS[name]
    draw = torch.Generator().manual_seed(0)
    tensors = {f"a.{part}": torch.randn(shape, generator=draw) for part, shape in shapes.items()}
    layer = parse_lora(tensors | {"a.alpha": torch.tensor(1.5)}, "x", {}).layers["a"]
    delta = delta_weight(layer)
    found = decompose(layer)
    assert len(found.sigma) == count and tuple(found.kernel) == kernel
    torch.testing.assert_close((found.u * found.sigma) @ found.vt, delta.flatten(1).double(), rtol=1e-4, atol=1e-4)
    values = torch.linalg.svdvals(delta.flatten(1).double())
    torch.testing.assert_close(found.sigma, values[:count], rtol=1e-4, atol=1e-4)
    for vectors in (found.u, found.vt.t()):
        torch.testing.assert_close(vectors.t() @ vectors, torch.eye(count, dtype=torch.float64))
