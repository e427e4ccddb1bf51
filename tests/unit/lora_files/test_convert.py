"""Converted LoRAs: slices and wholes, other kinds, and what the files of a program cannot hold."""

import pytest
import torch

from lora_atelier.trainer_core.lora_files.convert import convert
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.lora import layers_of
from lora_atelier.trainer_core.lora_files.names import OWN, Named, Names, Weight
from lora_atelier.trainer_core.models.base import NameForm, Slice

ROWS, COLUMNS = 12, 5
PARTS = {name: Slice(f"t.a.{name}", 4 * i, 4) for i, name in enumerate("qkv")}
WEIGHT = Weight(
    key="diffusion_model.a.qkv",
    rows=ROWS,
    diffusers=tuple(Named(f"a.{name}", piece) for name, piece in PARTS.items()),
    aliases={
        "lora_unet_a_qkv": None,
        "diffusion_model_a_qkv": None,
        **{f"t_a_{name}": piece for name, piece in PARTS.items()},
    },
)
NAMES = Names(
    weights={WEIGHT.key: WEIGHT},
    forms={"kohya": NameForm("lora_unet_", flat=True), "comfyui": OWN, "diffusers": NameForm("t.", diffusers=True)},
    without_alpha=frozenset({"diffusers"}),
)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(name="lora_unet_a_qkv", rank=3):
    return {
        f"{name}.lora_down.weight": draw(rank, COLUMNS),
        f"{name}.lora_up.weight": draw(ROWS, rank),
        f"{name}.alpha": torch.tensor(1.5),
    }


def part(name, rank):
    return {f"t.a.{name}.lora_A.weight": draw(rank, COLUMNS), f"t.a.{name}.lora_B.weight": draw(4, rank)}


def delta(tensors):
    """Compute the change of the whole layer."""
    change = torch.zeros(ROWS, COLUMNS)
    for name, layer in layers_of(tensors, "x").layers.items():
        piece = WEIGHT.aliases[name.replace(".", "_")]
        change[slice(None) if piece is None else slice(piece.start, piece.start + piece.length)] += delta_weight(layer)
    return change


def run(tensors, program, **options):
    return convert(layers_of(tensors, "x"), NAMES, program, **options)


def test_slices_become_a_whole_and_slices_again_to_the_rank():
    parts = {**part("q", 2), **part("v", 3)}
    made = run(parts, "kohya")
    assert made.tensors["lora_unet_a_qkv.lora_down.weight"].shape == (5, COLUMNS)
    torch.testing.assert_close(delta(made.tensors), delta(parts))
    back = run(made.tensors, "diffusers")
    assert {name: t.shape for name, t in back.tensors.items()} == {name: t.shape for name, t in parts.items()}
    torch.testing.assert_close(delta(back.tensors), delta(parts))


def test_a_whole_becomes_slices_without_alpha():
    made = run(whole(), "diffusers")
    assert made.tensors.keys() == {f"t.a.{name}.lora_{side}.weight" for name in "qkv" for side in "AB"}
    torch.testing.assert_close(delta(made.tensors), delta(whole()))
    assert {layer.alpha for layer in made.layers} == {3.0}
    assert "3 layers under the names of diffusers." in made.describe("diffusers")


def test_names_that_comfyui_does_not_read_are_said():
    made = run(whole(), "comfyui", known=lambda name: "comfy" in name)
    assert made.unread == ["diffusion_model.a.qkv"] and "does not read 1 name" in made.describe("comfyui")
    assert made.tensors["diffusion_model.a.qkv.alpha"] == 1.5


def test_other_kinds_become_plain_with_the_error_said():
    full = {"lora_unet_a_qkv.diff": draw(ROWS, COLUMNS)}
    kept = run(full, "comfyui")
    assert kept.tensors.keys() == {"diffusion_model.a.qkv.diff"} and not kept.kept
    with pytest.raises(ValueError, match="full difference, which files of diffusers cannot hold"):
        run(full, "diffusers")
    sigma = torch.linalg.svdvals(full["lora_unet_a_qkv.diff"])
    made = run(full, "diffusers", rank=2)
    assert made.kept["lora_unet_a_qkv"] == pytest.approx(float(sigma[:2].norm() / sigma.norm()), rel=1e-5)
    error = float((delta(full) - delta(made.tensors)).norm() / delta(full).norm())
    assert f"{error:.2%} of the change" in made.describe("diffusers")
    torch.testing.assert_close(delta(run(full, "kohya", rank=5).tensors), delta(full), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "program", "said"),
    [
        (whole("lora_unet_b"), "kohya", r"1 of 1 layers of x have no place in the model \(lora_unet_b\)"),
        ({**whole(), **part("q", 1)}, "kohya", "changes the same layer twice"),
        ({**whole(), "lora_unet_a_qkv.diff_b": draw(ROWS)}, "diffusers", "changes a bias"),
        ({"lora_unet_a_qkv.diff_b": draw(ROWS)}, "diffusers", "change of a norm or bias"),
    ],
)
def test_what_cannot_be_said_is_refused(tensors, program, said):
    with pytest.raises(ValueError, match=said):
        run(tensors, program)
