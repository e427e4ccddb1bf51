"""Files that address parts of a fused layer: placed, checked, joined to be continued, or left to ComfyUI beneath."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_atelier.trainer_core.config import BeneathConfig, LoraConfig
from lora_atelier.trainer_core.lora_files.continued import layer_weights
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.match import layers_by_name, match_layers, whole_layer
from lora_atelier.trainer_core.lora_files.merge import comfy_tensors, merge_beneath
from lora_atelier.trainer_core.lora_files.read import load_lora, outline_lora
from lora_atelier.trainer_core.models import Layer, Part
from lora_atelier.trainer_core.models.base import Slice
from lora_atelier.trainer_core.networks import Network
from lora_atelier.trainer_core.networks.choose import trained_layer_of

OUTPUTS, INPUTS = 12, 5
PLACES = {"q": (0, 4), "k": (4, 4), "v": (8, 4), "wide": (8, 8), "turned": (0, 12)}


class Base(SimpleNamespace):
    """A hosted model of one fused layer `qkv`, which files may also address as q, k and v."""

    def __init__(self):
        slices = {
            f"a_{name}": Slice(comfy=f"a.{name}", start=start, length=length, swapped=name == "turned")
            for name, (start, length) in PLACES.items()
        }
        layer = Layer(
            name="lora_unet_a_qkv",
            path="a.qkv",
            module=nn.Linear(INPUTS, OUTPUTS),
            part="lora_unet",
            block="",
            trainable=True,
            presets=frozenset({"full"}),
            comfy="diffusion_model.a.qkv",
            aliases=("lora_unet_a_qkv", "diffusion_model_a_qkv"),
            slices=slices,
        )
        parts = (Part(prefix="lora_unet", title="diffusion model"),)
        super().__init__(name="tiny", title="Tiny", parts=parts, listed=lambda: [layer], beneath=[])
        self.layers = self.host = self

    def further_names(self):
        return {}

    def made_for(self, *_):
        return ""

    def put_beneath(self, tensors, strength, *, training_only):
        self.beneath.append((tensors, strength))


@pytest.fixture
def base():
    torch.manual_seed(0)
    return Base()


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(name, rows, rank, alpha=None, seed=0):
    """Build the tensors of one layer in a file."""
    tensors = {
        f"{name}.lora_down.weight": draw(seed, rank, INPUTS),
        f"{name}.lora_up.weight": draw(seed + 1, rows, rank),
    }
    return tensors | ({} if alpha is None else {f"{name}.alpha": torch.tensor(float(alpha))})


def found_in(tensors, base, path):
    save_file(tensors, path)
    return match_layers(load_lora(path), base, layers_by_name(base))


def own_delta(tensors, name):
    up, down = tensors[f"{name}.lora_up.weight"], tensors[f"{name}.lora_down.weight"]
    return float(tensors.get(f"{name}.alpha", torch.tensor(len(down)))) / len(down) * up @ down


@pytest.mark.parametrize("alphas", [(2, 3), (2, 9), (None, None), (None, 1), (-2, 1)])
def test_slices_join_to_the_sum_of_their_changes(base, tmp_path, alphas):
    tensors = lora("a.q", 4, 2, alphas[0]) | lora("a.v", 4, 3, alphas[1], seed=5)
    ((name, pieces),) = found_in(tensors, base, tmp_path / "a.safetensors").items()
    joined = whole_layer(pieces, OUTPUTS)
    wanted = torch.cat([own_delta(tensors, "a.q"), torch.zeros(4, INPUTS), own_delta(tensors, "a.v")])
    assert name == "lora_unet_a_qkv" and joined.kind == "LoRA"
    assert len(joined.tensors["down"]) == 5
    assert torch.allclose(delta_weight(joined), wanted, atol=1e-6)
    weights = layer_weights(load_lora(tmp_path / "a.safetensors"), base, layers_by_name(base))
    chosen = [trained_layer_of(base.layers.listed()[0], 5, weights[name].alpha)]
    layer = Network(chosen, LoraConfig(), 0, weights).layers[name]
    assert torch.allclose(layer.delta_weight(), wanted, atol=1e-6)


def test_equal_scales_stay_the_scale(base, tmp_path):
    """So that a continued file learns as fast as before."""
    tensors = lora("a.q", 4, 2, 1) | lora("a.k", 4, 4, 2, seed=5)
    ((_, pieces),) = found_in(tensors, base, tmp_path / "a.safetensors").items()
    joined = whole_layer(pieces, OUTPUTS)
    assert (joined.alpha, len(joined.tensors["down"])) == (3, 6)
    assert torch.equal(joined.tensors["up"][:4, :2], tensors["a.q.lora_up.weight"])


def test_halves_that_a_file_has_the_other_way_round_are_turned(base, tmp_path):
    tensors = lora("a.turned", OUTPUTS, 2)
    ((_, pieces),) = found_in(tensors, base, tmp_path / "a.safetensors").items()
    delta = own_delta(tensors, "a.turned")
    assert torch.equal(delta_weight(whole_layer(pieces, OUTPUTS)), torch.cat([delta[6:], delta[:6]]))


def test_an_outline_tells_rank_and_places_too(base, tmp_path):
    save_file(lora("a.q", 4, 2, 1) | lora("a.k", 4, 4, 2), tmp_path / "a.safetensors")
    (weights,) = layer_weights(outline_lora(tmp_path / "a.safetensors"), base, layers_by_name(base)).values()
    assert weights.rank == 6 and all(tensor.is_meta for tensor in weights.tensors.values())


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (lora("a.q", 5, 2), "1 of 1 layers of a.safetensors have another shape than in tiny"),
        (lora("a.wide", 8, 2), "have another shape than in tiny"),  # beyond the last output
        (lora("a.q", 4, 2) | {"a.q.diff_b": torch.zeros(4)}, "have another shape than in tiny"),
        (lora("a.q", 4, 2) | lora("a.turned", 12, 2), "has the layer lora_unet_a_qkv twice, as a.q and as a.turned"),
        (lora("a.k", 4, 2) | lora("a.turned", 12, 2), "twice, as a.k and as a.turned"),
        (lora("a.q", 4, 2) | lora("lora_unet_a_qkv", 12, 2), "twice, as a.q and as lora_unet_a_qkv"),
        (lora("a.q", 4, 2) | lora("text_encoder.b", 4, 2), "also changes text encoders, which tiny is trained without"),
        (lora("text_encoder.b", 4, 2), "1 of 1 layers of a.safetensors have no place in tiny"),
    ],
)
def test_pieces_without_a_place_are_refused(base, tmp_path, tensors, sentence):
    with pytest.raises(ValueError, match=sentence):
        found_in(tensors, base, tmp_path / "a.safetensors")


def test_other_kinds_of_slices_are_not_continued_but_go_beneath(base, tmp_path):
    tensors = {"a.q.lokr_w1": draw(1, 2, 1), "a.q.lokr_w2": draw(2, 2, 5)}
    ((_, pieces),) = found_in(tensors, base, tmp_path / "a.safetensors").items()
    with pytest.raises(
        ValueError, match=r"a\.q is a LoKr of a part of a layer, which cannot be continued; set use of Ex"
    ):
        whole_layer(pieces, OUTPUTS)
    assert comfy_tensors(tmp_path / "a.safetensors", base).keys() == tensors.keys()


def test_a_hosted_model_gets_loras_by_its_own_names_and_keeps_its_weights(base, tmp_path):
    before = base.layers.listed()[0].module.weight.detach().clone()
    tensors = lora("lora_unet_a_qkv", 12, 2, 1)
    save_file(tensors, tmp_path / "a.safetensors")
    merge_beneath(base, (BeneathConfig(path=str(tmp_path / "a.safetensors"), strength=0.5),))
    ((given, strength),) = base.beneath
    assert strength == 0.5
    assert given.keys() == {f"diffusion_model.a.qkv.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert torch.equal(given["diffusion_model.a.qkv.lora_up.weight"], tensors["lora_unet_a_qkv.lora_up.weight"])
    assert torch.equal(base.layers.listed()[0].module.weight, before)
    assert load_file(tmp_path / "a.safetensors").keys() == tensors.keys()
