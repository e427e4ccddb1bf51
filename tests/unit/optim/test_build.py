"""Optimizers: each is its library's, repeats from a saved state to the last bit, and is refused where it cannot run."""

import importlib
import inspect
import itertools
import json
import math
import sys
import types

import pytest
import pytorch_optimizer
import torch
from safetensors.torch import load, save

from lora_atelier.trainer_core.common.tensor_tree import pack, unpack
from lora_atelier.trainer_core.config import OPTIMIZERS, OptimizerConfig, SchedulerConfig
from lora_atelier.trainer_core.optim import (
    Ema,
    averaged,
    build,
    build_optimizer,
    check_optimizer,
    check_shapes,
    custom,
    describe,
    estimates,
    learning_rate,
    libraries,
    limit_gradients,
    remarks,
)
from lora_atelier.trainer_core.optim.average import ema_decay
from lora_atelier.trainer_core.optim.combined import Combined
from lora_atelier.trainer_core.optim.restore import lay_out_plainly

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONSTANT = SchedulerConfig(name="constant")
MUON = ["muon"] if hasattr(torch.optim, "Muon") else []  # since torch 2.9
PAGED = [name for name in OPTIMIZERS if name.startswith("paged_")]
RUN_HERE = [name for name in OPTIMIZERS if name not in (*PAGED, "muon")] + MUON
EVERY = [*RUN_HERE, *(pytest.param(name, marks=pytest.mark.gpu) for name in PAGED)]
SHAPES = ((6, 8), (8, 6, 1, 1), (80, 60), (4, 6, 3, 3), (1, 8))  # the third is large enough for 8 bits
LR = {name: kind.learning_rate if kind.estimates else 0.01 for name, kind in OPTIMIZERS.items()}


def device_of(name):
    """Return where an optimizer runs."""
    return "cuda" if name.startswith("paged") else "cpu"


def weights(dtype=torch.float32, device="cpu"):
    """Return parameters as a LoRA begins: the second of each pair is 0."""
    draws = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=draws) * (i != 1) for i, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(each.to(device, dtype)) for each in drawn]


def set_gradients(parameters, step):
    """Set those of a bowl around fixed targets with a little noise, a function of weights and step alone."""
    draws = torch.Generator().manual_seed(100 + step)
    for i, parameter in enumerate(parameters):
        noise = torch.randn(parameter.shape, generator=draws).to(parameter.device)
        parameter.grad = (parameter.detach().float() - i + 0.3 * noise).to(parameter.dtype)


def groups_of(parameters, lr, half=None):
    """Return two groups, of two models; half: the rate of the second."""
    first, second = parameters[:3], parameters[3:]
    other = lr if half is None else half
    return [
        {"params": first, "lr": lr, "base_lr": lr, "decays": True, "model": "unet"},
        {"params": second, "lr": other, "base_lr": other, "decays": False, "model": "te"},
    ]


def descend(optimizer, parameters, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def built(config, parameters, **options):
    return build_optimizer(config, groups_of(parameters, LR[config.name], **options), seed=5)


# What each class is called with, written out by hand: the test of the table.
DIRECT = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw8bit": {"betas": (0.9, 0.999), "eps": 1e-8},
    "paged_adamw8bit": {"betas": (0.9, 0.999), "eps": 1e-8},
    "ademamix8bit": {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8},
    "paged_ademamix8bit": {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8},
    "adafactor": {"beta1": None, "clip_threshold": 1.0, "relative_step": False, "scale_parameter": False},
    "came": {"betas": (0.9, 0.999, 0.9999), "clip_threshold": 1.0},
    "prodigy": {"use_bias_correction": True, "safeguard_warmup": True, "slice_p": 11},
    "prodigy_plus_schedule_free": {"betas": (0.9, 0.99), "split_groups": True},
    "schedulefree_adamw": {"betas": (0.9, 0.999)},
    "lion": {"betas": (0.9, 0.99)},
    "lion8bit": {"betas": (0.9, 0.99)},
    "paged_lion8bit": {"betas": (0.9, 0.99)},
    "sgd8bit": {"momentum": 0.9},
    "rmsprop8bit": {"alpha": 0.99},
    "adagrad8bit": {},
    "adopt": {"betas": (0.9, 0.9999), "eps": 1e-6, "weight_decouple": True},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"alpha": 0.99},
    "radam": {"decoupled_weight_decay": True},
    "soap": {"betas": (0.95, 0.95), "precondition_frequency": 10, "max_precondition_dim": 256},
    "automagic": {"beta2": 0.999, "clip_threshold": 1.0, "history": 4},
    "custom": {},
}
DECAY = {
    **dict.fromkeys(("adafactor", "sgd", "rmsprop", "prodigy_plus_schedule_free"), 0),
    "automagic": 0,
    **dict.fromkeys(("sgd8bit", "rmsprop8bit", "adagrad8bit"), 0),
    **dict.fromkeys(("lion", "lion8bit", "paged_lion8bit"), 0.05),
}


@pytest.mark.parametrize("name", [name for name in EVERY if name != "muon"])
def test_each_optimizer_goes_where_its_library_goes(name):
    ours, theirs = weights(device=device_of(name)), weights(device=device_of(name))
    optimizer = built(OptimizerConfig(name=name), ours)
    path = OPTIMIZERS[name].path or "pytorch_optimizer.AdEMAMix"
    module, _, kind = path.replace("atelier.", f"{build.__package__}.automagic.").rpartition(".")
    decay = {} if name == "custom" else {"weight_decay": DECAY.get(name, 0.01)}
    groups = [
        {"params": theirs[:3], "lr": LR[name], **decay},
        {"params": theirs[3:], "lr": LR[name], "weight_decay": 0.0},
    ]
    rate = {"lr": LR[name]} if name == "sgd8bit" else {}  # it has no default
    reference = getattr(importlib.import_module(module), kind)(groups, **rate, **DIRECT[name])
    if OPTIMIZERS[name].averages:
        reference.train()
    if OPTIMIZERS[name].lays_out:
        lay_out_plainly(reference)
    descend(optimizer, ours, range(20))
    descend(reference, theirs, range(20))
    if OPTIMIZERS[name].averages:  # what is used is the average in them
        reference.eval()
    with averaged(optimizer):
        for our, their, begin in zip(ours, theirs, weights(), strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)
            assert not torch.equal(our, begin)


def automagic(weights, gradients, lr, history):
    """Return where Automagic gets to, and its rate after each step, element by element in Python's numbers."""
    d, rates, rows, columns = 1.0, [], None, None
    signs = []
    for t, gradient in enumerate(gradients, 1):
        high, wide = len(gradient), len(gradient[0])
        squares = [[g * g for g in row] for row in gradient]
        row_means = [sum(row) / wide for row in squares]
        column_means = [sum(row[j] for row in squares) / high for j in range(wide)]
        rows = [0.999 * a + 0.001 * b for a, b in zip(rows or [0] * high, row_means, strict=True)]
        columns = [0.999 * a + 0.001 * b for a, b in zip(columns or [0] * wide, column_means, strict=True)]
        bias = 1 - 0.999**t
        middle = sum(rows) / high
        u = [
            [gradient[i][j] / math.sqrt(rows[i] * columns[j] / middle / bias) for j in range(wide)] for i in range(high)
        ]
        long = max(1.0, math.sqrt(sum(each * each for row in u for each in row) / (high * wide)))
        u = [[min(1.0, max(-1.0, each / long)) for each in row] for row in u]
        signs.append([[each > 0 for each in row] for row in u])
        weights = [[w - lr * d * each for w, each in zip(*pair, strict=True)] for pair in zip(weights, u, strict=True)]
        agreed = whole = 0.0
        for i, j in ((i, j) for i in range(high) for j in range(wide) if t >= history):
            last = [sign[i][j] for sign in signs[-history:]]
            flips = [a != b for a, b in itertools.pairwise(last)]
            agreed += abs(u[i][j]) * (not any(flips)) - abs(u[i][j]) * all(flips)
            whole += abs(u[i][j])
        d *= math.exp(agreed / whole) if whole else 1
        rates.append(d)
    return weights, rates


@pytest.mark.parametrize("history", [2, 3, 8])
def test_automagic_follows_its_rule(history):
    draws = torch.Generator().manual_seed(history)
    gradients = torch.randn(14, 5, 7, generator=draws, dtype=torch.float64)
    gradients[:, :2] = gradients[:1, :2]  # some keep their direction
    gradients[1::2, 2:4] = -gradients[::2, 2:4]  # some go to and fro
    begin = torch.randn(5, 7, generator=draws, dtype=torch.float64)
    parameter = torch.nn.Parameter(begin.float())
    config = OptimizerConfig(name="automagic", options={"history": history})
    optimizer = build_optimizer(config, [{"params": [parameter], "lr": 0.02}])
    rates = []
    for gradient in gradients:
        parameter.grad = gradient.float()
        optimizer.step()
        rates.append(learning_rate(optimizer) / 0.02)
    weights, expected = automagic(begin.tolist(), gradients.tolist(), 0.02, history)
    assert rates == pytest.approx(expected, rel=1e-5) and rates[history - 2] == 1 != rates[history - 1]
    torch.testing.assert_close(parameter.detach().double(), torch.tensor(weights).double(), rtol=1e-5, atol=1e-5)


def test_automagic_finds_one_rate_from_far_apart():
    """In a noisy bowl a small rate rises, as weights move one way, and a large one falls, as they jump across."""
    found = []
    for rate in (1e-4, 1e-2, 3.0):
        draws = torch.Generator().manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(32, 32, generator=draws) + 2)
        optimizer = build_optimizer(OptimizerConfig(name="automagic"), [{"params": [parameter], "lr": rate}])
        for _ in range(80):
            parameter.grad = parameter.detach() + torch.randn(32, 32, generator=draws)
            optimizer.step()
        found.append(learning_rate(optimizer))
    assert max(found) < 2 * min(found) and 0.02 < min(found) < 0.2


@pytest.mark.skipif(not MUON, reason="torch has no Muon before 2.9")
def test_muon_trains_matrices_and_adamw_all_else():
    """Embeddings, magnitudes and single rows are no matrices; steps are as long as AdamW's."""
    ours, theirs, row = weights(), weights(), [torch.nn.Parameter(torch.ones(2, 8))]
    groups = [*groups_of(ours, 0.01), {"params": row, "lr": 0.01, "decays": False, "model": "embedding x"}]
    optimizer = build_optimizer(OptimizerConfig(name="muon"), groups)
    matrices, others = optimizer.parts
    assert [type(part) for part in optimizer.parts] == [torch.optim.Muon, torch.optim.AdamW]
    assert [p for g in matrices.param_groups for p in g["params"]] == [ours[0], ours[2]]
    assert {group["weight_decay"] for group in others.param_groups} == {0.01, 0.0}
    muon = torch.optim.Muon([theirs[0], theirs[2]], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [theirs[1]], "weight_decay": 0.01}, {"params": theirs[3:], "weight_decay": 0.0}], lr=0.01
    )
    for step in range(20):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for each in (optimizer, muon, adamw):
            each.step()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)
    before = ours[0].detach().clone()
    matrices.step()
    length = (ours[0].detach() - before * (1 - 0.01 * 0.01)).square().mean().sqrt()
    assert 0.1 < length / 0.01 < 0.3  # AdamW's is about 0.2


def test_without_muon_in_torch_there_is_a_sentence(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"needs the package torch 2.9 or newer, .* no class Muon; .* choose adamw"):
        check_optimizer(OptimizerConfig(name="muon"), CONSTANT, CPU)


@pytest.mark.parametrize(
    ("left_out", "same", "momentum"), [("LAMB8bit", "Adam8bit", {}), ("LARS8bit", "SGD8bit", {"momentum": 0.9})]
)
def test_what_bitsandbytes_names_lamb_and_lars_is_its_adam_and_sgd(left_out, same, momentum):
    """With state in 8 bits; so the table leaves them out. Where this fails, a newer bitsandbytes has them."""
    import bitsandbytes

    found = []
    for name in (left_out, same):
        large = weights()[2:3]
        descend(getattr(bitsandbytes.optim, name)(large, lr=0.01, **momentum), large, range(5))
        found.append(large[0])
    assert torch.equal(*found)


def test_adam_in_8_bits_is_adamw_in_8_bits():
    import bitsandbytes

    found = []
    for name in ("Adam8bit", "AdamW8bit"):
        large = weights()[2:3]
        descend(getattr(bitsandbytes.optim, name)(large, lr=0.01, weight_decay=0.1), large, range(5))
        found.append(large[0])
    assert torch.equal(*found)


def closed_form(name, w, decay, lr=0.01, steps=20):
    """Return where torch's optimizers get to, from the papers' formulas in float64."""
    m, v, w = torch.zeros_like(w), torch.zeros_like(w), w.clone()
    for t in range(1, steps + 1):
        holder = torch.nn.Parameter(w)
        g = yield holder, t - 1
        if name == "sgd":
            m = 0.9 * m + g if t > 1 else g
            w = w - lr * (g + 0.9 * m)
            continue
        if name == "rmsprop":
            v = 0.99 * v + 0.01 * g * g
            w = w - lr * g / (v.sqrt() + 1e-8)
            continue
        w = w * (1 - lr * decay)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mean, square = m / (1 - 0.9**t), (v / (1 - 0.999**t)).sqrt() + 1e-8
        if name == "adamw":
            w = w - lr * mean / square
            continue
        longest = 2 / 0.001 - 1  # Liu et al. 2020, algorithm 2
        length = longest - 2 * t * 0.999**t / (1 - 0.999**t)
        if length > 5:
            top = (length - 4) * (length - 2) * longest
            square = square / math.sqrt(top / ((longest - 4) * (longest - 2) * length))
        else:
            square = 1.0
        w = w - lr * mean / square
    yield torch.nn.Parameter(w), steps


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "radam"])
def test_torchs_own_follow_the_papers(name):
    begin = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(begin.clone())
    decay = 0.1 if name in ("adamw", "radam") else 0.0
    config = OptimizerConfig(name=name, options={"weight_decay": decay})
    descend(build_optimizer(config, [{"params": [parameter], "lr": 0.01}]), [parameter], range(20))
    formula = closed_form(name, begin.double(), decay)
    found, step = next(formula)
    while step < 20:
        set_gradients([found], step)
        found, step = formula.send(found.grad)
    torch.testing.assert_close(parameter.detach().double(), found.detach(), rtol=1e-5, atol=1e-6)


def round_trip(state):
    """Take a state dict through a safetensors file and JSON and back."""
    tensors = {}

    def pack(value):
        if isinstance(value, torch.Tensor):
            tensors[str(len(tensors))] = value.clone().contiguous()
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(value, dict):
            return {"dict": [[pack(k), pack(v)] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [pack(v) for v in value]}
        assert value is None or isinstance(value, bool | int | float | str), type(value)
        return value

    def unpack(value):
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return read[content]
        if kind == "dict":
            return {unpack(k): unpack(v) for k, v in content}
        return (tuple if kind == "tuple" else list)(unpack(v) for v in content)

    text, read = json.dumps(pack(state)), load(save(tensors))
    return unpack(json.loads(text))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_each_resumes_from_its_state_to_the_last_bit(name, dtype):
    """Schedule-free ones are validated in between; Prodigy is built twice, for two rates."""
    config = OptimizerConfig(name=name)
    two = {"half": 0.5} if OPTIMIZERS[name].estimates else {}
    whole, first = (weights(dtype, device_of(name)) for _ in range(2))
    descend(built(config, whole, **two), whole, range(15))
    optimizer = built(config, first, **two)
    descend(optimizer, first, range(7))
    again = [torch.nn.Parameter(p.detach().clone()) for p in first]
    other = built(config, again, **two)
    state = round_trip(optimizer.state_dict())
    check_shapes(other, state, lambda groups: build_optimizer(config, groups))
    other.load_state_dict(state)
    with averaged(other):
        used = [p.detach().clone() for p in again]
    assert any(map(torch.equal, used, again)) != OPTIMIZERS[name].averages
    descend(other, again, range(7, 15))
    for one, two in zip(whole, again, strict=True):
        assert one.dtype == two.dtype == dtype and torch.equal(one, two)


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_state_of_other_shapes_is_named(name):
    config, parameters = OptimizerConfig(name=name), weights()
    optimizer = built(config, parameters)
    descend(optimizer, parameters, range(2))
    parts = round_trip(optimizer.state_dict())
    numbers = [values for part in parts.get("parts", [parts]) for values in part["state"].values()]
    numbers += [value for values in numbers for value in values.values() if isinstance(value, dict)]
    held = [(values, key) for values in numbers for key, value in values.items() if tensor_of_many(value)]
    assert held
    for values, key in held:
        whole = values[key]
        for odd in (whole.flatten()[1:], torch.zeros(7, 7, 7), "text"):
            values[key] = odd
            with pytest.raises(LookupError, match="of other shapes"):
                check_shapes(optimizer, parts, lambda groups: build_optimizer(config, groups))
        values[key] = whole
    check_shapes(optimizer, parts, lambda groups: build_optimizer(config, groups))
    for part in parts.get("parts", [parts]):
        part["param_groups"][0]["params"].pop()
    with pytest.raises(LookupError, match=r"is of \d parameters, not of"):
        check_shapes(optimizer, parts, lambda groups: build_optimizer(config, groups))


def tensor_of_many(value):
    return isinstance(value, torch.Tensor) and value.numel() > 1


def move(optimizer, scaler, loss, config):
    """Take one step as the loop does: unscale, limit, and step only where loss and gradient are finite."""
    scaler.unscale_(optimizer)
    norm = float(limit_gradients([p for group in optimizer.param_groups for p in group["params"]], config))
    finite = math.isfinite(norm) and math.isfinite(loss)
    if finite:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_step_that_is_not_finite_changes_nothing(name):
    """With and without the loss scale of float16. Nor do weights without a gradient stop the others."""
    config = OptimizerConfig(name=name, max_grad_norm=1.0, max_grad_value=0.2)
    plain, broken = weights(), weights()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales) for scales in (False, True)]

    def take(parameters, optimizer, scaler, step, spoilt=1.0, loss=0.5):
        set_gradients(parameters, step)
        scale = float(scaler.scale(torch.ones(())))  # a power of 2, so that nothing is rounded
        for i, parameter in enumerate(parameters):
            parameter.grad = None if step in (4, 5) and i >= 3 else parameter.grad * scale
        parameters[2].grad[0, 0] *= spoilt
        return move(optimizer, scaler, loss, config)

    for parameters, scaler in zip((plain, broken), scalers, strict=True):
        optimizer = built(config, parameters)
        for step in range(6):
            if parameters is broken and step in (0, 3):
                assert take(parameters, optimizer, scaler, 50, spoilt=math.inf if step else math.nan)[1] is False
                assert take(parameters, optimizer, scaler, 50, loss=math.nan)[1] is False
            norm, updated = take(parameters, optimizer, scaler, step)
            assert updated and norm > 1
    assert all(map(torch.equal, plain, broken))


def test_gradients_are_limited_by_norm_and_then_by_value():
    parameter = torch.nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(
        name="sgd", options={"momentum": 0.0, "nesterov": False}, max_grad_norm=1.0, max_grad_value=0.7
    )
    optimizer = build_optimizer(config, [{"params": [parameter], "lr": 1.0}])
    parameter.grad = torch.tensor([3.0, -4.0])
    assert move(optimizer, torch.amp.GradScaler("cpu", enabled=False), 1.0, config) == (5.0, True)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, 0.7]))


def test_weight_decay_leaves_alone_what_must_not_decay():
    for name in ("adamw", "came", "adopt", "lion", "custom"):
        options = (
            {"arguments": "weight_decay=0.5", "optimizer": "StableAdamW"} if name == "custom" else {"weight_decay": 0.5}
        )
        parameters = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3, 3))]
        groups = [
            {"params": [parameters[0]], "lr": 0.1, "decays": True},
            {"params": [parameters[1]], "lr": 0.1, "decays": False},
        ]
        optimizer = build_optimizer(OptimizerConfig(name=name, options=options), groups)
        for parameter in parameters:
            parameter.grad = torch.zeros(3, 3)
        optimizer.step()
        assert parameters[0].max() < 1 and torch.equal(parameters[1].detach(), torch.ones(3, 3)), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1e-6, 1.58e-6, 3.9e-3)),
        ({"d_coef": 4.0}, (1e-6, 6.3e-6, 0.856)),
        ({"use_bias_correction": True, "safeguard_warmup": True}, (1e-6, 1e-6, 1e-6)),
    ],
)
def test_prodigy_finds_its_step_size_and_reports_it(options, expected):
    parameter = torch.nn.Parameter(torch.ones(20))
    plain = {"use_bias_correction": False, "safeguard_warmup": False, "slice_p": 1, "weight_decay": 0.0}
    config = OptimizerConfig(name="prodigy", options={**plain, **options}, learning_rate=1.0)
    optimizer = build_optimizer(config, [{"params": [parameter], "lr": 1.0}])
    found = []
    for _ in range(10):
        (parameter**2).sum().div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(learning_rate(optimizer))
    assert (found[0], found[1], found[9]) == pytest.approx(expected, rel=0.04)  # where it starts shows in the tenth
    assert found == sorted(found)
    optimizer.param_groups[0]["lr"] = 0.5
    assert learning_rate(optimizer) == pytest.approx(found[-1] / 2)


def test_one_step_size_for_equal_rates_and_one_for_each_that_differs():
    for separate, half, count in ((False, None, 1), (False, 0.5, 2), (True, None, 2), (True, 0.5, 2)):
        options = {"separate": separate, "use_bias_correction": False, "safeguard_warmup": False}
        config = OptimizerConfig(name="prodigy", options=options)
        parameters = weights()
        optimizer = built(config, parameters, half=half)
        descend(optimizer, parameters, range(12))
        assert len({group["d"] for group in optimizer.param_groups}) == count


def test_relative_step_tells_its_own_rate():
    parameters = weights()
    optimizer = built(OptimizerConfig(name="adafactor", options={"relative_step": True}), parameters)
    descend(optimizer, parameters, range(3))
    assert learning_rate(optimizer) == 0.01
    state = next(iter(optimizer.state.values()))
    assert learning_rate(optimizer) == optimizer._get_lr(optimizer.param_groups[0], state)


@pytest.mark.parametrize(
    ("every", "kept"),
    [
        (1, {0: 0.1, 1: 0.18182, 9: 0.52632, 99: 0.91743, 999: 0.99108, 8989: 0.999}),
        (5, {0: 0.1**5, 20_000: 0.995010}),
    ],
)
def test_the_running_average_warms_up(every, kept):
    for updates, decay in kept.items():
        assert ema_decay(updates, 0.999, every) == pytest.approx(decay, abs=5e-6)


@pytest.mark.parametrize("device", ["same", "cpu"])
def test_the_running_average_is_kept_beside_the_weights_and_swapped_in(device):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]).to(torch.bfloat16))
    ema, expected = Ema([parameter], 0.5, every=2, device=device), torch.tensor([1.0, -2.0])
    for step in range(1, 9):
        parameter.data = torch.tensor([float(step), step**0.5]).to(torch.bfloat16)
        ema.update(step)
        if step % 2 == 0:
            decay = min(0.5, step / 2 / (9 + step / 2)) ** 2
            expected = decay * expected + (1 - decay) * parameter.detach().float()
    before = parameter.data
    with ema.swapped():
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter.detach(), expected)
    assert parameter.data is before or torch.equal(parameter.data, before)
    assert parameter.dtype == torch.bfloat16


class Momentum(torch.optim.Optimizer):
    """Stands for an optimizer of a library: what libraries refuse, and call their own, changes with their versions."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0):
        if not 0 <= beta < 1:
            raise ValueError(f"beta {beta} is not in [0, 1)")
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(self.move(state, state["mean"]), alpha=group["lr"])

    def move(self, state, mean):
        """Compute the update of a parameter at a learning rate of 1."""
        return mean


class Scheduled(Momentum):
    def __init__(self, params, length, lr=1e-3):
        super().__init__(params, lr)


class Unrated(Momentum):
    def __init__(self, params, beta=0.9):
        super().__init__(params, 1.0, beta)


class Around(torch.optim.Optimizer):
    def __init__(self, optimizer, lr=1e-3):
        self.optimizer = optimizer


class Searching(Momentum):
    def step(self, closure):
        closure()


class Drawing(Momentum):
    def move(self, state, mean):
        return mean + torch.randn(mean.shape)


class Resting(Momentum):
    def move(self, state, mean):
        return torch.zeros_like(mean)


class Growing(Momentum):
    def move(self, state, mean):
        return mean / 0


class Projecting(Momentum):
    def move(self, state, mean):
        state["projector"] = object()
        return mean


class Forgetful(Momentum):
    """Counts outside of its state."""

    moved = 0

    def move(self, state, mean):
        self.moved += 1
        return mean / self.moved


class Turned(Momentum):
    """Keeps its state in another order than parameters, and goes by that, as sums of matrix products do."""

    def move(self, state, mean):
        turned = state.setdefault("turned", torch.zeros(mean.shape[::-1]).permute(*reversed(range(mean.ndim))))
        turned.copy_(mean)
        return mean if turned.stride() == mean.stride() else mean.sign()


class Iterating(Momentum):
    """Repeats each step a number of times, as an optimizer does that iterates to a square root."""

    def __init__(self, params, lr=1e-2, iterations=1):
        super().__init__(params, lr)
        self.iterations = iterations

    def step(self, closure=None):
        for _ in range(self.iterations):
            super().step()


class Guessing(torch.optim.SGD):
    """Holds its estimate in its groups, as all that estimate one do."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"] = 1e-6


OURS = (
    Guessing,
    *(Momentum, Scheduled, Unrated, Around, Searching, Drawing, Resting, Growing, Projecting, Forgetful, Turned),
    Iterating,
)


@pytest.fixture
def library(monkeypatch):
    """Add our own classes to the library that optimizers are looked up in."""
    for kind in OURS:
        monkeypatch.setattr(pytorch_optimizer, kind.__name__, kind, raising=False)


WRONG = [  # name or class, arguments, what the sentence says
    ("AdamWW", "", r"no optimizer 'AdamWW' in torch.optim, pytorch_optimizer, .*; did you mean AdamW"),
    ("ademamix", "", "did you mean AdEMAMix"),
    ("qqqq", "", "for example AdEMAMix"),
    ("torch.optim.Optimizer", "", "no optimizer 'Optimizer' in torch.optim; for example"),
    ("pytorch_optimizer.load_optimizer", "", "no optimizer 'load_optimizer' in pytorch_optimizer; "),  # a function
    ("torch.optim.lr_scheduler.StepLR", "", "'torch.optim.lr_scheduler' is no library of optimizers; write the class"),
    ("os.system", "", "'os' is no library of optimizers; write the class alone, or after one of torch.optim, pytorch_"),
    ("", "", "no optimizer ''"),
    ("Momentum", "weight_dekay=1", "Momentum has no parameter 'weight_dekay'; did you mean weight_decay"),
    ("Momentum", "zzz=1", "has no parameter 'zzz'; it has beta, weight_decay"),
    ("Momentum", "lr=1", "lr is set by learning_rate"),
    ("Momentum", "beta", "cannot be read; write name=value"),
    ("Momentum", "beta=", "cannot be read; write name=value"),
    ("Momentum", "beta=1) + print(2", "cannot be read; write name=value"),
    ("Momentum", "beta=__import__('os')", "beta in arguments is no plain value"),
    ("Momentum", "**{'beta': 1}", "has no parameter None"),
    ("Momentum", "beta=-1", r"Momentum does not work with these settings: beta -1 is not in \[0, 1\)"),
    ("Momentum", "beta={[]: 1}", "beta in arguments is no plain value; write name"),
    ("Momentum", "beta=" + "(" * 400, "cannot be read; write name=value"),
    ("Momentum", "beta=" + "-" * 900 + "1", "is no plain value|cannot be read"),
    ("Momentum", "beta=" + "-" * 100_000 + "1", "arguments of Optimizer has 100006 characters; shorten it to 1000"),
    ("A" * 100_000, "", "optimizer of Optimizer has 100000 characters; write the name of a class"),
    ("torch.optim.AdamW", "capturable=True", "AdamW does not work with these settings: .*capturable"),
    ("Momentum", "beta='x'", "Momentum does not work with these settings: "),
    ("Around", "", "does not take parameters as its first argument"),
    ("Unrated", "", "has no learning rate"),
    ("Scheduled", "", "needs length; add length="),
    ("Searching", "", "does not work with these settings: .*closure"),
    ("Drawing", "", "uses random numbers outside the run's seed"),
    ("Resting", "", "does not change the weights in 8 trial steps"),
    ("Growing", "", "makes weights that are not finite"),
    ("Projecting", "", r"state of Projecting cannot be saved \(.state.0.projector is a object; .*choose another"),
    (
        "Iterating",
        f"iterations={10**15}",
        "takes more than 100000 operations in 8 trial steps; lower the",
    ),
    ("Forgetful", "", "Forgetful takes other steps after its state is saved and loaded, so a stopped run"),
]


@pytest.mark.parametrize(("kind", "arguments", "sentence"), WRONG, ids=lambda value: str(value)[:24])
def test_a_custom_optimizer_is_checked_before_the_run(kind, arguments, sentence, library):
    config = OptimizerConfig(name="custom", options={"optimizer": kind, "arguments": arguments})
    with pytest.raises(ValueError, match=sentence):
        check_optimizer(config, CONSTANT, CPU)


def test_a_state_in_any_order_of_memory_is_gone_on_with(library):
    """Whatever the order is, and whatever a processor makes of it: SPlus keeps eigenvectors as they come."""
    for kind in ("Turned", "SPlus"):
        config = OptimizerConfig(name="custom", options={"optimizer": kind, "arguments": ""})
        check_optimizer(config, CONSTANT, CPU)
        parameters = weights()
        optimizer = built(config, parameters)
        descend(optimizer, parameters, range(2))
        again = built(config, weights())
        again.load_state_dict(unpack(*pack(optimizer.state_dict())))
        ours, theirs = (each.state_dict()["state"] for each in (optimizer, again))
        tensors = [pack(state)[1] for state in (ours, theirs)]
        assert tensors[0] == tensors[1] and "strides" in repr(tensors[0])


def test_custom_optimizers_that_can_run(library):
    for kind, arguments in (
        ("AdEMAMix", "betas=(0.9, 0.999, 0.9999), weight_decay=0.01,"),
        ("torch.optim.NAdam", "momentum_decay=0.005"),
        ("pytorch_optimizer.RAdam", ""),
        ("Scheduled", "length=100"),
        ("Iterating", "iterations=20"),
        ("ScheduleFreeRAdam", ""),
    ):
        config = OptimizerConfig(name="custom", options={"optimizer": kind, "arguments": arguments})
        check_optimizer(config, CONSTANT, CPU)
        assert describe(config).split("(")[0].endswith(kind.rpartition(".")[2])
    with pytest.raises(ValueError, match="ScheduleFreeRAdam replaces the schedule, which is cosine"):
        check_optimizer(config, SchedulerConfig(name="cosine"), CPU)
    with pytest.raises(ValueError, match="ScheduleFreeRAdam averages the weights already"):
        check_optimizer(config.replace(ema_decay=0.9), CONSTANT, CPU)


@pytest.mark.parametrize("kind", ["DAdaptAdam", "pytorch_optimizer.Prodigy", "prodigyopt.Prodigy", "Guessing"])
def test_a_class_that_estimates_its_step_size_is_known_by_its_name_or_its_groups(kind, library):
    config = OptimizerConfig(name="custom", options={"optimizer": kind}, text_encoder_learning_rate=5e-5)
    assert estimates(config)
    (remark,) = remarks(config)
    assert (
        "estimates its step size, and learning_rate 0.0001 multiplies it; set learning_rate of Optimizer to 1" in remark
    )
    assert not remarks(config.replace(learning_rate=1.0, text_encoder_learning_rate=1.0))
    check_optimizer(config, CONSTANT, CPU)  # of several learning rates
    with pytest.raises(ValueError, match="does not work with restarts"):
        check_optimizer(config, SchedulerConfig(name="rex_restarts"), CPU)
    with pytest.raises(ValueError, match="estimates one step size for all parts of a layer; set lora_plus_ratio"):
        check_optimizer(config.replace(lora_plus_ratio=4), CONSTANT, CPU)
    one, other = weights(), weights()
    groups = [{"params": one, "lr": 1.0, "model": "unet"}, {"params": other, "lr": 0.5, "model": "text"}]
    assert isinstance(build_optimizer(config, groups), Combined)


def test_a_setting_that_is_called_d_is_no_estimate():
    """torch's Adafactor clips updates to it."""
    config = OptimizerConfig(name="custom", options={"optimizer": "torch.optim.Adafactor", "arguments": "d=2.0"})
    assert not estimates(config) and not remarks(config)
    optimizer = build_optimizer(config, [{"params": weights(), "lr": 0.01}])
    assert learning_rate(optimizer) == 0.01


def test_a_name_never_imports_a_module_that_is_no_library(tmp_path, monkeypatch):
    """A workflow of a stranger's may name anything."""
    (tmp_path / "trap.py").write_text("from torch.optim import AdamW\nraise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("trap.AdamW", "trap", "trap.trap.AdamW", "torch.optim.trap.AdamW"):
        with pytest.raises(ValueError, match=r"is no library of optimizers|There is no optimizer"):
            check_optimizer(OptimizerConfig(name="custom", options={"optimizer": name}), CONSTANT, CPU)
    assert "trap" not in sys.modules


def test_a_library_that_is_not_installed_is_passed_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert custom.find_class("Prodigy").__module__.startswith("prodigyopt")
    with pytest.raises(ValueError, match=r"no optimizer 'AdEMAMi' in .* \(not installed: pytorch-optimizer"):
        custom.find_class("AdEMAMi")
    with pytest.raises(ValueError, match=r"in pytorch_optimizer \(not installed: pytorch-optimizer\); for example"):
        custom.find_class("pytorch_optimizer.AdEMAMix")


@pytest.mark.parametrize("library", libraries.LIBRARIES)
def test_every_library_gives_optimizers(library):
    """Those that are not among the packages for development are stood in for."""
    try:
        found = libraries.classes(library)
    except ImportError:
        assert library in ("lion_pytorch", "dadaptation")
        module = types.ModuleType(library)
        module.Ours, module.other = type("Ours", (torch.optim.SGD,), {}), print
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, library, module)
            assert custom.find_class(f"{library}.Ours") is module.Ours
            assert libraries.classes(library) == {"Ours": module.Ours}
        return
    assert found and "Optimizer" not in found
    assert all(issubclass(kind, torch.optim.Optimizer) for kind in found.values())


def test_schedules_that_an_optimizer_does_not_go_with(monkeypatch):
    cosine = SchedulerConfig(name="cosine")
    for name in ("schedulefree_adamw", "prodigy_plus_schedule_free"):
        check_optimizer(OptimizerConfig(name=name), CONSTANT, CPU)
        with pytest.raises(ValueError, match=f"{name} replaces the schedule, which is cosine"):
            check_optimizer(OptimizerConfig(name=name), cosine, CPU)
    check_optimizer(OptimizerConfig(name="prodigy"), cosine, CPU)
    relative = OptimizerConfig(name="adafactor", options={"relative_step": True})
    with pytest.raises(ValueError, match="relative_step of Optimizer to off"):
        check_optimizer(relative, cosine, CPU)
    assert "ignores the size of learning rates" in remarks(relative)[0]
    assert "learning_rate 0.0001 multiplies it" in remarks(OptimizerConfig(name="prodigy"))[0]
    assert remarks(OptimizerConfig(name="prodigy", learning_rate=1)) == remarks(OptimizerConfig()) == []


def test_what_is_missing_or_cannot_run_here_is_reported_in_a_sentence(monkeypatch):
    for name in OPTIMIZERS:
        if name not in PAGED:
            check_optimizer(OptimizerConfig(name=name, learning_rate=LR[name]), CONSTANT, CPU)
    for name in PAGED:
        plain = name.removeprefix("paged_")
        with pytest.raises(ValueError, match=f"{name} needs an NVIDIA GPU; set name of Optimizer to {plain}"):
            check_optimizer(OptimizerConfig(name=name), CONSTANT, CPU)
        check_optimizer(OptimizerConfig(name=name), CONSTANT, CUDA)
    with monkeypatch.context() as patched:
        patched.setattr(build, "SINCE_ON_CPU", (99, 0))
        with pytest.raises(
            ValueError, match=r"adamw8bit on cpu needs bitsandbytes 99\.0 or newer, and .* is installed"
        ):
            build_optimizer(OptimizerConfig(name="adamw8bit"), [{"params": weights(), "lr": 1.0}])
        check_optimizer(OptimizerConfig(name="adamw8bit"), CONSTANT, CUDA)

    import pytorch_optimizer
    from prodigyopt import Prodigy

    came = OptimizerConfig(name="came")
    with monkeypatch.context() as patched:
        patched.delattr(pytorch_optimizer, "CAME")
        with pytest.raises(
            ValueError,
            match=r"came needs the package pytorch-optimizer 4\.0 or newer, and the installed one has no class CAME; "
            "update it with ComfyUI's Python, or choose adafactor",
        ):
            check_optimizer(came, CONSTANT, CPU)
    with monkeypatch.context() as patched:
        patched.setattr(Prodigy, "__init__", lambda self, params, lr=1.0: None)
        with pytest.raises(ValueError, match=r"prodigyopt 1\.1 or newer, and the installed one has no parameter"):
            check_optimizer(OptimizerConfig(name="prodigy", learning_rate=1), CONSTANT, CPU)
    for package in ("bitsandbytes", "prodigyopt", "prodigyplus", "pytorch_optimizer", "schedulefree"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, kind in OPTIMIZERS.items():
        if kind.wanted and kind.package != "torch":
            with pytest.raises(ValueError) as refused:
                check_optimizer(OptimizerConfig(name=name), CONSTANT, CUDA)
            begin = f"{name} needs the package {kind.package} {kind.wanted} or newer, which cannot be imported ("
            assert str(refused.value).startswith(begin)
            assert str(refused.value).endswith(f"install it with ComfyUI's Python, or choose {kind.instead}.")


def test_the_tables_defaults_are_known_to_the_classes():
    for name in RUN_HERE:
        config = OptimizerConfig(name=name)
        known = inspect.signature(build.optimizer_class(config).__init__).parameters
        assert set(build.arguments(config)) <= set(known), name
