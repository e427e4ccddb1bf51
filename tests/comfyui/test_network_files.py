"""What ComfyUI makes of the files of every network: the weights that were trained."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import network_on
from toy_layers import CASES, NAME, OPTIONS, TABLE, Toy, attached, config_of, file_parts, move, one_layer

from lora_atelier.trainer_core.lora_files.bake import bake_network
from lora_atelier.trainer_core.lora_files.formats import FileLayer, fits, group_tensors, layer_kind, merged_weight
from lora_atelier.trainer_core.lora_files.write import delta_norms, save_lora
from lora_atelier.trainer_core.networks.layers import algorithm_of, dora
from lora_atelier.trainer_core.networks.layers.lokr import LokrLayer

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_comfyui_makes_the_same_weights_of_a_lora_with_any_options(comfy_modules, tmp_path, options):
    network = network_on(Toy(), config_of(**options))
    move(network)
    path = tmp_path / "a.safetensors"
    save_lora(path, network.tensors(), {}, "float32")
    stored = load_file(path)
    names = {name: f"{name}.weight" for name in network._frozen}
    patches = comfy_modules.lora.load_lora(stored, names)
    assert len(patches) == len(names)
    grouped, unknown = group_tensors(stored)
    assert not unknown
    for name, module in network._frozen.items():
        weight = module.weight.detach().clone()
        mine = network.layers[name].changed_weight(weight).detach()
        theirs = comfy_modules.lora.calculate_weight(
            [(1.0, patches[names[name]], 1.0, None, None)], weight.clone(), name
        )
        tensors = {part: stored[key] for part, key in grouped[name].items()}
        alpha = float(tensors.pop("alpha"))
        kind = layer_kind(grouped[name])
        merged = merged_weight(weight, FileLayer(source=name, kind=kind, tensors=tensors, alpha=alpha), 1.0)
        if options.get("dora"):  # it adds the epsilon of its own dtype, in float16 ours
            norm = dora.column_norms(weight + network.layers[name].delta_weight())
            factor = (norm + dora.EPS) / (norm + EPS)
            mine = mine * factor.view(-1, *(1,) * (weight.ndim - 2))
        for other in (theirs, merged):
            assert (other - mine).abs().max() <= 1e-5 * max(1.0, float(mine.abs().max())), name
        delta = network.layers[name].delta_weight()
        assert delta_norms(stored)[name] == pytest.approx(float(delta.norm()), rel=1e-4)


def test_in_float16_comfyui_computes_the_trained_dora(comfy_modules):
    base, made, _ = one_layer("3x3 stride 2", torch.float32, dora=True)
    move(made, 0.3)
    stored = {f"x.{k}": t for k, t in (made.tensors() | made.magnitude_tensors()).items()}
    patch = comfy_modules.lora.load_lora(stored, {"x": "x.weight"})["x.weight"]
    weight = comfy_modules.lora.calculate_weight([(1.0, patch, 1.0, None, None)], base.weight.half(), "x")
    assert (weight.float() - made.changed_weight(base.weight)).abs().max() < 2e-3


def test_what_is_baked_is_the_nearest_plain_lora_to_comfyui(comfy_modules):
    network = network_on(Toy(), config_of(dora=True, tucker=True))
    move(network, 0.02)
    tensors, sentence = bake_network(network, 0)
    assert {k.partition(".")[2] for k in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    missing = whole = 0.0
    patches = comfy_modules.lora.load_lora(tensors, {name: name for name in network._frozen})
    for name, change, rank in network.changes():
        theirs = comfy_modules.lora.calculate_weight(
            [(1.0, patches[name], 1.0, None, None)], torch.zeros_like(change), name
        )
        sigma = torch.linalg.svdvals(change.flatten(1))
        assert torch.allclose((change - theirs).norm(), sigma[rank:].norm(), rtol=1e-3, atol=1e-6)
        missing, whole = missing + float(sigma[rank:].square().sum()), whole + float(sigma.square().sum())
    assert f"lacks {(missing / whole) ** 0.5:.1%} of the trained change" in sentence
    assert "0.0%" not in sentence


@pytest.mark.parametrize(("case", "base"), TABLE)
def test_comfyui_makes_the_same_weights_of_every_other_algorithm(comfy_modules, caplog, case, base):
    module, layer, _ = attached(case, base)
    weight, bias = module.weight.clone(), module.bias.clone()
    tensors = {f"{NAME}.{k}": t.clone().contiguous() for k, t in (layer.tensors() | layer.magnitude_tensors()).items()}
    wanted = layer.changed_weight(weight)
    if "ia3" in case or "dora" in case:  # ComfyUI adds the epsilon of the dtype it patches in, which is float32 here
        kept = 0 if layer.by_output else getattr(layer, "axis", 1)
        axes = [axis for axis in range(weight.ndim) if axis != kept]
        changed = weight if "ia3" in case or layer.by_output else weight + layer.delta_weight()
        norm = torch.linalg.vector_norm(changed, dim=axes, keepdim=True)
        wanted = wanted * (norm + 2**-10) / (norm + EPS)

    def calculate(strength):
        patches = comfy_modules.lora.load_lora(dict(tensors), {NAME: "w.weight"})
        found = {"w.weight": weight, "w.bias": bias}
        return {
            key: comfy_modules.lora.calculate_weight([(strength, patch, 1.0, None, None)], found[key].clone(), key)
            for key, patch in patches.items()
        }

    made = calculate(1.0)
    assert not caplog.records, "ComfyUI did not understand the file"
    delta = wanted - weight
    assert (made["w.weight"] - wanted).norm() <= 1e-5 * delta.norm() and delta.norm() > 0.05 * weight.norm()
    if hasattr(layer, "diff_b"):
        assert torch.equal(made["w.bias"], bias + layer.diff_b)

    parts, alpha = file_parts(layer)
    kind = layer_kind(parts)
    read = FileLayer(source=NAME, kind=kind, tensors=parts, alpha=alpha)
    assert fits(read, weight.shape, bias.shape) and not fits(read, torch.Size((7, *weight.shape[1:])), bias.shape)
    for strength in (1.0, 0.6, -0.7):
        merged, theirs = merged_weight(weight, read, strength), calculate(strength)["w.weight"]
        assert (merged - theirs).norm() <= 1e-5 * (theirs - weight).norm(), strength

    # What is continued has the file's form, whatever the settings say.
    _, other, _ = attached(case, base, filled=False)
    assert base == "norm" or "ia3" in case or algorithm_of(parts) == CASES[case]["algorithm"]
    if "dora" in case:
        with pytest.raises(ValueError, match="a layer of dora_scale cannot be continued"):
            other.load(parts, alpha)
        return
    other.load(parts, alpha)
    assert torch.allclose(other.changed_weight(weight), layer.changed_weight(weight), rtol=1e-5, atol=1e-5)
    if hasattr(layer, "rank") and not isinstance(layer, LokrLayer):
        assert (other.rank, other.alpha) == (layer.rank, layer.alpha)
