"""Frozen layers in every form of weights: the gradients of the numbers they hold, and nothing of them kept."""

import json
import math

import comfy.ops
import pytest
import torch
from torch import nn
from zoo.again import again
from zoo.trial import Trial, apart
from zoo.zoo import ZOO, build, fill, patcher_of, settings

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.frozen import FrozenLayer, is_product
from lora_atelier.trainer_core.memory import copied_before_written
from lora_atelier.trainer_core.networks.layers.dora import frozen_weight
from lora_atelier.trainer_core.networks.layers.lora import LoraLayer

FLOAT8 = torch.float8_e4m3fn
CHOSEN = ("flux_dev", "z_image", "wan21_t2v")
NO_LAYERS = (".gate",)  # HiDream's routers use a small matrix of their own


def with_weights(name, state):
    """Build a model in float32 that holds these numbers."""
    model, patcher = build(name)
    model.load_state_dict({key: value.float() if value.is_floating_point() else value for key, value in state.items()})
    return model, patcher


def float8(name):
    """Build a model of float8 weights that are cast at use."""
    model, patcher = build(name, dtype=FLOAT8, compute=torch.float32)
    return model, patcher, with_weights(name, model.state_dict())


def bfloat16(name):
    """Build a model of bfloat16 weights that are cast at use."""
    model, patcher = build(name, dtype=torch.bfloat16, compute=torch.float32)
    return model, patcher, with_weights(name, model.state_dict())


def scaled(name, *, exact):
    """Build a model whose linear layers are scaled float8, as ComfyUI loads such files."""
    base = build(name)[0]
    linear = {path for path, module in base.diffusion_model.named_modules() if isinstance(module, nn.Linear)}
    state, numbers = {}, dict(base.diffusion_model.state_dict())
    for key, value in base.diffusion_model.state_dict().items():
        path, _, kind = key.rpartition(".")
        if kind != "weight" or path not in linear:
            state[key] = value
            continue
        scale = (value.abs().max() / 448).float()
        state[key] = (value / scale).to(FLOAT8)
        state[f"{path}.weight_scale"] = scale
        quant = json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": exact}).encode()
        state[f"{path}.comfy_quant"] = torch.tensor(list(quant), dtype=torch.uint8)
        numbers[key] = state[key].float() * scale
    config = settings(name, torch.float32, torch.float32)
    config.quant_config = {"mixed_ops": True}
    config.custom_operations = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32)
    with ZOO[name].building():
        model = config.get_model({}, "", device="cpu")
    fill(model, 0)  # what is no weight in files
    model.diffusion_model.load_state_dict(state, strict=False)
    reference = build(name)
    reference[0].diffusion_model.load_state_dict(numbers)
    return model, patcher_of(model), reference


class Packed(comfy.ops.manual_cast):
    """Operations of a custom node: weights in eighths of a byte's range, unpacked at use by their own method."""

    class Linear(comfy.ops.manual_cast.Linear):
        def forward_comfy_cast_weights(self, input):
            weight = self.weight.to(input.dtype) * self.step
            bias = None if self.bias is None else self.bias.to(input)
            return nn.functional.linear(input, weight, bias)


def packed(name):
    """Build a model whose linear layers are of a custom node's class."""
    config = settings(name)
    config.custom_operations = Packed
    with ZOO[name].building():
        model = config.get_model({}, "", device="cpu")
    fill(model, 0)
    reference = build(name)
    for path, module in model.named_modules():
        if isinstance(module, Packed.Linear):
            module.step = module.weight.detach().abs().max() / 127
            stored = (module.weight.detach() / module.step).round().to(torch.int8)
            module.weight = nn.Parameter(stored, requires_grad=False)
            reference[0].get_submodule(path).weight.data.copy_(stored.float() * module.step)
    return model, patcher_of(model), reference


def patches_of(model):
    draws = torch.Generator().manual_seed(1)
    weights = {k: v for k, v in model.state_dict().items() if k.startswith("diffusion_model.") and v.ndim > 1}
    chosen = [key for key in weights if key.endswith(".weight")][::2]
    shapes = {key: weights[key].shape for key in chosen}
    return {k: ("diff", (0.3 * torch.randn(s, generator=draws) / s[1:].numel() ** 0.5,)) for k, s in shapes.items()}


def patched(name, *, loaded):
    """Build a MODEL with a LoRA on it, loaded wholly or with weights that are patched at use."""
    model, patcher = build(name)
    reference = build(name)
    patches = patches_of(model)
    for key, (_, (change,)) in patches.items():
        reference[0].get_parameter(key).data.add_(change)
    patcher = patcher.clone()
    patcher.add_patches(patches, 1.0)
    patcher.patch_model(torch.device("cpu"), lowvram_model_memory=0 if loaded == "wholly" else 1)
    assert any(len(getattr(module, "weight_function", ())) for module in model.modules()) is (loaded != "wholly")
    return model, patcher, reference


def trained(built, name, **config):
    trial = Trial(name, built=built, **config)
    with gradients.session(trial.patcher), trial.network.attached():
        with torch.no_grad():
            prediction = trial.predict()
        return prediction, trial.gradients(), trial


FORMS = {
    "bfloat16": bfloat16,
    "float8": float8,
    "scaled float8, exact": lambda name: scaled(name, exact=True),
    "scaled float8, fast": lambda name: scaled(name, exact=False),
    "a custom node's": packed,
    "patched": lambda name: patched(name, loaded="wholly"),
    "patched at use": lambda name: patched(name, loaded="partly"),
}


LIKE_OTHERS = ("bfloat16", "scaled float8, exact", "patched")  # forms that are cast, scaled or loaded as others are
KINDS = [form for form in FORMS if form not in LIKE_OTHERS]
CASES = [("flux_dev", form) for form in KINDS] + [("cascade_b", "patched at use")]  # convolutions of every kind
MORE = [("flux_dev", form) for form in LIKE_OTHERS] + [("cascade_b", "float8")]
MORE += [(name, form) for name in CHOSEN[1:] for form in FORMS]


@pytest.mark.parametrize(("name", "form"), [*CASES, *again(*MORE)])
def test_gradients_are_those_of_the_numbers(name, form):
    model, patcher, reference = FORMS[form](name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    prediction, found, _ = trained((model, patcher), name)
    expected_prediction, expected, _ = trained(reference, name)
    assert (prediction - expected_prediction).abs().max() < 1e-4 * expected_prediction.abs().max()
    assert apart(found, expected) < 1e-4
    after = model.state_dict()
    assert all(torch.equal(value.float(), after[key].float()) for key, value in state.items())


DORA, PISSA = {"dora": True}, {"init": "pissa"}
READING = [(DORA, form) for form in KINDS] + [(PISSA, "scaled float8, fast")]
OTHERS = [(config, form) for config in (DORA, PISSA) for form in FORMS if (config, form) not in READING]


@pytest.mark.parametrize(("config", "form"), [*READING, *again(*OTHERS)], ids=str)
def test_networks_that_read_the_weight_read_the_numbers(config, form):
    model, patcher, reference = FORMS[form]("wan21_t2v")
    prediction, found, trial = trained((model, patcher), "wan21_t2v", **config)
    expected_prediction, expected, other = trained(reference, "wan21_t2v", **config)
    for layer in trial.network.chosen:
        weights = [
            frozen_weight(each.model.diffusion_model.get_submodule(layer.path), torch.float32)
            for each in (trial, other)
        ]
        assert torch.allclose(*weights, atol=1e-5)
    assert (prediction - expected_prediction).abs().max() < 1e-3 * expected_prediction.abs().max()
    assert apart(found, expected) < 1e-3


def test_nothing_of_a_weight_is_kept_for_the_backward_pass(name):
    """Count the tensors that autograd saves, whose values are those of a weight in any precision."""
    if name == "odd_weights":  # torch computes no weight from parts in float8
        return
    dtype = FLOAT8 if name != "zimage_pixel" else torch.bfloat16  # its decoder computes in the dtype of its weights
    trial = Trial(name, built=build(name, dtype=dtype, compute=torch.float32))
    sides = {}
    for path, module in trial.model.diffusion_model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim > 1 and not isinstance(module, nn.Embedding):
            values = weight.float().flatten()
            sides.setdefault(len(values), []).append((path, values.norm().item(), values.sort().values))
    kept, weights = [], {id(p) for p in trial.model.parameters()}

    def note(tensor):
        if id(tensor) in weights:
            return tensor
        if tensor.numel() in sides:
            found = tensor.float().flatten()
            size = found.norm().item()
            for path, norm, values in sides[tensor.numel()]:
                if math.isclose(size, norm, rel_tol=1e-5) and torch.equal(found.sort().values, values):
                    kept.append(path)
        return tensor

    noted = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with gradients.session(trial.patcher), trial.network.attached(), copied_before_written(), noted:
        trial.loss()
    assert [path for path in kept if not path.endswith(NO_LAYERS)] == []


@pytest.mark.parametrize("form", [*KINDS, *again(*LIKE_OTHERS)])
@pytest.mark.parametrize("name", ["flux_dev", *again("wan21_t2v")])
def test_a_pass_keeps_as_many_bytes_as_with_plain_weights(name, form):
    """Copies of cast or patched weights for the backward pass would be many more; custom layers keep their inputs."""
    model, patcher, _ = FORMS[form](name)
    plain = build(name)
    kept = [bytes_kept(built, name) for built in ((model, patcher), plain)]
    weights = sum(p.nbytes for p in plain[0].parameters())
    assert kept[0] <= kept[1] + 0.2 * weights and weights > 0.4 * kept[1]


def bytes_kept(built, name):
    """Count the bytes that autograd saves in a pass, beside the model's own weights."""
    trial, saved = Trial(name, built=built), {}
    weights = {tensor.untyped_storage().data_ptr() for tensor in trial.model.state_dict(keep_vars=True).values()}

    def note(tensor):
        if type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    noted = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with gradients.session(trial.patcher), trial.network.attached(), noted:
        trial.loss()
    return sum(saved.values())


PLAIN = [("cascade_b", {}), ("wan21_t2v", DORA), ("wan21_t2v", {"use_scalar": True})]
PLAINER = [("wan21_t2v", PISSA), *((name, {}) for name in CHOSEN)]


@pytest.mark.parametrize(("name", "config"), [*PLAIN, *again(*PLAINER)], ids=str)
def test_a_lora_added_at_once_has_the_gradients_of_one_added_after(name, config, monkeypatch):
    """Both ways of float32, whose products may come from different libraries, and of float64."""
    added = []
    monkeypatch.setattr(FrozenLayer, "forward_with", counting(FrozenLayer.forward_with, added))
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        at_once, found, trial = trained(build(name, dtype=dtype), name, dtype=dtype, **config)
        linear = [trained for trained in trial.network.chosen if isinstance(trained.module, nn.Linear)]
        assert {id(layer) for layer in added} >= {id(trained.module) for trained in linear}
        added.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LoraLayer, "thin", lambda layer, x: None)
            after, expected, _ = trained(build(name, dtype=dtype), name, dtype=dtype, **config)
        assert not added
        assert (at_once - after).abs().max() < most * after.abs().max()
        assert apart(found, expected) < most


@pytest.mark.parametrize("config", [{"dropout": 0.5}, {"rank_dropout": 0.5}, {"algorithm": "loha"}], ids=str)
def test_only_a_lora_without_dropout_is_added_at_once(config, monkeypatch):
    added = []
    monkeypatch.setattr(FrozenLayer, "forward_with", counting(FrozenLayer.forward_with, added))
    trained(build("wan21_t2v"), "wan21_t2v", **config)
    assert not added


def counting(forward_with, layers):
    """Note the layers that a method is called of."""

    def counted(layer, *args):
        layers.append(layer)
        return forward_with(layer, *args)

    return counted


def test_a_layer_without_gradients_is_named():
    class Opaque(comfy.ops.manual_cast.Linear):
        def forward(self, input):
            return super().forward(input.detach())

    trial = Trial("flux_dev")
    trial.model.diffusion_model.double_blocks[0].img_attn.proj.__class__ = Opaque
    with gradients.session(trial.patcher), trial.network.attached(), pytest.raises(ValueError, match="class Opaque"):
        trial.gradients()


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_an_unknown_convolution_is_tried_along_its_own_axes(convolution):
    """A subclass may be the plain product, or pad its input first, which a LoRA beside it would not."""

    class Plain(convolution):
        def forward(self, x):
            return super().forward(x)

    class Padding(convolution):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1)))

    assert is_product(Plain(3, 4, 3, stride=2, padding=1, dilation=2))
    assert not is_product(Padding(3, 4, 3))
