"""LoRA layers: identity, closed form, peft as the reference, names and shapes that other trainers write."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from tiny_models import fill, network_on, tiny_text_encoder, tiny_unet
from torch.utils.checkpoint import checkpoint as recompute

from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.networks.layers.lora import LoraLayer

SHAPES = json.loads((Path(__file__).parents[2] / "data" / "lora_shapes.json").read_text(encoding="utf-8"))


def unet_inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    return (torch.randn(2, 4, 8, 8, generator=g, dtype=dtype), torch.tensor([10, 700])), {
        "encoder_hidden_states": torch.randn(2, 77, 64, generator=g, dtype=dtype)
    }


def small_text():
    return {"lora_te": (tiny_text_encoder(), 2)}


@pytest.fixture(scope="module")
def sd15():
    with torch.device("meta"):
        return UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)


@pytest.mark.parametrize("preset", ["attn-only", "attn-mlp", "full"])
def test_a_fresh_network_changes_nothing_bitwise(preset):
    unet = tiny_unet()
    args, kwargs = unet_inputs()
    before = unet(*args, **kwargs).sample
    network = network_on(unet, LoraConfig(rank=4, preset=preset))
    with network.attached():
        assert torch.equal(unet(*args, **kwargs).sample, before)
        fill(network)
        assert not torch.allclose(unet(*args, **kwargs).sample, before, atol=1e-3)
    assert torch.equal(unet(*args, **kwargs).sample, before)
    assert not any("forward" in module.__dict__ for module in unet.modules())


def test_it_computes_what_adding_delta_weights_computes():
    unet = tiny_unet().double()
    args, kwargs = unet_inputs(torch.float64)
    network = network_on(unet, LoraConfig(rank=4, alpha=2, preset="full", conv_rank=3, conv_alpha=6)).double()
    fill(network)
    with network.attached():
        live = unet(*args, **kwargs).sample
    with torch.no_grad():
        for name, module in network._frozen.items():
            layer = network.layers[name]
            delta = layer.scale * layer.up.flatten(1) @ layer.down.flatten(1)
            assert torch.allclose(layer.delta_weight().double(), delta.view(module.weight.shape), atol=1e-6)
            module.weight += delta.view(module.weight.shape)
        merged = unet(*args, **kwargs).sample
    assert torch.allclose(live, merged, rtol=1e-9, atol=1e-11)


def test_forward_and_gradients_equal_pefts():
    import peft  # here, as it takes each process seconds to import

    args, kwargs = unet_inputs(torch.float64)
    unet, reference = tiny_unet().double(), tiny_unet().double()
    network = network_on(unet, LoraConfig(rank=4, alpha=8, preset="full")).double()
    fill(network)
    names = [n for n, m in reference.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    wrapped = peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=names), reference)
    pairs = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            ours = network.layers["lora_unet_" + name.replace(".", "_")]
            module.lora_A["default"].weight.data = ours.down.data.clone()
            module.lora_B["default"].weight.data = ours.up.data.clone()
            pairs[name] = ours, module
    assert len(pairs) == len(network.layers) == len(names)
    with network.attached():
        mine = unet(*args, **kwargs).sample
        mine.square().mean().backward()
    theirs = wrapped(*args, **kwargs).sample
    theirs.square().mean().backward()
    assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    for name, (ours, module) in pairs.items():
        for mine_p, theirs_p in (
            (ours.down, module.lora_A["default"].weight),
            (ours.up, module.lora_B["default"].weight),
        ):
            assert torch.allclose(mine_p.grad, theirs_p.grad, rtol=1e-8, atol=1e-13), name


LAYERS = {
    "linear": (lambda: torch.nn.Linear(6, 5), (2, 3, 6)),
    "1x1": (lambda: torch.nn.Conv2d(6, 5, 1), (2, 6, 4, 4)),
    "3x3": (lambda: torch.nn.Conv2d(6, 5, 3, padding=1), (2, 6, 4, 4)),
    "3x3 stride 2": (lambda: torch.nn.Conv2d(6, 5, 3, stride=2, padding=1), (2, 6, 5, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_of_each_kind_of_layer(kind, checkpointed, contiguous):
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    base = build().double().requires_grad_(False)
    layer = LoraLayer(base, 2, 3.0, name="x", seed=0).double()
    torch.nn.init.normal_(layer.up)
    x = torch.randn(shape, dtype=torch.float64)
    if not contiguous:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_()

    def plain(x, down, up):
        if base.weight.ndim == 2:
            return base(x) + 1.5 * (x @ down.t() @ up.t())
        hidden = torch.nn.functional.conv2d(x, down, None, base.stride, base.padding)
        return base(x) + 1.5 * torch.nn.functional.conv2d(hidden, up)

    def live(x, down, up):
        return torch.func.functional_call(layer, {"down": down, "up": up}, (x, base(x)))

    compute = (lambda *a: recompute(live, *a, use_reentrant=False)) if checkpointed else live
    weight = torch.randn_like(plain(x, layer.down, layer.up))
    wanted = torch.autograd.grad((plain(x, layer.down, layer.up) * weight).sum(), [x, layer.down, layer.up])
    got = torch.autograd.grad((compute(x, layer.down, layer.up) * weight).sum(), [x, layer.down, layer.up])
    for a, b in zip(wanted, got, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_stay_float32_on_a_half_precision_base(dtype):
    base = torch.nn.Linear(16, 8).to(dtype).requires_grad_(False)
    layer = LoraLayer(base, 2, 2.0, name="x", seed=0)
    x = torch.randn(4, 16, dtype=dtype, requires_grad=True)
    out = layer(x, base(x))
    out.float().sum().backward()
    assert out.dtype == dtype and layer.down.dtype == layer.up.dtype == torch.float32
    assert layer.up.grad is not None and layer.up.grad.dtype == torch.float32 and x.grad is not None


def test_initial_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    first = network_on(tiny_unet(), LoraConfig(rank=4), seed=3, texts=small_text())
    torch.manual_seed(2)
    again = network_on(tiny_unet(), LoraConfig(rank=4), seed=3)
    other = network_on(tiny_unet(), LoraConfig(rank=4), seed=4)
    for name, layer in again.layers.items():
        assert torch.equal(layer.down, first.layers[name].down)
        assert not torch.equal(layer.down, other.layers[name].down)
        bound = 1 / layer.down[0].numel() ** 0.5
        assert layer.down.abs().max() <= bound and not layer.up.any()


def test_alpha_is_a_constant():
    network = network_on(tiny_unet(), LoraConfig(rank=8, alpha=4))
    assert {name.rpartition(".")[2] for name, _ in network.named_parameters()} == {"down", "up"}
    assert {layer.scale for layer in network.layers.values()} == {0.5}


@pytest.mark.parametrize(("preset", "count", "width"), [("attn-only", 128, 199_296), ("attn-mlp", 192, 423_936)])
def test_presets_select_sd15s_known_layers(sd15, preset, count, width):
    network = network_on(sd15, LoraConfig(rank=1, preset=preset))
    assert len(network.layers) == count
    assert sum(p.numel() for p in network.parameters()) == width


def test_names_and_shapes_are_those_other_trainers_write(sd15):
    tensors = network_on(sd15, LoraConfig(rank=8, preset="full")).tensors()
    ours = {
        name.removesuffix(".lora_down.weight"): [
            list(t.shape),
            list(tensors[name.replace(".lora_down.", ".lora_up.")].shape),
        ]
        for name, t in tensors.items()
        if name.endswith(".lora_down.weight")
    }
    assert ours == SHAPES["onetrainer_full"]
    kohya = SHAPES["sd_scripts_full_conv8"]
    assert {name: ours[name] for name in kohya} == kohya
    mlp = network_on(sd15, LoraConfig(rank=8, preset="attn-mlp"))
    assert set(mlp.layers) == set(SHAPES["sd_scripts_default"])
    assert all(tensors[f"{name}.alpha"].shape == () for name in ours)


def test_text_encoder_names_are_kohyas():
    network = network_on(None, LoraConfig(rank=2), texts=small_text())
    assert len(network.layers) == 12
    assert "lora_te_text_model_encoder_layers_0_self_attn_q_proj" in network.layers
    assert "lora_te_text_model_encoder_layers_1_mlp_fc2" in network.layers


def test_groups_have_their_own_rates():
    network = network_on(tiny_unet(), LoraConfig(rank=2), texts=small_text())
    unet, text = network.groups({"lora_unet": 1e-3, "lora_te": 1e-4})
    assert (unet["lr"], text["lr"]) == (1e-3, 1e-4)
    assert len(unet["params"]) + len(text["params"]) == len(list(network.parameters()))
    assert len(network.groups({"lora_unet": 1e-3, "lora_te": 0})) == 1


def test_groups_split_by_convolution_factor_plus_and_decay():
    network = network_on(tiny_unet(), LoraConfig(rank=2, preset="full"), texts=small_text())
    layers = dict(network.layers.items())
    large = {name for name, layer in layers.items() if layer.down.ndim == 4 and layer.down.shape[-1] > 1}
    slow, still, lonely = "lora_unet_conv_in", "lora_unet_conv_out", "lora_te_text_model_encoder_layers_0_mlp_fc1"
    layers[slow].lr_factor, layers[still].lr_factor = 0.5, 0.0
    layers[lonely].no_decay = ("up",)
    groups = network.groups({"lora_unet": 1e-3, "lora_te": 1e-4}, conv_rate=2e-3, plus_ratio=4.0)
    found = {id(p): group for group in groups for p in group["params"]}
    for name, layer in layers.items():
        base = 1e-4 if name.startswith("lora_te_") else 2e-3 if name in large else 1e-3
        for key, parameter in layer.named_parameters():
            if name == still:
                assert id(parameter) not in found and not parameter.requires_grad
                continue
            group = found[id(parameter)]
            assert group["lr"] == group["base_lr"] == layer.lr_factor * base * (4 if key == "up" else 1)
            assert group["decays"] == ((name, key) != (lonely, "up"))
            assert name.startswith(group["model"])
            conv = "_conv" if name in large and name != slow else ""  # slow ones happen to have the rate of the others
            assert group["name"] == group["model"] + conv + ("_plus" if key == "up" else "")
    assert len({(g["lr"], g["decays"], g["model"]) for g in groups}) == len(groups)
    assert still in large and slow in large and any(name not in large for name in layers if "unet" in name)
    layers[slow].register_parameter("gain", torch.nn.Parameter(torch.ones(())))
    groups = network.groups({"lora_unet": 1e-3})
    assert [g["decays"] for g in groups if any(p is layers[slow].gain for p in g["params"])] == [False]
    assert all(g["lr"] in (1e-3, 5e-4) for g in groups)
