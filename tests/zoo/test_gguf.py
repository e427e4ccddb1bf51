"""MODELs in GGUF are trained as they draw: by what their layers decode, and by how their patcher patches them."""

import comfy.model_management
import comfy.sd
import pytest
import torch
from zoo import odd
from zoo.again import again
from zoo.gguf import Codes, coded, coded_model
from zoo.linked import linked, live_of
from zoo.test_train import drawn_with, pictures, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_unlisted import link, notes_of  # noqa: F401 (link is a fixture)

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.filed import _put
from lora_atelier.nodes.comfyui.connected.frozen import FrozenLayer
from lora_atelier.nodes.comfyui.connected.identity import _weights
from lora_atelier.nodes.comfyui.connected.names import names_of
from lora_atelier.trainer_core.networks.layers.dora import frozen_weight

LAYERS = ("blocks.1.mlp", "read")  # in codes, and in float16


class Convolutions(odd.Rows):
    """Blocks with a convolution among their layers."""

    def make(self, ops):
        part = super().make(ops)
        part.conv = ops.Conv2d(odd.WIDTH, odd.WIDTH, 1)
        return part

    def step(self, number, block, tokens, timesteps):
        tokens = block(tokens)
        return tokens + block.conv(tokens.mT[..., None])[..., 0].mT


def held(patcher):
    """Copy all that a MODEL of codes holds, and what is on its codes."""
    parameters = dict(patcher.model.named_parameters())
    numbers = {name: torch.Tensor.clone(each.as_subclass(torch.Tensor)) for name, each in parameters.items()}
    wired = {name: (type(each), vars(each).copy()) for name, each in parameters.items()}
    kept = {key: [each[:3] for each in some] for key, some in patcher.patches.items()}, set(patcher.backup)
    return numbers, (wired, kept, [type(each) for each in patcher.model.modules()])


def linked_codes(link, network, kind, beneath=False):  # noqa: F811
    """Link a loaded MODEL of codes, and one of the same numbers; beneath: with a LoRA on both."""
    patchers = [with_lora(each) if beneath else each for each in coded_model(network, kind)]
    link(network)
    comfy.model_management.load_models_gpu(patchers[:1])
    return [linked("unlisted", each) for each in patchers]


def with_lora(patcher):
    """Put a LoRA on a MODEL, on codes and on float16."""
    draws, tensors = torch.Generator().manual_seed(7), {}
    for path in LAYERS:
        layer = patcher.model.diffusion_model.get_submodule(path)
        name = f"lora_unet_{path.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, layer.in_features, generator=draws) / 5
        tensors[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 2, generator=draws) / 5
    found, _ = comfy.sd.load_lora_for_models(patcher, None, tensors, 1.0, 0.0)
    assert len(found.patches) == 2
    return found


@pytest.mark.parametrize(("kind", "beneath"), [("Q8_0", True), *again(("Q4_0", False), ("BF16", True), ("Q4_0", True))])
def test_it_is_trained_as_its_file_draws_and_stays_as_it_is(kind, beneath, link, pictures, tmp_path):  # noqa: F811
    base = linked_codes(link, odd.Rows, kind, beneath)[0]
    patcher = live_of(base).model
    before = held(patcher)
    result, said = notes_of(sampled(base, pictures), tmp_path)
    comfy.model_management.load_models_gpu([patcher])
    after = held(patcher)
    assert before[1] == after[1] and all(torch.equal(each, after[0][name]) for name, each in before[0].items())
    assert "leaves" not in said and "differ" not in said
    assert len({name.partition(".")[0] for name in result.tensors}) == 16
    drawn, bare = (drawn_with(live_of(base), tensors) for tensors in (result.tensors, {}))
    assert (result.samples - drawn).abs().max() <= 1.5 / 255 < (result.samples - bare).abs().max()


def test_all_its_layers_are_trained_as_those_of_the_same_numbers(link, pictures, tmp_path):  # noqa: F811
    """Convolutions too, and layers in float16, in which a file's change is rounded where it is merged."""
    base, plain = linked_codes(link, Convolutions, "Q8_0")
    config = sampled(base, pictures)
    result, said = notes_of(config.replace(lora=config.lora.replace(preset="full")), tmp_path)
    assert "leaves" not in said
    assert len({name.partition(".")[0] for name in result.tensors}) == 23
    assert (result.samples - drawn_with(live_of(plain), result.tensors)).abs().max() <= 1.5 / 255


@pytest.mark.parametrize("beneath", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_gradients_are_those_of_the_numbers_that_the_layers_decode(kind, beneath):
    """Of layers in codes, float16 and float32, with and without a LoRA on them: against central differences."""
    patcher, plain = coded_model(Convolutions, kind)
    if beneath:
        patcher, plain = with_lora(patcher), with_lora(plain)
    comfy.model_management.load_models_gpu([patcher, plain])
    draws = torch.Generator().manual_seed(1)
    with gradients.session(patcher):
        for path in (*LAYERS, "enter", "blocks.1.conv"):
            layer, wanted = (each.model.diffusion_model.get_submodule(path) for each in (patcher, plain))
            assert isinstance(layer, FrozenLayer) and isinstance(layer.weight, Codes)
            torch.testing.assert_close(
                frozen_weight(layer, torch.float32), wanted.weight.detach(), rtol=1e-3, atol=1e-3
            )
            shape = (2, odd.WIDTH, 3, 1) if "conv" in path else (2, 3, layer.in_features)
            x, along = (torch.randn(shape, generator=draws) for _ in range(2))
            (gradient,) = torch.autograd.grad(layer(x.requires_grad_()).sin().sum(), x)
            with torch.no_grad():
                step = 1e-2
                ends = [layer(x + sign * step * along).double().sin().sum() for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs((gradient * along).sum() - slope) < 1e-3 * (gradient.norm() * along.norm())


def test_codes_have_names_in_files_and_an_identity_by_their_bytes():
    (one, plain), (same, _), (other, _) = (coded_model(odd.Rows, kind) for kind in ("Q8_0", "Q8_0", "Q4_0"))
    assert names_of(one, None).weights.keys() == names_of(plain, None).weights.keys()
    assert _weights(one) == _weights(same) != _weights(other)


@pytest.mark.parametrize("path", LAYERS)
def test_weights_that_are_rounded_otherwise_are_put_by_the_patcher_too_for_a_moment(path):
    patcher = with_lora(coded_model(odd.Rows, "Q8_0")[0])
    comfy.model_management.load_models_gpu([patcher])
    layer, key = patcher.model.diffusion_model.get_submodule(path), f"diffusion_model.{path}.weight"
    own, loaded, before = layer.weight, frozen_weight(layer, torch.float32), held(patcher)
    with _put(patcher.clone(), layer, "weight", key):
        same = frozen_weight(layer, torch.float32)
    with _put(patcher.clone(), layer, "weight", key, otherwise=True):
        other = frozen_weight(layer, torch.float32)
    assert layer.weight is own and before[1] == held(patcher)[1]
    assert torch.equal(same, loaded) and (coded(own) is (path != "read"))
    eps = torch.finfo(torch.float32 if coded(own) else torch.float16).eps
    assert 0 < (other - loaded).abs().max() <= eps * loaded.abs().max() * 2
