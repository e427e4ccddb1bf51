"""Products in 8 bits: what is rounded, by which scales, and what a device cannot do."""

import pytest
import torch
from old_processor import exact_sums  # noqa: F401 (a fixture)
from torch import nn

from lora_atelier.trainer_core.memory import Stream, check_compute, eight_bits, keep_weights, multiply_in, pack
from lora_atelier.trainer_core.memory.eight_bits import (
    LARGEST,
    LEAST_TOKENS,
    STORED,
    chosen_compute,
    enough_tokens,
    gradient_in_16_bits,
    linear_rounded,
    multiplies,
    rounded,
    takes_sides,
)

CPU = torch.device("cpu")
KINDS = ("int8", "float8")


def draw(*shape, seed=0):
    """Draw rows of very different sizes, one of them of zeros."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    drawn *= 10 ** torch.linspace(-4, 3, shape[0])[:, None]
    drawn[1] = 0
    return drawn


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_rounded_by_its_own_scale(kind):
    rows = draw(40, 32)
    found = rounded(rows, kind)
    assert found.values.dtype == STORED[kind] and found.scale.shape == (40, 1)
    back = found.values.float() * found.scale
    # Half a step: of float8 that is a share of the value itself, but near zero.
    half = 0.5 * found.scale if kind == "int8" else (rows.abs() * 2**-4).maximum(found.scale * 2**-10)
    assert ((back - rows).abs() <= 1.01 * half).all() and not back[1].any()
    reached = found.values.float().abs().amax(1)
    assert (reached[torch.arange(40) != 1] == LARGEST[kind]).all()
    narrow = rows.bfloat16()
    for each, wanted in zip(rounded(narrow, kind), rounded(narrow.float(), kind), strict=True):
        assert each.dtype == wanted.dtype and torch.equal(each.float(), wanted.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_factors(kind, dtype):
    x, weight, bias = draw(2 * LEAST_TOKENS, 64, seed=1), draw(48, 64, seed=2), draw(48, 1, seed=3).flatten()
    x = x.to(dtype)
    kept = rounded(weight, kind)
    found = linear_rounded(x.view(2, LEAST_TOKENS, 64), kept, bias, kind)
    assert found.shape == (2, LEAST_TOKENS, 48) and found.dtype == dtype
    mine = rounded(x, kind)
    exact = [(each.values.double() * each.scale.double()) for each in (mine, kept)]
    expected = exact[0] @ exact[1].t() + bias.double()
    size = expected.abs().amax(1, keepdim=True).clamp_min(1e-9)
    assert ((found.double().view_as(expected) - expected).abs() / size).max() < (
        1e-5 if dtype == torch.float32 else 8e-3
    )


def test_the_largest_sums_of_int8_do_not_overflow():
    x = torch.full((LEAST_TOKENS, 1 << 14), 3.0)
    assert torch.equal(linear_rounded(x, rounded(x[:16], "int8"), None, "int8"), (x @ x[:16].t()))


def test_gradients_are_those_of_16_bits():
    gradient, weight = draw(20, 48, seed=4), draw(48, 32, seed=5)
    found = gradient_in_16_bits(gradient, weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, (gradient.bfloat16() @ weight.bfloat16()).float())


def test_few_tokens_and_odd_sides_stay_exact():
    assert not enough_tokens(torch.ones(2, 8, 64)) and enough_tokens(torch.ones(1, LEAST_TOKENS, 64))
    assert takes_sides(48, 64) and not takes_sides(48, 60) and not takes_sides(7, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["auto", "bfloat16", "float8"])
@pytest.mark.parametrize("streamed", [False, True])
def test_layers_multiply_in_8_bits_and_pack_without_a_change(kind, stored, streamed):
    model = nn.Sequential(nn.Linear(64, 48)).requires_grad_(False)
    more = {"share": 1.0, "stream": Stream(CPU)} if streamed else {}
    keep_weights(model, stored, torch.float32, CPU, linear=True, **more)
    x = draw(LEAST_TOKENS, 64, seed=1)
    exact = model(x)
    multiply_in(kind, model)

    def passed():
        inner = x.clone().requires_grad_()
        output = model(inner)
        output.sum().backward()
        return output.detach(), inner.grad, model[0].kept.weight(torch.float32)

    before = passed()
    assert 0 < (before[0] - exact).norm() / exact.norm() < 0.1
    weight = rounded(before[2], kind)
    if stored != "float8" or kind == "float8":  # else it is rounded twice
        assert torch.equal(before[0], linear_rounded(x, weight, model[0].bias, kind))
    pack(model)
    assert model[0].kept.kind == kind and model[0].kept.size < 48 * 64 + 4 * 48 + 1
    after = passed()
    assert all(torch.allclose(a, b, rtol=2e-6, atol=0) for a, b in zip(after, before, strict=True))
    few = x[: LEAST_TOKENS - 1]
    expected = nn.functional.linear(few, model[0].kept.weight(torch.float32), model[0].bias)
    torch.testing.assert_close(model(few), expected)
    multiply_in("", model)
    torch.testing.assert_close(model(x), nn.functional.linear(x, after[2], model[0].bias))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_give_the_same_gradients(kind):
    layer = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32, bias=False)).requires_grad_(False)
    keep_weights(layer, "auto", torch.float32, CPU, linear=True)
    multiply_in(kind, layer)
    found = []
    for model in (layer, torch.compile(layer, backend="eager")):
        x = draw(LEAST_TOKENS, 64, seed=1).requires_grad_()
        model(x).square().sum().backward()
        found.append(x.grad)
    assert found[0].any() and torch.equal(*found)
    torch._dynamo.reset()


def test_what_a_device_or_stored_weights_rule_out_is_refused(monkeypatch):
    for kind in ("exact", "auto", *KINDS):
        check_compute(kind, CPU, "auto")
    with pytest.raises(ValueError, match=r"nf4 are not multiplied in 8 bits; set .* to exact, or .* to auto\."):
        check_compute("int8", CPU, "nf4")

    def sums(*_):
        raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(eight_bits, "_sums", sums)
    assert not multiplies("int8", CPU)
    with pytest.raises(ValueError, match=r"cpu does not multiply in int8; set .* to exact\."):
        check_compute("int8", CPU, "auto")


def test_auto_tries_int8_where_it_is_right(monkeypatch):
    assert chosen_compute("auto", CPU, "auto") == "int8" and chosen_compute("float8", CPU, "auto") == "float8"
    assert chosen_compute("auto", CPU, "nf4") == chosen_compute("auto", torch.device("meta"), "auto") == "exact"
    monkeypatch.setattr(eight_bits, "multiplies", lambda *_: False)
    assert chosen_compute("auto", CPU, "auto") == "exact"


def test_a_processor_that_overflows_is_found_out(monkeypatch):
    original = eight_bits._sums
    monkeypatch.setattr(eight_bits, "_sums", lambda x, weight: original(x, weight).clamp(max=2**15))
    assert not multiplies("int8", CPU)
