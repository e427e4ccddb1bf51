"""Resizing: the nearest LoRA of a rank; ranks as sd-scripts and resize_lora choose them."""

import math
from dataclasses import replace

import pytest
import sdxl_sample
import torch
from tiny_models import fill, network_on, tiny_unet

from lora_atelier.trainer_core.common.cancel import cancellable
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.lora import layers_of
from lora_atelier.trainer_core.lora_files.read import parse_lora
from lora_atelier.trainer_core.lora_files.recipes import (
    FrozenWeight,
    Recipe,
    frozen_weight_of,
    kept_directions,
    parse_recipes,
    scores,
    settle_sizes,
)
from lora_atelier.trainer_core.lora_files.resize import RankRule, describe_ranks, kept_rank, resize, resize_by_recipes
from lora_atelier.trainer_core.lora_files.singular import Singular, decompose
from lora_atelier.trainer_core.lora_files.spectral import SpectralNorm, first_bounds, narrow

# Ranks by sd-scripts' networks/resize_lora.py (commit 48d368fa), `python networks/resize_lora.py --dynamic_method … `,
# of sdxl_sample with zeros in `up` of attn1_to_q: (mode, value, --new_rank,
# --new_conv_rank) -> ranks.
SD_SCRIPTS = {
    ("sv_ratio", 10.0, 16, 16): [5, 5, 1, 5, 5, 5],
    ("sv_cumulative", 0.8, 16, 16): [4, 4, 1, 4, 4, 4],
    ("sv_fro", 0.9, 16, 16): [3, 3, 1, 3, 3, 3],
    ("sv_fro", 0.999, 16, 16): [6, 6, 1, 6, 6, 6],
    ("sv_ratio", 100.0, 6, 3): [3, 3, 1, 6, 6, 6],
    ("rank", 0.0, 6, 3): [3, 3, 1, 6, 6, 6],
}
# Ranks by resize_lora (commit efe6f69), `python resize_lora.py checkpoint lora -t 32 -r RECIPE`, of sdxl_sample.
RESIZE_LORA = {
    "fro_ckpt=1,thr=-3.55": [4, 7, 7, 6, 7, 8],
    "spn_ckpt=1,thr=-2.5": [4, 7, 7, 7, 8, 9],
    "spn_lora=1,thr=-1": [4, 4, 4, 4, 4, 4],
    "fro_lora,thr=-1.5": [5, 5, 5, 5, 5, 5],
    "subspace=0.5,fro_ckpt=0.5,thr=-2.2": [6, 8, 7, 7, 9, 9],
    "fro_ckpt=0.8,params=0.2,thr=-3.5": [2, 5, 5, 5, 6, 6],
    "fro_ckpt=1,rescale=0.5,thr=-3.55": [3, 6, 6, 5, 6, 7],
}
SIGMA = torch.tensor([10, 5, 2, 1, 0.5, 0.1], dtype=torch.float64)


@pytest.fixture(scope="module")
def network():
    return fill(network_on(tiny_unet(), LoraConfig(rank=8, alpha=4, preset="full")), std=0.1)


@pytest.fixture(scope="module")
def sample():
    return sdxl_sample.lora()


def pair(up, down, **more):
    return {"a.lora_up.weight": up, "a.lora_down.weight": down, **{f"a.{key}": tensor for key, tensor in more.items()}}


def flat(layer):
    return delta_weight(layer).flatten(1)


@pytest.mark.parametrize("case", SD_SCRIPTS, ids=str)
def test_ranks_are_those_of_sd_scripts(sample, case):
    mode, value, rank, conv_rank = case
    tensors = {
        name: t * 0 if "attn1_to_q.lora_up" in name else t for name, t in sample.items() if "_ff_net_0" not in name
    }
    made = resize(parse_lora(tensors, "x", {}), RankRule(mode=mode, value=value, rank=rank, conv_rank=conv_rank))
    assert [layer.new_rank for layer in made.ranks] == SD_SCRIPTS[case]
    assert [len(layer.tensors["down"]) for layer in made.layers] == SD_SCRIPTS[case]


def test_ranks_of_recipes_are_those_of_resize_lora(sample):
    weights = sdxl_sample.weights()
    recipes = parse_recipes(":".join(RESIZE_LORA))
    lora = parse_lora(sample, "x", {})
    made = resize_by_recipes(lora, recipes, weights.__getitem__)
    assert {each.recipe: [layer.new_rank for layer in each.ranks] for each in made} == RESIZE_LORA
    rescaled = {layer.source: layer for layer in made[-1].layers}
    for layer in made[-1].ranks:  # a rescaled LoRA is half as strong
        whole = decompose(lora.layers[layer.name])
        assert float(flat(rescaled[layer.name]).norm()) == pytest.approx(0.5 * whole.norm * layer.kept, rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("sv_ratio", {2: 2, 4: 3, 5: 3, 10: 4, 20: 5}),
        ("sv_cumulative", {0.5: 2, 0.8: 3, 0.9: 4, 0.95: 5, 0.99: 6}),
        ("sv_fro", {0.8: 2, 0.9: 3, 0.95: 3, 0.99: 4, 0.999: 5}),
    ],
)
def test_rules_on_known_singular_values(mode, ranks):
    assert {value: kept_rank(RankRule(mode=mode, value=value), SIGMA, 6) for value in ranks} == ranks


def known(sigma=SIGMA, rows=320, columns=320):
    eye = torch.eye(max(rows, columns), dtype=torch.float64)
    return Singular(u=eye[:rows, : len(sigma)], sigma=sigma, vt=eye[: len(sigma), :columns], kernel=())


def test_a_size_is_never_exceeded():
    layers = [known(), known(torch.tensor([4, 3, 0.2], dtype=torch.float64), 1280, 1280)]
    for budget, kept in ((11_520, 3), (12_800, 4), (20_000, 7), (10**9, 9)):
        recipe = Recipe(text="", weights={"params": 1e-9}, threshold=None, size=budget / 2**20, rescale=1.0)
        masks = kept_directions(recipe, layers, [FrozenWeight(), FrozenWeight()], 2)
        assert sum(int(mask.sum()) for mask in masks) == kept
        taken = sum(2 * int(mask.sum()) * (len(f.u) + f.vt.shape[1]) for mask, f in zip(masks, layers, strict=True))
        assert taken <= budget


def test_scores_are_their_formula():
    [recipe] = parse_recipes("spn_lora=1, fro_lora=1, rescale=2, thr=0")
    expected = (SIGMA * 2).log10() - 0.5 * math.log10(10) - 0.5 * math.log10(float(SIGMA.norm()))
    torch.testing.assert_close(scores(recipe, known(), FrozenWeight()), expected)


def spread_out(number, rows, columns):
    """Draw a matrix whose largest singular value stands out, or not."""
    g = torch.Generator().manual_seed(number)
    spike = torch.randn(rows, 1, generator=g) @ torch.randn(1, columns, generator=g)
    return torch.randn(rows, columns, generator=g) + number % 3 * spike / rows**0.5


def matrices():
    yield from (spread_out(number, *shape) for number, shape in enumerate([(300, 200), (60, 250), (128, 128)] * 4))
    yield from (torch.eye(70), torch.zeros(3, 3), torch.ones(90, 130), torch.ones(1, 5), torch.ones(30, 1))
    yield torch.diag(torch.linspace(1, 1 - 1e-4, 150))  # the largest ones are as good as equal
    yield torch.diag(torch.tensor([5.0] + [1e-6] * 99))


def largest(matrix):
    return float(torch.linalg.svdvals(matrix.double())[0])


def test_bounds_hold_the_largest_singular_value_down_to_all_digits():
    for matrix in matrices():
        norm, true = first_bounds(matrix), largest(matrix)
        taken, spreads = 0, [norm.spread]
        while norm.spread:
            assert norm.low <= true <= norm.high
            narrow(norm, matrix)
            spreads.append(norm.spread)
            taken += 1
        assert norm.low == norm.high == pytest.approx(true, rel=1e-12)
        assert spreads == sorted(spreads, reverse=True) and taken <= 51


@pytest.mark.parametrize("together", [False, True])
def test_thresholds_are_decided_as_by_all_digits_of_the_norm(together):
    found = known(0.8 ** torch.arange(30, dtype=torch.float64), 300, 300)
    for matrix in matrices():
        true = largest(matrix)
        nearly = [math.log10(0.8**4 / true) + sign * 1e-6 for sign in (-1, 1)] if true else []  # a direction's score
        recipes = parse_recipes(
            "spn_ckpt=1,spn_lora,thr=-1:spn_ckpt=1,thr=-1.5:spn_ckpt=1,thr=-2.2:spn_ckpt=2,params,thr=-2:"
            + ":".join(f"spn_ckpt,thr={each:.12f}" for each in nearly)
        )
        exact = FrozenWeight(spn=SpectralNorm(low=true, high=true))
        for recipe in recipes:
            reference = frozen_weight_of(matrix, found, recipes if together else [recipe])
            kept, expected = (kept_directions(recipe, [found], [each], 2)[0] for each in (reference, exact))
            assert torch.equal(kept, expected)


# Recipes that compare all layers, each by itself and with others.
SIZED = (
    "spn_ckpt=1,size={}",
    "spn_ckpt=0.5,fro_ckpt=0.5,size={}",
    "spn_ckpt=1,subspace=1,params=0.3,rescale=0.7,size={}",
    "spn_ckpt=-1,fro_lora=2,size={}",
    "spn_ckpt=1,thr=-1",
)


@pytest.mark.parametrize(
    "apart", [0.0, 1e-6, *(pytest.param(each, marks=pytest.mark.thorough) for each in (1e-9, 1e-4, 1e-2))]
)
def test_sizes_are_decided_as_by_all_digits_of_the_norms(apart):
    shapes, g = [(96, 80), (80, 120), (110, 110)] * 4, torch.Generator().manual_seed(3)
    weights, layers, norms = [], [], []
    for number, (rows, columns) in enumerate(shapes):
        weight = spread_out(number, rows, columns)
        weights.append(weight)
        norms.append(largest(weight))
        # All scores by spn_ckpt lie this far apart, from layer to layer.
        sigma = norms[-1] * (1 + apart * (number + 12 * torch.arange(5, dtype=torch.float64))).flip(0)
        u, vt = (torch.linalg.qr(torch.randn(size, 5, generator=g).double())[0] for size in (rows, columns))
        layers.append(Singular(u=u, sigma=sigma, vt=vt.t(), kernel=()))
    whole = sum(2 * len(found.sigma) * sum(weight.shape) for found, weight in zip(layers, weights, strict=True))
    for share in (0.01, 0.3, 0.5, 0.77, 0.999, 2):
        recipes = parse_recipes(":".join(each.format(share * whole / 2**20) for each in SIZED))
        exact = [
            replace(frozen_weight_of(weight, found, recipes), spn=SpectralNorm(low=norm, high=norm))
            for weight, found, norm in zip(weights, layers, norms, strict=True)
        ]
        for together in (recipes, *([recipe] for recipe in recipes)):
            references = [frozen_weight_of(w, found, together) for w, found in zip(weights, layers, strict=True)]
            settle_sizes(together, layers, references, 2, weights.__getitem__)
            for recipe in together:
                found, expected = (kept_directions(recipe, layers, each, 2) for each in (references, exact))
                differ = sum(int((one != other).sum()) for one, other in zip(found, expected, strict=True))
                assert differ == 0 or apart < 1e-12  # rounding alone tells ties apart


def test_a_size_reads_only_the_weights_again_that_the_cut_lies_near():
    layers = [known(0.5 ** torch.arange(8, dtype=torch.float64), 300, 300)] * 6
    weights, read = [10**number * spread_out(number, 300, 300) for number in range(6)], []
    recipes = parse_recipes(f"spn_ckpt=1,size={20 * 2 * 600 / 2**20}")
    references = [frozen_weight_of(weight, found, recipes) for weight, found in zip(weights, layers, strict=True)]
    told = []
    settle_sizes(recipes, layers, references, 2, lambda number: read.append(number) or weights[number], told.append)
    assert len(set(read)) < 3 and told == sorted(told) and told[-1] == 1
    assert all(reference.spn.spread for number, reference in enumerate(references) if number not in read)
    masks = kept_directions(recipes[0], layers, references, 2)
    assert sum(int(mask.sum()) for mask in masks) == 20


def test_a_threshold_that_all_pass_takes_no_step(monkeypatch):
    monkeypatch.setattr(f"{narrow.__module__}.look", lambda: pytest.fail("a step was taken"))
    for threshold in (-9, 9):
        assert (
            frozen_weight_of(torch.randn(30, 20), known(), parse_recipes(f"spn_ckpt=1,thr={threshold}")).spn.spread > 0
        )


def test_cancel_ends_the_work_between_layers_and_within_one():
    tensors = {f"{name}.lora_down.weight": torch.eye(40)[:4] for name in "abc"}
    tensors |= {f"{name}.lora_up.weight": torch.eye(40)[:, :4] for name in "abc"}
    lora, weight, looked, read = layers_of(tensors, "x"), torch.randn(40, 40), [], []

    def cancel():
        looked.append(len(read))
        if len(looked) == 6 or read:
            raise KeyboardInterrupt

    size = parse_recipes("spn_ckpt=1,size=1")  # which needs the norms of all layers
    with cancellable(cancel), pytest.raises(KeyboardInterrupt):
        resize_by_recipes(lora, size, lambda name: read.append(name) or weight)
    assert 0 < len(read) <= 3
    read.clear()
    with cancellable(cancel), pytest.raises(KeyboardInterrupt):
        looked[:] = [0] * 5  # it works in another thread, and hears of it there
        resize(lora, RankRule(rank=2))


def test_the_result_is_the_nearest_of_its_rank():
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(20, 6, generator=g), torch.randn(6, 15, generator=g)
    made = resize(parse_lora(pair(up, down, alpha=torch.tensor(3.0)), "x", {}), RankRule(rank=3))
    [layer], [ranks] = made.layers, made.ranks
    u, s, vt = torch.linalg.svd(0.5 * (up @ down).double())
    torch.testing.assert_close(flat(layer).double(), (u[:, :3] * s[:3]) @ vt[:3], atol=1e-4, rtol=1e-4)
    assert ranks.kept == pytest.approx((s[:3].norm() / s.norm()).item(), rel=1e-6)
    assert layer.alpha == 1.5 and layer.source == "a"  # the scale stays
    torch.testing.assert_close(layer.tensors["up"].norm(dim=0), layer.tensors["down"].norm(dim=1))


def test_the_same_rank_or_more_keeps_every_change(network):
    tensors = {name: tensor.detach() for name, tensor in network.tensors().items()}
    for rank in (8, 100):
        made = resize(parse_lora(tensors, "x", {}), RankRule(rank=rank))
        for layer in made.layers:
            expected = network.layers[layer.source].delta_weight().detach()
            torch.testing.assert_close(delta_weight(layer).view(expected.shape), expected, atol=1e-5, rtol=1e-4)
            before = tensors[f"{layer.source}.lora_down.weight"].shape
            assert layer.tensors["down"].shape == (min(8, len(expected)), *before[1:])
        assert all(each.kept == pytest.approx(1) for each in made.ranks)


KINDS = {
    "Tucker LoRA": {"lora_up.weight": (8, 4, 1, 1), "lora_mid.weight": (4, 4, 3, 3), "lora_down.weight": (4, 6, 1, 1)},
    "LoHa": {"hada_w1_a": (8, 2), "hada_w1_b": (2, 12), "hada_w2_a": (8, 2), "hada_w2_b": (2, 12)},
    "LoKr": {"lokr_w1": (2, 3), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 4)},
    "full difference": {"diff": (8, 6, 3, 3), "diff_b": (8,)},
    "DoRA": {"lora_up.weight": (8, 4), "lora_down.weight": (4, 12), "dora_scale": (1, 12)},
    "OFT": {"oft_blocks": (2, 4, 4)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_resized_by_its_change(kind):
    draw = torch.Generator().manual_seed(1)
    tensors = {f"a.{part}": torch.randn(shape, generator=draw) for part, shape in KINDS[kind].items()}
    lora = layers_of(tensors, "x")
    assert lora.layers["a"].kind == kind
    weight = torch.randn(8, 12, generator=draw)
    found = decompose(lora.layers["a"], weight)
    [layer] = resize(lora, RankRule(rank=2), lambda name: weight).layers
    assert layer.kind == "LoRA" and len(layer.tensors["down"]) == 2
    error = flat(layer).double() - found.u @ (found.sigma[:, None] * found.vt)
    assert float(error.norm()) == pytest.approx(float(found.sigma[2:].norm()), rel=1e-3, abs=1e-5)
    assert ("diff_b" in layer.tensors) == (kind == "full difference")
    if kind in ("DoRA", "OFT"):
        with pytest.raises(ValueError, match=f"layer of {kind}, whose effect depends on the model"):
            resize(lora, RankRule(rank=2))


def test_what_is_kept_whole_stays_to_the_bit_and_a_rescaled_lora_is_weaker_everywhere():
    draw = torch.Generator().manual_seed(2)
    tensors = pair(torch.randn(8, 3, generator=draw).half(), torch.randn(3, 6, generator=draw).half())
    tensors |= {"a.diff_b": torch.randn(8, generator=draw), "n.w_norm": torch.ones(4)}
    lora = layers_of(tensors, "x")
    for made in (resize(lora, RankRule(rank=3)), *resize_by_recipes(lora, parse_recipes("params=1,thr=-99"))):
        found = {layer.source: layer for layer in made.layers}
        assert all(
            torch.equal(t, lora.layers[name].tensors[part])
            for name in ("an")
            for part, t in found[name].tensors.items()
        )
    [made] = resize_by_recipes(lora, parse_recipes("params=1,thr=-99,rescale=0.5"))
    found = {layer.source: layer for layer in made.layers}
    torch.testing.assert_close(flat(found["a"]), 0.5 * flat(lora.layers["a"]), atol=2e-3, rtol=2e-3)
    assert torch.equal(found["a"].tensors["diff_b"], 0.5 * tensors["a.diff_b"])
    assert torch.equal(found["n"].tensors["diff"], 0.5 * tensors["n.w_norm"])


def test_layers_without_a_matrix_stay_and_left_out_ones_are_named():
    weak = {f"b.lora_{part}.weight": 1e-4 * torch.ones(shape) for part, shape in (("up", (4, 2)), ("down", (2, 4)))}
    tensors = pair(torch.ones(4, 2), torch.ones(2, 4)) | weak | {"n.w_norm": torch.ones(4), "n.b_norm": torch.ones(4)}
    [made] = resize_by_recipes(layers_of(tensors, "x"), parse_recipes("params=1,thr=-2"))
    assert {layer.source for layer in made.layers} == {"a", "n"}
    assert "1 layer left out: b." in describe_ranks(made)
    with pytest.raises(ValueError, match="keeps nothing of x; set thr lower"):
        resize_by_recipes(layers_of(tensors, "x"), parse_recipes("params=1,thr=9"))
    with pytest.raises(ValueError, match="no layer with a rank to lower"):
        resize(layers_of({"n.w_norm": torch.ones(4)}, "x"), RankRule(rank=1))
    with pytest.raises(ValueError, match="no layer with a rank to lower"):
        resize_by_recipes(layers_of({"n.w_norm": torch.ones(4)}, "x"), parse_recipes("params=1,size=1"))
    with pytest.raises(ValueError, match="compares with the model; link the MODEL"):
        resize_by_recipes(layers_of(tensors, "x"), parse_recipes("fro_ckpt=1,thr=-2"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "rank of Resize LoRA is 0"),
        ({"mode": "sv_ratio", "value": 0.5}, "sv_ratio of Resize LoRA is 0.5"),
        ({"mode": "sv_fro", "value": 1.5}, "sv_fro of Resize LoRA is 1.5"),
        ({"mode": "sv_cumulative", "value": float("nan")}, "sv_cumulative of Resize LoRA is nan"),
    ],
)
def test_rules_without_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        RankRule(**settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; write one such as"),
        ("fro_ckpt=1,thrr=2", "has 'thrr' at character 12"),
        ("spn_lora=1,thr=-1:fro_ckpt=x,thr=1", "has 'x' as fro_ckpt at character 19"),
        ("fro_ckpt=1", "needs either thr or size"),
        ("fro_ckpt=1,thr=1,size=2", "needs either thr or size"),
        ("thr=-1", "names no reference with a weight"),
        ("fro_ckpt=1,fro_ckpt=2,thr=1", "has fro_ckpt twice, again at character 12"),
        ("fro_ckpt=1,thr=nan", "has 'nan' as thr at character 12"),
        ("fro_ckpt=1,thr", "has '' as thr at character 12"),
        ("fro_ckpt=1,size=0", "not above 0"),
        ("x" * 2000, "at most 1000 are read"),
    ],
)
def test_recipes_that_do_not_parse_name_the_character(text, said):
    with pytest.raises(ValueError, match=said):
        parse_recipes(text)


ODD_PAIRS = [
    ({"up": (4,), "down": (4, 4)}, 1.0, "impossible shapes"),
    ({"up": (4, 0), "down": (0, 4)}, 1.0, "impossible shape"),
    ({"up": (4, 3), "down": (2, 4)}, 1.0, "impossible shapes"),
    ({"up": (4, 2), "down": (2, 4), "alpha": (2,)}, 1.0, "impossible shape"),
    ({"up": (4, 2), "down": (2, 4)}, float("nan"), "values that are not finite"),
]


@pytest.mark.parametrize(("shapes", "value", "said"), ODD_PAIRS)
def test_broken_layers_are_named(shapes, value, said):
    endings = {"up": "lora_up.weight", "down": "lora_down.weight", "alpha": "alpha"}
    tensors = {f"a.{endings[part]}": torch.full(shape, value) for part, shape in shapes.items()}
    with pytest.raises(ValueError, match=rf"a(\.lora_up\.weight|\.alpha)? .*{said}|a in .*{said}|of a in .*{said}"):
        layers_of(tensors, "x")
    for empty in ({}, {"x": torch.zeros(1)}):
        with pytest.raises(ValueError, match="is no LoRA"):
            layers_of(empty, "x")
