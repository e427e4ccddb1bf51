"""Every algorithm but LoRA, on every kind of layer: identity, LyCORIS' results, gradients, files."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from toy_layers import BASES, CASES, NAME, TABLE, attached, beside, file_parts

from lora_atelier.trainer_core.common.devices import KINDS
from lora_atelier.trainer_core.config import ALGORITHMS, LoraConfig
from lora_atelier.trainer_core.config.rows import rows_of
from lora_atelier.trainer_core.lora_files.formats import layer_kind
from lora_atelier.trainer_core.networks import remarks_on_algorithm
from lora_atelier.trainer_core.networks.build import build_layer
from lora_atelier.trainer_core.networks.choose import TrainedLayer
from lora_atelier.trainer_core.networks.layers import LAYERS
from lora_atelier.trainer_core.networks.layers.dropout import Dropouts
from lora_atelier.trainer_core.networks.layers.loha import LohaLayer
from lora_atelier.trainer_core.networks.layers.lokr import LokrLayer, factorise
from lora_atelier.trainer_core.networks.layers.oft import butterfly_size, turn
from lora_atelier.trainer_core.networks.network import LayerWeights, Network

# In every run each case on two shapes, and the plain case of each algorithm on all.
SHAPES = ("linear", "3x3", "norm")
PLAIN = {"loha thin", *(case for case, kind in CASES.items() if case == kind["algorithm"])}  # LoHa has two forms


def in_every_run(table):
    """Leave the other shapes to --thorough."""
    again = [base not in SHAPES and case not in PLAIN for case, base in table]
    marks = [pytest.mark.thorough if each else () for each in again]
    return [pytest.param(*pair, marks=mark) for pair, mark in zip(table, marks, strict=True)]


# DoRA's norm gets no gradient, as in its paper; so differences and LyCORIS, which lets it, say otherwise.
EXACT = [(case, base) for case, base in TABLE if not CASES[case].get("dora")]
# Along the outputs ComfyUI divides by the norm of the frozen weight, which gets none anyway.
DIFFERENTIABLE = EXACT + [(case, base) for case, base in TABLE if case.endswith("dora output")]


def apply(module, x):
    """Return what the frozen layer's class computes of x with its own, or given, weights."""
    return type(module).__mro__[2].forward(module, x)


@pytest.mark.parametrize(("case", "base"), in_every_run(TABLE))
def test_a_new_layer_changes_nothing_and_every_layer_is_its_changed_weight(case, base):
    for dtype in (torch.float32, torch.bfloat16):
        module, layer, x = attached(case, base, dtype, filled=False)
        output = module(x)
        assert torch.equal(output, apply(module, x)) and output.dtype == dtype
        output.float().square().sum().backward()
        started = [name for name, p in layer.named_parameters() if p.grad is not None and p.grad.any()]
        assert started and all(p.dtype == torch.float32 for p in layer.parameters())
        if CASES[case].get("use_scalar"):
            assert started == ["scalar"]
        elif layer.plus:
            assert set(started) <= {*layer.plus, "magnitude"}

    module, layer, x = attached(case, base)
    weight, bias = module.weight.clone(), module.bias.clone()
    with torch.no_grad():
        got, before = module(x), apply(module, x)
        changed = layer.changed_weight(weight)
        assert changed.shape == weight.shape and changed.dtype == torch.float32
        assert torch.equal(layer.changed_weight(weight.bfloat16()), layer.changed_weight(weight.bfloat16().float()))
        module.weight.copy_(changed)
        module.bias.add_(getattr(layer, "diff_b", 0))
        wanted = apply(module, x)
        assert not torch.allclose(wanted, before, atol=1e-2)
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))
        if layer.factors() and layer.magnitude is None:
            assert torch.allclose(layer.delta_norm(), (changed - weight).norm(), rtol=1e-4)
        module.weight.copy_(weight)
        module.bias.copy_(bias)


@pytest.mark.parametrize("case", [case for case, base in TABLE if base == "linear"])
def test_a_linear_layer_has_its_inputs_last_whatever_lies_before(case):
    """Some models give their linear layers pictures with channels last, or no token at all."""
    module, _, x = attached(case, "linear")
    rows = x.reshape(-1, x.shape[-1])[:6]
    with torch.no_grad():
        wanted = module(rows)
        for before in ((1, 6), (3, 1, 2), (1, 2, 1, 3)):
            got = module(rows.view(*before, -1))
            assert got.shape == (*before, wanted.shape[-1])
            assert torch.allclose(got.view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)
        assert module(rows[:0]).shape == (0, wanted.shape[-1])


@pytest.mark.parametrize(("case", "base"), in_every_run(DIFFERENTIABLE))
def test_gradients_are_those_of_differences(case, base):
    module, layer, x = attached(case, base, torch.float64)
    names, values = zip(*((name, p.detach().requires_grad_()) for name, p in layer.named_parameters()), strict=True)

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            entered = self.layer.enter(x)
            return self.layer.leave(self.layer(entered if self.layer.uses_changed_input else x, apply(module, entered)))

    def compute(x, *values):
        return functional_call(Beside(), {f"layer.{name}": v for name, v in zip(names, values, strict=True)}, (x,))

    assert torch.autograd.gradcheck(compute, (x.requires_grad_(), *values), fast_mode=True, atol=1e-6)


def lycoris_module(case, base, layer, module):
    """Return LyCORIS' module for the same frozen layer with the same values."""
    from lycoris.modules import boft, diag_oft, full, glora, ia3, loha, lokr, norms

    kinds = {
        "loha": loha.LohaModule,
        "lokr": lokr.LokrModule,
        "glora": glora.GLoRAModule,
        "oft": diag_oft.DiagOFTModule,
    }
    kinds |= {"boft": boft.ButterflyOFTModule, "ia3": ia3.IA3Module, "full": full.FullModule}
    options = dict(CASES[case])
    kind = norms.NormModule if base == "norm" else kinds[options.pop("algorithm")]
    names = {"rank": "lora_dim", "tucker": "use_tucker"}
    given = {"lora_dim": 4, "alpha": 6.0, **{names.get(k, k): v for k, v in options.items()}}
    if case == "ia3 input":
        given["train_on_input"] = True
    plain = BASES[base][0]().to(module.weight.dtype)
    plain.load_state_dict(module.state_dict())
    theirs = kind("x", plain, 1.0, **given).to(module.weight.dtype)
    return plain, theirs


@pytest.mark.parametrize(("case", "base"), in_every_run(EXACT))
def test_outputs_and_gradients_are_lycoris(case, base):
    # LyCORIS inverts in float32
    dtype, tolerance = (torch.float32, 1e-4) if "oft" in case else (torch.float64, 1e-10)
    module, layer, x = attached(case, base, dtype)
    plain, theirs = lycoris_module(case, base, layer, module)
    renamed = {"ia3": "weight", "diff": "w_norm" if base == "norm" else "weight"}
    renamed |= {"diff_b": "b_norm" if base == "norm" else "bias"}
    renamed |= {part: f"{part}.weight" for part in ("a1", "a2", "b1", "b2")}
    found = dict(theirs.named_parameters())
    theirs.apply_to()
    pairs = {name: (p, found[renamed.get(name, name)]) for name, p in layer.named_parameters()}
    assert len(pairs) == len(found)
    for mine, their in pairs.values():
        their.data = mine.data.clone().reshape(their.shape)
    if case == "full" and base != "norm":  # holds the whole weight, not its difference
        theirs.weight.data += module.weight
        theirs.bias.data += module.bias
    theirs.train()
    ours, wanted = module(x), plain(x)
    assert torch.allclose(ours, wanted, rtol=tolerance, atol=tolerance * float(wanted.detach().abs().max()))
    ours.square().mean().backward()
    wanted.square().mean().backward()
    for name, (mine, their) in pairs.items():
        their = their.grad.reshape(mine.shape)
        assert torch.allclose(
            mine.grad, their, rtol=10 * tolerance, atol=10 * tolerance * float(their.detach().abs().max())
        ), name


def test_what_is_continued_has_the_rank_and_form_of_the_file():
    _, small, _ = attached("loha tucker", "3x3")
    _, large, _ = attached("loha thin", "3x3")
    large.load(*file_parts(small))
    assert (large.rank, large.scale) == (5, small.scale) and large.hada_t1 is not None
    _, low, _ = attached("lokr", "linear")
    _, whole, _ = attached("lokr full", "linear")
    whole.load(*file_parts(low))
    assert whole.lokr_w2 is None and whole.scale == low.scale == 3.0
    assert set(dict(whole.named_parameters())) == set(dict(low.named_parameters()))


def test_factors_are_those_of_the_table_and_of_lycoris():
    from lycoris.functional.general import factorization, power2factorization

    for size, square, four, thirty_two in (
        (320, (16, 20), (4, 80), (10, 32)),
        (10240, (80, 128), (4, 2560), (32, 320)),
    ):
        assert (factorise(size, -1), factorise(size, 4), factorise(size, 32)) == (square, four, thirty_two)
    for factor in (-1, 4, 7, 16):
        assert all(factorise(size, factor) == factorization(size, factor) for size in range(1, 400))
    for limit in (2, 5, 10, 24):
        for size in range(2, 200):
            theirs = power2factorization(size, limit)[0]
            if theirs:
                assert butterfly_size(size, limit) == theirs
            else:
                with pytest.raises(ValueError, match=f"BOFT cannot split a layer of {size} outputs"):
                    butterfly_size(size, limit)


def test_rotations_are_the_same_where_torch_cannot_differentiate_solutions(monkeypatch):
    found = []
    for row in (KINDS["cpu"], KINDS["mps"]):
        monkeypatch.setitem(KINDS, "cpu", row)
        x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        turned = turn(x - x.mT)
        (turned * torch.arange(16.0).view(4, 4)).sum().backward()
        found.append((turned.detach(), x.grad))
    (one, grad), (other, grad_there) = found
    assert torch.equal(one, other) and torch.allclose(grad, grad_there, rtol=1e-5, atol=1e-4)


def test_known_numbers_and_sizes():
    x = torch.tensor([[[0, 0.5], [0, 0]]])
    rotation = torch.eye(2) + turn(x - x.transpose(1, 2))
    assert torch.allclose(rotation, torch.tensor([[[0.6, 0.8], [-0.8, 0.6]]]))
    with torch.device("meta"):
        base = nn.Linear(1280, 1280)
        sizes = [sum(p.numel() for p in LokrLayer(base, r, 1, name="x", seed=0).parameters()) for r in (8, 16)]
    assert sizes == [1664, 2304]


def test_the_whole_delta_of_loha_is_never_kept():
    module, layer, x = attached("loha", "3x3")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        module(x)
    assert isinstance(layer, LohaLayer) and max(kept) < module.weight.numel() / 2


def test_beginnings_depend_on_seed_and_name_alone():
    _, first, _ = attached("lokr", "linear", filled=False)
    torch.manual_seed(7)
    module = nn.Linear(16, 24)
    config = LoraConfig(algorithm="lokr", rank=2)
    again, other = (
        build_layer(TrainedLayer(name, module, 2, 6.0), config, seed=0) for name in (NAME, "lora_unet_to_v")
    )
    assert torch.equal(first.lokr_w1, again.lokr_w1) and not torch.equal(first.lokr_w1, other.lokr_w1)
    assert not torch.equal(again.lokr_w1.flatten()[:8], again.lokr_w2_a.flatten()[:8])


@pytest.mark.parametrize("case", ["loha", "lokr", "glora", "oft", "ia3 input", "full"])
def test_a_layer_left_out_of_a_sample_changes_nothing_there(case):
    module, layer, x = attached(case, "3x3")
    plain, changed = apply(module, x), module(x)
    layer.dropouts = Dropouts(elements=0, ranks=0, layers=0.5, scaled=True, seed=0, name=NAME, micro_batch=0)
    seen = set()
    for layer.dropouts.micro_batch in range(8):
        kept = layer.dropouts.sample_mask(x).bool().tolist()
        seen |= {*kept}
        for sample, output in zip(kept, zip(module(x), plain, changed, strict=True), strict=True):
            assert torch.equal(output[0], output[1]) if not sample else torch.allclose(output[0], output[2], atol=1e-5)
    assert seen == {True, False}
    layer.dropouts.begin(None)
    assert torch.equal(module(x), changed)


@pytest.mark.parametrize("case", ["loha thin", "loha", "lokr", "lokr tucker"])
def test_ranks_that_are_left_out_are_missing_in_the_second_product(case):
    module, layer, x = attached(case, "3x3")
    part = "hada_w2_b" if "loha" in case else "lokr_w2_b"
    layer.dropouts = Dropouts(elements=0, ranks=0.5, layers=0, scaled=True, seed=0, name=NAME, micro_batch=3)
    mask = layer.dropouts.rank_mask(1, layer.rank, x)[0]
    assert set(mask.tolist()) <= {0.0, 2.0}
    got = module(x)
    layer.dropouts.begin(None)
    getattr(layer, part).data.mul_(mask[:, None])
    assert torch.allclose(got, module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"factor": 8}, "factor works with algorithm lokr only"),
        ({"algorithm": "oft", "full_matrix": True}, "full_matrix works with algorithm lokr only"),
        ({"algorithm": "lokr", "constraint": 1.0}, "constraint works with algorithm oft or boft only"),
        ({"algorithm": "lokr", "factor": 0}, "factor of LoRA Config is 0; it must be between 1 and 1024"),
        ({"algorithm": "lokr", "full_matrix": True, "tucker": True}, "full_matrix gives LoKr no rank"),
    ],
)
def test_settings_of_another_algorithm_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        LoraConfig(**settings)


def test_every_algorithm_has_layers_that_are_built_of_its_settings():
    assert list(LAYERS) == list(ALGORITHMS)
    known = rows_of(LoraConfig)
    for name, kind in LAYERS.items():
        assert set(ALGORITHMS[name].settings) <= known.keys()
        assert set(kind.takes) <= {"rank", "alpha", "name", "seed", *ALGORITHMS[name].settings}
        assert set(kind.multiplied) <= kind.endings.keys() and set().union(*kind.forms) <= kind.endings.keys()


def test_remarks_on_what_may_surprise():
    said = {algorithm: remarks_on_algorithm(LoraConfig(algorithm=algorithm)) for algorithm in ("loha", "oft", "lora")}
    assert [len(sentences) for sentences in said.values()] == [0, 1, 0]
    assert "64" in remarks_on_algorithm(LoraConfig(algorithm="loha", rank=64))[0]


@pytest.mark.parametrize(("case", "base"), in_every_run(TABLE))
def test_a_layer_comes_back_from_its_state_and_from_its_file(case, base):
    module, layer, x = attached(case, base)
    again, fresh, _ = attached(case, base, filled=False)
    fresh.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected = module(x)
        assert torch.equal(again(x), expected)
        parts, alpha = file_parts(layer)
        start = LayerWeights(layer_kind(parts), parts, alpha)
        plain = attached(case, base, filled=False)[0]
        trained = TrainedLayer(NAME, apply_class(plain), start.rank, start.alpha)
        continued = Network([trained], LoraConfig(start="x"), 0, {NAME: start}).layers[NAME]
        torch.testing.assert_close(beside(again, continued)(x), expected)
        stored, kept = (x.tensors() | x.magnitude_tensors() for x in (continued, layer))
        assert {name: t.shape for name, t in stored.items()} == {name: t.shape for name, t in kept.items()}


def apply_class(module):
    """Return a frozen layer as it is without a network."""
    module.__class__ = type(module).__mro__[2]
    return module
