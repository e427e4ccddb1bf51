"""What a LoRA can be besides plain: Tucker, DoRA, other beginnings, a scalar, dropouts, bounded norms, baked."""

import copy
from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from lycoris.modules.locon import LoConModule
from tiny_models import network_on, tiny_unet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as recompute
from toy_layers import ALL_DROPOUTS, LAYERS, OPTIONS, Toy, config_of, move, one_layer

from lora_atelier.trainer_core.common.subset import Subset, computing
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.memory import Stream, keep_weights
from lora_atelier.trainer_core.memory import recompute as recompute_blocks
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.networks.build import build_layer
from lora_atelier.trainer_core.networks.choose import TrainedLayer
from lora_atelier.trainer_core.networks.layers import dora, layer
from lora_atelier.trainer_core.networks.layers.svd import largest_singular

CPU = torch.device("cpu")


def pictures(dtype=torch.float32):
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5), dtype=dtype)


def unet_loss(unet):
    g = torch.Generator().manual_seed(5)
    latents, words = torch.randn(2, 4, 8, 8, generator=g), torch.randn(2, 7, 64, generator=g)
    return unet(latents, torch.tensor([10, 700]), encoder_hidden_states=words).sample.square().mean()


def through(base, made, x):
    x = made.enter(x)
    return made.leave(made(x, base(x)))


# --- identity and closed form ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_fresh_network_changes_nothing_bitwise_and_a_moved_one_is_its_weights(options):
    toy, x = Toy(), pictures()
    before = toy(x)
    network = network_on(toy, config_of(**options))
    network.set_micro_batch(3)
    with network.attached():
        assert torch.equal(toy(x), before)
        move(network)
        assert not torch.allclose(toy(x), before, atol=1e-3)
    toy, x = toy.double(), pictures(torch.float64)
    network.double().set_micro_batch(None)
    with network.attached():
        live = toy(x)
    for name, module in network._frozen.items():
        module.weight.data = network.layers[name].changed_weight(module.weight).detach()
    assert torch.allclose(live, toy(x), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_noisy_timesteps_have_fewer_ranks(init):
    """T-LoRA: each sample's delta is that of its first ranks, floor((rank - least) (1 - t)) + least of them."""
    toy, x = Toy(), torch.cat([pictures(), pictures()])[:3]
    plain = toy(x)
    network = network_on(toy, config_of(timestep_rank=1, init=init))
    rank = network.layers["lora_unet_down"].rank
    with network.attached():
        move(network)
        whole = toy(x)
        for layer in network.layers.values():
            assert layer.dropouts.timestep_mask(x, rank) is None
        network.set_times(torch.tensor([1.0, 0.5, 0.0]), "another")
        assert torch.equal(toy(x), whole)
        network.set_times(torch.tensor([1.0, 0.5, 0.0]), network.chosen[0].part)
        mask = network.layers["lora_unet_down"].dropouts.timestep_mask(x, rank)
        assert mask.sum(1).tolist() == [1, (rank - 1) // 2 + 1, rank]
        found = toy(x)
        torch.testing.assert_close(found[2], whole[2])
        with computing(Subset(samples=(1,), count=3)):  # as a model that computes its samples one by one
            torch.testing.assert_close(toy(x[1:2])[0], found[1])
        assert not torch.allclose(found[0], whole[0], atol=1e-4)
        if init == "default":  # the first rank alone
            for layer in network.layers.values():
                layer.up.data[:, 1:] = 0
            torch.testing.assert_close(toy(x)[0], found[0])
        network.set_times(None, network.chosen[0].part)
        network.set_micro_batch(None)
    assert torch.equal(toy(x), plain)


@pytest.mark.parametrize("weights", ["float8", "bfloat16"])
def test_dora_begins_with_nothing_on_weights_that_are_kept_small(weights):
    toy, x = Toy(), pictures()
    norms = dora.column_norms(toy.down.weight)
    network = network_on(toy, config_of(dora=True, init="orthogonal")).to(torch.bfloat16)
    keep_weights(toy, weights, torch.float32, CPU, share=0.5, stream=Stream(CPU))
    before = toy(x)
    with network.attached():
        assert torch.equal(toy(x), before)
    # the file holds to the weights as they were loaded
    stored = network.tensors()["lora_unet_down.dora_scale"]
    assert stored.shape == (1, 12, 1, 1) and stored.dtype == torch.float32
    assert torch.equal(stored.flatten(), norms + dora.EPS)


def test_dora_is_the_known_example(monkeypatch):
    monkeypatch.setattr(dora, "EPS", 0.0)
    base = nn.Linear(2, 2, bias=False).requires_grad_(False)
    base.weight.data = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
    made = build_layer(TrainedLayer("x", base, 1, 1.0), LoraConfig(rank=1, alpha=1, dora=True), 0)
    made.__dict__["frozen"] = base
    made.up.data, made.down.data = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0, 1.0]])
    wanted = torch.tensor([[3.0, 0.98058], [4.0, 4.90290]])
    assert torch.allclose(through(base, made, torch.eye(2)).t(), wanted, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"init": "orthogonal"}])
def test_a_linear_layer_has_its_inputs_last_whatever_lies_before(options):
    """Some models give their linear layers pictures with channels last, or, to an expert, no token at all."""
    base, made, x = one_layer("linear", **options)
    move(made)
    rows = x.reshape(12, 6)
    wanted = through(base, made, rows)
    for before in ((1, 12), (3, 2, 2), (1, 2, 2, 3)):
        assert torch.allclose(through(base, made, rows.view(*before, 6)).view(12, 5), wanted)
    assert through(base, made, rows[:0]).shape == (0, 5)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options", [{"dora": True}, {"dora": True, "tucker": True}, {"tucker": True}, {"dora": True, "init": "pissa"}]
)
def test_gradients_are_those_of_the_closed_form(kind, options):
    base, made, x = one_layer(kind, **options)
    move(made)
    names = dict(made.named_parameters())
    x.requires_grad_()

    def whole(x):
        down, up = made._factors()
        if made.mid is not None:
            down = torch.einsum("m n ..., n i -> m i ...", made.mid, down.flatten(1))
        weight = base.weight + made.scale * (up.flatten(1) @ down.flatten(1)).view(base.weight.shape)
        if made.magnitude is not None:
            axes = [axis for axis in range(weight.ndim) if axis != 1]
            norm = torch.linalg.vector_norm(weight, dim=axes, keepdim=True).detach()
            own = torch.linalg.vector_norm(base.weight, dim=axes, keepdim=True)
            weight = weight * (own + dora.EPS + made.magnitude.view(own.shape)) / (norm + dora.EPS)
        if weight.ndim == 2:
            return nn.functional.linear(x, weight, base.bias)
        convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[weight.ndim - 3]
        return convolve(x, weight, base.bias, base.stride, base.padding, base.dilation)

    weigh = torch.randn_like(base(x))
    for got, wanted in zip(
        torch.autograd.grad((through(base, made, x) * weigh).sum(), [x, *names.values()]),
        torch.autograd.grad((whole(x) * weigh).sum(), [x, *names.values()]),
        strict=True,
    ):
        assert torch.allclose(got, wanted, rtol=1e-8, atol=1e-10)


# --- others as the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", [{}, {"tucker": True}, {"dora": True}, {"use_scalar": True}, {"rs_lora": True}])
def test_it_computes_what_lycoris_computes(kind, options, monkeypatch):
    for module in (dora, layer):
        monkeypatch.setattr(module, "EPS", 0.0)
    base, made, x = one_layer(kind, **options)
    names = {"tucker": "use_tucker", "dora": "weight_decompose"}
    theirs = LoConModule("x", base, 1.0, 4, 2.0, wd_on_out=False, **{names.get(k, k): v for k, v in options.items()})
    theirs = theirs.double()
    move(made, 0.5)
    theirs.lora_down.weight.data, theirs.lora_up.weight.data = made.down.data, made.up.data
    if made.mid is not None:
        theirs.lora_mid.weight.data = made.mid.data
    if made.scalar is not None:
        theirs.scalar.data = made.scalar.data
    if made.magnitude is not None:
        theirs.dora_scale = nn.Parameter(theirs.dora_scale.double() + made.magnitude.view(made.norms.shape))
    assert torch.allclose(through(base, made, x), theirs(x), rtol=1e-6, atol=1e-7)
    ours, written = made.tensors() | made.magnitude_tensors(), theirs.custom_state_dict()
    if made.mid is not None and base.weight.ndim != 4:  # ComfyUI reads no core of one or three axes
        core = written.pop("lora_mid.weight")
        down = torch.einsum("m n ..., n i -> m i ...", core, written["lora_down.weight"].flatten(1))
        written["lora_down.weight"] = down
    assert ours.keys() == written.keys()
    assert all(torch.allclose(ours[k].double(), written[k].double(), rtol=1e-5, atol=1e-6) for k in ours)


@pytest.mark.parametrize(("init", "theirs"), [("pissa", "pissa"), ("orthogonal", "olora")])
def test_beginnings_are_those_of_peft(init, theirs):
    import peft  # here, as it takes each process seconds to import

    base, made, x = one_layer("linear", torch.float32, init=init, rs_lora=True)
    settings = peft.LoraConfig(r=4, lora_alpha=2, init_lora_weights=theirs, target_modules=["0"], use_rslora=True)
    wrapped = peft.inject_adapter_in_model(settings, nn.Sequential(copy.deepcopy(base)))[0]
    down, up = wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight
    assert wrapped.scaling["default"] == made.scale == 1.0
    assert torch.allclose(made.up_0 @ made.down_0, up @ down, atol=1e-5)
    assert torch.allclose(made.down_0.norm(dim=1), down.norm(dim=1), rtol=1e-4)
    move(made)  # the same step makes the same function: theirs on what they left of W, ours on W
    down.data, up.data = made.down_0 + made.down.data, made.up_0 + made.up.data
    assert torch.allclose(through(base, made, x), wrapped(x), atol=1e-5)
    assert made.tensors()["lora_down.weight"].shape == (8, 6) and float(made.tensors()["alpha"]) == 8


@pytest.mark.parametrize("kind", LAYERS)
def test_svd_down_begins_along_the_weights_main_directions(kind):
    base, made, _ = one_layer(kind, init="svd_down")
    _, plain, _ = one_layer(kind)
    vectors = torch.linalg.svd(base.weight.flatten(1), full_matrices=False).Vh[: made.rank]
    rows = made.down.flatten(1) * 3**0.5
    torch.testing.assert_close((rows @ vectors.t()).abs(), torch.eye(len(rows), dtype=rows.dtype), atol=1e-5, rtol=0)
    assert not made.up.any() and made.down_0 is None
    # As long as random rows are, on average over their draws.
    assert 0.5 < made.down.norm() / plain.down.norm() < 2


@pytest.mark.parametrize("kind", LAYERS)
def test_scaled_channels_compute_as_the_unscaled_factors_do(kind):
    base, made, x = one_layer(kind, channel_scaling=True)
    before = made.down.detach().clone()
    sizes = torch.arange(made.shape[1], dtype=before.dtype) ** 2
    made.scale_channels(sizes)
    scales = torch.arange(made.shape[1], dtype=before.dtype) / 2.5  # roots, 1 on average; 0 has a least scale
    scales[0] = 0.01
    scales = scales.view(1, -1, *(1,) * (before.dim() - 2))
    torch.testing.assert_close(made.down, before * scales)
    torch.nn.init.normal_(made.up, generator=torch.Generator().manual_seed(1))
    seen = through(base, made, x)
    bare = copy.deepcopy(made)
    bare.scales, bare.down.data = None, before
    torch.testing.assert_close(seen, through(base, bare, x))
    torch.testing.assert_close(made.tensors()["lora_down.weight"], before)
    made.scale_channels(torch.zeros_like(sizes))  # of a layer that never saw anything else
    torch.testing.assert_close(made.down, before)


def test_the_largest_singular_values_of_a_large_matrix_are_near_to_the_best():
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 40, generator=g) @ torch.randn(40, 400, generator=g) + torch.randn(300, 400, generator=g)
    u, sigma, vt = largest_singular(matrix, 16, torch.Generator().manual_seed(1))
    best = torch.linalg.svdvals(matrix)
    assert torch.allclose(sigma, best[:16], rtol=2e-2)
    assert (matrix - (u * sigma) @ vt).norm() <= 1.01 * best[16:].norm()
    again = largest_singular(matrix, 16, torch.Generator().manual_seed(1))
    assert torch.equal(again[0], u) and [len(s) for s in largest_singular(matrix[:4], 16, g)] == [4, 4, 4]


# --- dropouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dora tucker", pytest.param("pissa", marks=pytest.mark.thorough)])
def test_gradients_are_equal_with_and_without_checkpointing(name):
    found = []
    for level in ("0", "full"):
        unet = tiny_unet().requires_grad_(False)
        network = network_on(unet, config_of(**ALL_DROPOUTS, **OPTIONS[name]))
        move(network)
        recompute_blocks(units(unet), level)
        with network.attached():
            network.set_micro_batch(7)
            unet_loss(unet).backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("kind", LAYERS)
def test_masks_are_of_the_micro_batch_and_of_each_sample(kind):
    base, made, x = one_layer(kind, **ALL_DROPOUTS)
    move(made)
    state = torch.random.get_rng_state()
    whole = through(base, made, x)
    made.dropouts.begin(5)
    first = through(base, made, x)
    assert torch.equal(first, through(base, made, x)) and torch.equal(torch.random.get_rng_state(), state)
    checkpointed = recompute(lambda: through(base, made, x), use_reentrant=False)
    assert torch.equal(first, checkpointed)
    made.dropouts.begin(6)
    assert not torch.equal(first, through(base, made, x)) and not torch.equal(first, whole)


def dropped(kind, count=4000, **options):
    """Return (delta at many micro-batches (count, B, …), delta without dropouts)."""
    base, made, x = one_layer(kind, **options)
    move(made)
    still = through(base, made, x) - base(x)
    found = []
    for index in range(count):
        made.dropouts.begin(index)
        found.append((through(base, made, x) - base(x)).detach())
    return torch.stack(found), still.detach()


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"dropout": 0.4}, 1.0),
        ({"rank_dropout": 0.4}, 1.0),
        ({"rank_dropout": 0.4, "rank_dropout_scale": False}, 0.6),
        ({"module_dropout": 0.4}, 0.6),
    ],
)
def test_dropouts_have_the_mean_they_should(options, mean):
    deltas, still = dropped("linear", 300, **options)
    error = (deltas.mean(0) - mean * still).norm() / still.norm()
    assert error < 0.1
    if "module_dropout" in options:  # a sample has all of its delta or none
        shares = (deltas.flatten(2).norm(dim=2) / still.flatten(1).norm(dim=1)).round(decimals=6)
        assert set(shares.unique().tolist()) == {0.0, 1.0} and len(set(map(tuple, shares.tolist()))) == 8


def test_a_dora_layer_that_is_left_out_is_the_frozen_layer():
    for kind, by_output in product(LAYERS, (False, True)):
        deltas, still = dropped(kind, 20, by_output=by_output, dora=True, module_dropout=0.5)
        left = (deltas == 0).flatten(2).all(dim=2)
        assert 10 < left.sum() < 50
        assert all(torch.allclose(deltas[i, j], still[j]) for i, j in (~left).nonzero().tolist())


# --- norms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tucker": True}, {"use_scalar": True}, {"dora": True}])
def test_norms_are_bounded_as_they_should(options):
    network = network_on(Toy(), config_of(**options))
    move(network, 0.5)
    wanted, last = [0.3, 0.8, 1.0, 1.5, 3.0], []
    for i, made in enumerate(network.layers.values()):
        factors = made.factors()
        assert len(factors) == 2 + (made.mid is not None)
        norm = made.delta_weight().norm()
        assert float(made.delta_norm()) == pytest.approx(float(norm), rel=1e-4)
        factors[0].data *= wanted[i % 5] / norm
        last.append([f.clone() for f in factors])
    norms = network.limit_norms(1.0 + 1e-6)
    for i, (made, before) in enumerate(zip(network.layers.values(), last, strict=True)):
        kappa = [1.0, 1.0, 1.0, 0.66667, 0.33333][i % 5]
        assert float(made.delta_norm()) == pytest.approx(kappa * wanted[i % 5], rel=1e-4)
        for factor, old in zip(made.factors(), before, strict=True):
            assert torch.allclose(factor, old * kappa ** (1 / len(before)), rtol=1e-4)
    expected = [min(wanted[i % 5], 1.0) for i in range(len(last))]
    assert norms.shrunk == sum(i % 5 > 2 for i in range(len(last)))
    assert norms.mean == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert norms.largest == pytest.approx(1.0, rel=1e-4)


def test_layers_that_do_not_learn_are_not_shrunk():
    network = network_on(Toy(), config_of())
    move(network, 0.5)
    network.freeze("lora_unet")
    before = network.tensors()
    assert network.limit_norms(1e-3) is None
    assert all(torch.equal(t, before[k]) for k, t in network.tensors().items())


# --- files -------------------------------------------------------------------------------------------------


def test_the_resume_state_keeps_the_scalar_apart_and_a_network_comes_back_from_it():
    for options in OPTIONS.values():
        network, again = (network_on(Toy(), config_of(**options), seed) for seed in (0, 1))
        move(network)
        again.load_state_dict(network.state_dict())
        assert any(k.endswith("scalar") for k in network.state_dict()) == options.get("use_scalar", False)
        assert all(torch.equal(t, again.tensors()[k]) for k, t in network.tensors().items())


class Counted(TorchDispatchMode):
    """Count operators by name, but for views and new memory, which compute nothing."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in ("t", "view", "detach", "new_empty_strided", "_unsafe_view"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_linear_layer_dispatches_the_operators_of_its_formula_and_no_more(scaled):
    """Beside two of the frozen layer: docs/benchmarks.md says of each why it is needed."""
    toy, x = nn.Sequential(nn.Linear(16, 24)), torch.randn(2, 5, 16, requires_grad=True)
    toy.config = Toy().config
    network = network_on(toy.requires_grad_(False), config_of(alpha=1.0 if scaled else 4.0, rank=4))
    move(network)
    with network.attached():
        with Counted() as forward:
            y = toy(x)
        gradient = torch.randn_like(y)
        with Counted() as backward:
            y.backward(gradient)
    assert forward.found == {"addmm": 2, "mm": 1, "clone": 1}
    assert backward.found == {"mm": 5, "add": 1, "copy_": 1} | ({"mul": 2} if scaled else {})


# --- with the rest -----------------------------------------------------------------------------------------


def test_a_model_with_options_compiles_and_computes_the_same():
    found = []
    torch._dynamo.reset()
    for compiled in (False, True):
        torch.manual_seed(0)
        toy, x = nn.Sequential(nn.Conv2d(4, 5, 3, 2, 1), nn.Flatten(2), nn.Linear(16, 3)), pictures()
        toy.config = Toy().config
        network = network_on(toy.requires_grad_(False), config_of(**OPTIONS["dora dropouts"], tucker=True))
        move(network)
        with network.attached():
            run = torch.compile(toy, backend="eager") if compiled else toy
            for index in range(3):
                network.zero_grad()
                network.set_micro_batch(index)
                run(x).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    torch._dynamo.reset()
    assert torch.allclose(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.3, "rank_dropout": 0.2, "module_dropout": 0.3}, {"timestep_rank": 1, "init": "pissa"}]
)
def test_layers_with_masks_share_one_program_for_all_micro_batches(options):
    """The masks are those of layers that are not compiled: of the seed, the micro-batch, its times and the layer."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        toy = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        toy.config = Toy().config
        network = network_on(toy.requires_grad_(False), config_of(**options))
        move(network)
        with network.attached():
            for layer in toy if compiled else ():
                layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
            for index in range(4):
                network.set_micro_batch(index)
                network.set_times(torch.tensor([1.0, 0.5, 0.0, index / 4]), network.chosen[0].part)
                network.zero_grad()
                with computing(None) if index % 2 else nullcontext():  # as a recomputed block
                    toy(torch.ones(4, 5, 16, requires_grad=True)).square().mean().backward()
                found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    for own, other in zip(found[:4], found[4:], strict=True):
        assert torch.allclose(own, other, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(found[0], found[3], rtol=0.1)


def test_dora_and_other_beginnings_are_one_program_without_a_break():
    torch._dynamo.reset()
    for options in (OPTIONS["dora tucker"], OPTIONS["pissa"]):
        toy, x = Toy(), pictures()
        network = network_on(toy, config_of(**options))
        move(network)
        with network.attached():
            assert torch.allclose(torch.compile(toy, backend="eager", fullgraph=True)(x), toy(x), rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "loha", "dropout": 0.1}, "dropout works with algorithm lora only, and algorithm is loha"),
        (
            {"algorithm": "oft", "dora": True},
            "dora works with algorithm lora or loha or lokr only, .* set dora of LoRA Config to off",
        ),
        ({"algorithm": "lokr", "init": "pissa"}, "init works with algorithm lora only, and algorithm is lokr"),
        ({"init": "pissa", "tucker": True}, "init pissa cannot be combined with tucker"),
        ({"init": "pissa", "scale_weight_norms": 1.0}, "init pissa cannot be combined with scale_weight_norms"),
        ({"bake": True}, "bake is for dora"),
        ({"start": "a.safetensors", "dora": True}, "dora works for a new LoRA only"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LoraConfig(**options)
