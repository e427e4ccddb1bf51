"""Merging LoRAs: sums are exact, TIES and DARE are those of peft, orthogonal leaves earlier LoRAs as they are."""

import pytest
import torch

from lora_atelier.trainer_core.lora_files.combine import METHODS, Summand, merge_loras
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.read import parse_lora


def lora(number, rank=4, *, prefix="lora_unet_", conv=True, alpha=2.0):
    """Build a LoRA of a linear layer and a convolution, random but for its number."""
    draw = torch.Generator().manual_seed(number)
    tensors = {}
    for name, inner, outer, kernel in (("attn_q", (12,), 10, ()), *([("conv", (6, 3, 3), 8, (1, 1))] if conv else [])):
        tensors |= {
            f"{prefix}{name}.lora_down.weight": torch.randn(rank, *inner, generator=draw),
            f"{prefix}{name}.lora_up.weight": torch.randn(outer, rank, *kernel, generator=draw),
            f"{prefix}{name}.alpha": torch.tensor(alpha),
        }
    return parse_lora(tensors, f"lora{number}.safetensors", {})


def deltas(layers):
    return {layer.source: delta_weight(layer).flatten(1) for layer in layers}


def test_a_sum_is_exact_and_holds_layers_of_either():
    one, other = lora(1), lora(2, rank=3, conv=False, alpha=3.0)
    merged = merge_loras([Summand(one, 0.5), Summand(other, -1.25)])
    a, b, c = deltas(one.layers.values()), deltas(other.layers.values()), deltas(merged.layers)
    assert c.keys() == a.keys() and merged.shared == 1
    torch.testing.assert_close(c["lora_unet_attn_q"], 0.5 * a["lora_unet_attn_q"] - 1.25 * b["lora_unet_attn_q"])
    torch.testing.assert_close(c["lora_unet_conv"], 0.5 * a["lora_unet_conv"])
    shapes = {layer.source: tuple(layer.tensors["down"].shape) for layer in merged.layers}
    assert shapes == {"lora_unet_attn_q": (7, 12), "lora_unet_conv": (4, 6, 3, 3)}


def test_a_layer_that_is_no_plain_lora_makes_the_sum_a_whole_difference():
    diff = {"lora_unet_attn_q.diff": torch.randn(10, 12), "lora_unet_attn_q.diff_b": torch.randn(10)}
    whole = parse_lora(diff, "full.safetensors", {})
    [layer] = [
        each for each in merge_loras([Summand(lora(1), 2.0), Summand(whole, 3.0)]).layers if "diff" in each.tensors
    ]
    own = deltas(lora(1).layers.values())["lora_unet_attn_q"]
    torch.testing.assert_close(layer.tensors["diff"], 2 * own + 3 * diff["lora_unet_attn_q.diff"])
    torch.testing.assert_close(layer.tensors["diff_b"], 3 * diff["lora_unet_attn_q.diff_b"])


def test_svd_is_the_nearest_lora_of_its_rank():
    summands = [Summand(lora(1), 1.0), Summand(lora(2), 1.0)]
    exact, cut = deltas(merge_loras(summands).layers), merge_loras(summands, "svd", rank=3)
    lost = whole = 0.0
    for name, delta in deltas(cut.layers).items():
        sigma = torch.linalg.svdvals(exact[name])
        torch.testing.assert_close((exact[name] - delta).norm(), sigma[3:].norm())
        lost, whole = lost + float(sigma[3:].square().sum()), whole + float(sigma.square().sum())
    assert cut.kept == pytest.approx((1 - lost / whole) ** 0.5, rel=1e-5)
    assert {len(layer.tensors["down"]) for layer in cut.layers} == {3}


def test_ties_is_peft_s():
    from peft.utils.merge_utils import ties  # here, as it takes each process seconds to import

    loras = [lora(number) for number in (1, 2, 3)]
    merged = deltas(merge_loras([Summand(each, 1.0) for each in loras], "ties", rank=54, density=0.3).layers)
    for name, delta in merged.items():
        each = [deltas(one.layers.values())[name] for one in loras]
        torch.testing.assert_close(delta, ties(each, torch.ones(3), 0.3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["dare", "dare_ties"])
def test_dare_keeps_a_share_and_the_mean(method):
    summands = [Summand(lora(1), 1.0), Summand(lora(2), 0.5)]
    assert_same(
        merge_loras(summands, method, rank=54, density=1.0),
        merge_loras(summands, "ties" if "ties" in method else "sum", rank=54, density=1.0),
    )
    first = deltas(merge_loras(summands, method, rank=54, density=0.5, seed=1).layers)
    again = deltas(merge_loras(summands, method, rank=54, density=0.5, seed=1).layers)
    other = deltas(merge_loras(summands, method, rank=54, density=0.5, seed=2).layers)
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    if method == "dare":  # over many draws it is the sum
        seeds = [deltas(merge_loras(summands, method, rank=54, density=0.5, seed=seed).layers) for seed in range(400)]
        exact = deltas(merge_loras(summands).layers)
        for name, delta in exact.items():
            mean = torch.stack([found[name] for found in seeds]).mean(0)
            assert (mean - delta).norm() < 0.1 * delta.norm()  # the deviation of the mean is 1/20 of that of one


def assert_same(one, other):
    for name, delta in deltas(one.layers).items():
        torch.testing.assert_close(delta, deltas(other.layers)[name], atol=1e-4, rtol=1e-4)


def test_orthogonal_leaves_earlier_loras_alone():
    first, second = lora(1, rank=2), lora(2, rank=2)
    merged = deltas(merge_loras([Summand(first, 1.0), Summand(second, 1.0)], "orthogonal").layers)
    for name, own in deltas(first.layers.values()).items():
        rest = merged[name] - own
        assert rest.norm() > 0.1 * own.norm()
        torch.testing.assert_close(own.t() @ rest, torch.zeros(own.shape[1], own.shape[1]), atol=1e-3, rtol=0)
        torch.testing.assert_close(own @ rest.t(), torch.zeros(len(own), len(own)), atol=1e-3, rtol=0)
    repeated = deltas(merge_loras([Summand(first, 1.0), Summand(first, 1.0)], "orthogonal").layers)
    own = deltas(first.layers.values())
    for name, delta in repeated.items():
        torch.testing.assert_close(delta, own[name], atol=1e-4, rtol=1e-4)


def test_names_of_other_programs_meet_in_one_place():
    one, other = lora(1, conv=False), lora(2, prefix="unet.", conv=False)
    with pytest.raises(ValueError, match=r"share no layer.*with the MODEL linked"):
        merge_loras([Summand(one, 1.0), Summand(other, 1.0)])
    merged = merge_loras([Summand(one, 1.0), Summand(other, 1.0)], same=lambda name: name.split("unet")[1].strip("_."))
    assert [layer.source for layer in merged.layers] == ["lora_unet_attn_q"] and merged.shared == 1


def test_what_cannot_be_merged_gets_a_sentence():
    one, two = Summand(lora(1), 1.0), Summand(lora(2), 1.0)
    cases = [
        ([one], {}, "Merge LoRAs has one LoRA; give it at least two"),
        ([one, two], {"method": "svd"}, "rank of Merge LoRAs is 0"),
        ([one, two], {"method": "ties", "rank": 4, "density": 0.0}, "density of Merge LoRAs is 0"),
        ([one._replace(strength=0.0), two._replace(strength=0.0)], {}, "has no effect"),
        ([one, Summand(wider(), 1.0)], {}, "other shapes"),
        ([one, Summand(with_magnitude(), 1.0)], {}, "layers of DoRA"),
    ]
    for summands, settings, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            merge_loras(summands, **settings)
    assert set(METHODS) == {"sum", "svd", "ties", "dare", "dare_ties", "orthogonal"}


def wider():
    tensors = {
        "lora_unet_attn_q.lora_down.weight": torch.ones(2, 13),
        "lora_unet_attn_q.lora_up.weight": torch.ones(10, 2),
    }
    return parse_lora(tensors, "wider.safetensors", {})


def with_magnitude():
    tensors = lora(2).layers["lora_unet_attn_q"].tensors
    named = {f"lora_unet_attn_q.lora_{part}.weight": tensor for part, tensor in tensors.items()}
    return parse_lora(named | {"lora_unet_attn_q.dora_scale": torch.ones(1, 12)}, "dora.safetensors", {})
