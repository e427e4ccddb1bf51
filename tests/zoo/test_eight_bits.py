"""Linked models whose frozen layers multiply in 8 bits: as ComfyUI itself does, where their files are in them."""

import itertools
import json
from contextlib import contextmanager
from types import SimpleNamespace

import comfy.ops
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from old_processor import exact_sums  # noqa: F401 (a fixture)
from train_graph import draw_pictures
from zoo.again import again
from zoo.linked import linked
from zoo.test_frozen import patched, with_weights
from zoo.test_train import configure, run
from zoo.trial import Trial
from zoo.zoo import ZOO, build, fill, patcher_of, settings

from lora_atelier.nodes.comfyui.connected import frozen, gradients, host
from lora_atelier.trainer_core.config import MemoryConfig, SampleConfig, SavesConfig
from lora_atelier.trainer_core.memory import (
    HOLDS,
    STORED,
    hold_rounded,
    multiply_in,
    release_rounded,
    rounded,
    rounded_bytes,
    takes_sides,
)
from lora_atelier.trainer_core.networks.layers.shape import is_linear
from lora_atelier.trainer_core.preflight import measured
from lora_atelier.trainer_core.training import compute
from lora_atelier.trainer_core.training.compute import cosine

NAME = "flux_dev"
GROUP = 16  # of ConvRot: a power of 4 that divides the tiny model's sides
FORMATS = {
    "int8": ("int8", {"format": "int8_tensorwise"}, {"per_channel": True}),
    "ConvRot": (
        "int8",
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP},
        {"per_channel": True, "convrot": True, "convrot_groupsize": GROUP},
    ),
    "float8": ("float8", {"format": "float8_e4m3fn"}, {"scale": "recalculate"}),
}


def inner(model):
    """List the linear layers of the blocks that can multiply in 8 bits, by name."""
    named = model.diffusion_model.named_modules()
    blocks = [(name, m) for name, m in named if is_linear(m) and "blocks" in name and "mod" not in name]
    return {name: m for name, m in blocks if takes_sides(*m.weight.shape)}


def filed(form):
    """Build a model as ComfyUI loads a file whose blocks are in 8 bits, and one of the same numbers."""
    kind, config, more = FORMATS[form]
    base = build(NAME)[0]
    chosen, numbers = inner(base), dict(base.diffusion_model.state_dict())
    state = dict(numbers)
    for name, module in chosen.items():
        layout = QUANT_ALGOS[config["format"]]["comfy_tensor_layout"]
        packed = QuantizedTensor.from_float(module.weight.detach(), layout, **more)
        numbers[f"{name}.weight"] = packed.dequantize()
        state[f"{name}.weight"], state[f"{name}.weight_scale"] = packed._qdata, packed._params.scale
        state[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
    own = settings(NAME, torch.float32, torch.float32)
    own.quant_config = {"mixed_ops": True}
    own.custom_operations = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32)
    with ZOO[NAME].building():
        model = own.get_model({}, "", device="cpu")
    fill(model, 0)
    model.diffusion_model.load_state_dict(state, strict=False)
    assert all(isinstance(m.weight, QuantizedTensor) for m in inner(model).values()) and len(inner(model)) > 5
    reference = build(NAME)
    reference[0].diffusion_model.load_state_dict(numbers)
    return (model, patcher_of(model)), reference, kind


def passed(built, kind=""):
    """Predict, and find a network's gradients, with the blocks' layers multiplied as asked."""
    trial = Trial(NAME, built=built, tokens=(40,))
    with gradients.session(trial.patcher), trial.network.attached():
        multiply_in(kind, inner(trial.model).values())
        with torch.no_grad():
            prediction = trial.predict()
        found = torch.cat([gradient.flatten() for gradient in trial.gradients()])
    assert not any("multiplies_in" in module.__dict__ for module in trial.model.modules())
    return prediction, found


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_in_8_bits_multiplies_bit_by_bit_as_comfyui_does(form):
    built, reference, kind = filed(form)
    outputs = {}
    for name, layer in inner(built[0]).items():
        x = torch.randn(1, 40, layer.weight.shape[1], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            own, exact = layer(x), reference[0].diffusion_model.get_submodule(name)(x)
        assert not torch.equal(own, exact) and cosine(own, exact) > 0.999
        outputs[name] = x, own, exact
    with gradients.session(built[1]):
        multiply_in(kind, inner(built[0]).values())
        for name, layer in inner(built[0]).items():
            x, own, exact = outputs[name]
            assert torch.equal(layer(x.clone().requires_grad_()), own), name
            few = layer(x[:, :16])
            assert torch.allclose(few, exact[:, :16], atol=1e-4), name
    (prediction, found), (expected, exactly) = passed(built, kind), passed(reference)
    assert not torch.equal(prediction, expected)
    assert cosine(prediction, expected) > 0.999 and cosine(found, exactly) > 0.99


AT_USE = [("plain", "int8"), ("bfloat16", "float8"), ("patched at use", "int8")]
FORMS = ("plain", "bfloat16", "patched at use")
AS_OTHERS = [(form, kind) for form in FORMS for kind in STORED if (form, kind) not in AT_USE]


@pytest.mark.parametrize(("form", "kind"), [*AT_USE, *again(*AS_OTHERS)])
def test_other_weights_are_rounded_at_use(form, kind):
    if form == "patched at use":
        model, patcher, reference = patched(NAME, loaded="partly")
        built = model, patcher
    elif form == "bfloat16":
        built = build(NAME, dtype=torch.bfloat16, compute=torch.float32)
        reference = with_weights(NAME, built[0].state_dict())
    else:
        built, reference = build(NAME), build(NAME)
    (prediction, found), (expected, exactly) = passed(built, kind), passed(reference)
    assert not torch.equal(prediction, expected)
    assert cosine(prediction, expected) > 0.999 and cosine(found, exactly) > 0.99
    assert cosine(passed(built)[1], exactly) > 0.99999  # and nothing of it stays


@pytest.mark.parametrize("kind", STORED)
def test_a_rounded_weight_that_is_held_gives_the_same_bits(kind, monkeypatch):
    built, made = build(NAME), []
    expected = passed(built, kind)
    monkeypatch.setattr(frozen, "rounded", lambda *given: made.append(rounded(*given)) or made[-1])
    layers = list(inner(built[0]).values())
    trial = Trial(NAME, built=built, tokens=(40,))
    with gradients.session(trial.patcher), trial.network.attached():
        multiply_in(kind, layers)
        sizes = [rounded_bytes(layer) for layer in layers]
        assert hold_rounded(layers, sum(sizes) - 1) == sum(sizes[:-1])  # the last one has no room
        with torch.no_grad():
            assert torch.equal(trial.predict(), expected[0])
        found = torch.cat([gradient.flatten() for gradient in trial.gradients()])
        assert torch.equal(found, expected[1])
        held = [each for layer in layers for each in layer.__dict__.get(HOLDS, {}).values()]
        assert sum(part.nbytes for each in held for part in each) == sum(sizes[:-1])
        again = len(made) - len(held)  # of the last layer alone
        assert 0 < again < len(layers) and all(each.values.shape == layers[-1].weight.shape for each in made[-again:])
        with torch.no_grad():
            layers[0].weight.mul_(2)  # a patch, which is seen
            changed = trial.predict()
        assert not torch.equal(changed, expected[0])
        release_rounded(layers)
        with torch.no_grad():
            assert torch.equal(trial.predict(), changed)
        hold_rounded(layers, sum(sizes))
    assert not any(HOLDS in module.__dict__ for module in trial.model.modules())


def test_a_run_holds_its_rounded_weights_but_in_samples_and_learns_the_same(tmp_path, monkeypatch):
    pictures, taken, drawn = draw_pictures(tmp_path / "pictures"), [], []
    monkeypatch.setattr(compute, "hold_rounded", lambda *given: taken.append(hold_rounded(*given)))
    draw = host.draw

    def drawing(patcher, *given, **more):
        drawn.append(sum(HOLDS in layer.__dict__ for layer in inner(patcher.model).values()))
        return draw(patcher, *given, **more)

    monkeypatch.setattr(host, "draw", drawing)
    releasing, held = host.releasing_rounded, []

    @contextmanager
    def released(model):
        held.append([bool(layer.__dict__.get(HOLDS)) for layer in inner(model).values()])
        with releasing(model):
            yield

    monkeypatch.setattr(host, "releasing_rounded", released)
    plain = configure(linked(NAME), pictures, steps=2)
    sample = SampleConfig(prompts=("a mossling",), width=64, height=64, steps=1)
    saves = SavesConfig(sample_every=1)
    config = plain.replace(memory=MemoryConfig(compute="int8"), sample=sample, saves=saves)
    losses = [run(config, tmp_path / "held")[0].losses]
    monkeypatch.setattr(measured, "_held", lambda *_: 0)
    losses.append(run(config, tmp_path / "anew")[0].losses)
    assert losses[0] == losses[1] and taken[0] > 0 == taken[1]
    # The room is what a step leaves, and a sample may be larger than its pictures; the next step holds them again.
    assert [any(each) for each in held] == [True, True, False, False] and drawn == [0] * 4


def test_auto_times_linked_layers_with_the_weights_that_they_will_hold(tmp_path, monkeypatch):
    now = itertools.count()
    clock = SimpleNamespace(at=0)
    monkeypatch.setattr(compute, "time", SimpleNamespace(perf_counter=lambda: clock.at))

    def slowly(*given):
        clock.at = next(now)
        return rounded(*given)

    monkeypatch.setattr(frozen, "rounded", slowly)
    config = configure(linked(NAME), draw_pictures(tmp_path / "pictures"), steps=1)
    config = config.replace(memory=MemoryConfig(compute="auto"))
    notes = run(config, tmp_path / "held")[1]
    told = "multiply in int8: a pass of the first batch takes 0 s, in int8 0 s"
    assert next(now) > 1 and any(told in note for note in notes), notes
    monkeypatch.setattr(measured, "_held", lambda *_: 0)
    assert any("multiply exactly: a pass of the first batch" in n for n in run(config, tmp_path / "anew")[1])


def test_weights_that_are_in_8_bits_or_patched_at_use_hold_nothing():
    built, _, kind = filed("int8")
    with gradients.session(built[1]):
        multiply_in(kind, inner(built[0]).values())
        assert hold_rounded(inner(built[0]).values(), 1 << 30) == 0
    model, patcher, _ = patched(NAME, loaded="partly")
    expected = passed((model, patcher), kind)
    trial = Trial(NAME, built=(model, patcher), tokens=(40,))
    with gradients.session(trial.patcher), trial.network.attached():
        multiply_in(kind, inner(model).values())
        assert hold_rounded(inner(model).values(), 1 << 30) > 0
        with torch.no_grad():
            assert torch.equal(trial.predict(), expected[0]) and torch.equal(trial.predict(), expected[0])
        assert not all(layer.__dict__[HOLDS] for layer in inner(model).values())


def test_the_adapter_reads_what_was_not_rounded():
    """The gradients of `down` and `up` are products with the layer's input: of a lone layer they are exact."""
    built, _, kind = filed("ConvRot")
    trial = Trial(NAME, built=built, tokens=(0,))
    chosen = next(iter(inner(trial.model)))
    layer = next(trained for trained in trial.network.chosen if trained.path == chosen)
    found = {}
    with gradients.session(trial.patcher), trial.network.attached():
        for how in ("", kind):
            multiply_in(how, [trial.model.diffusion_model.get_submodule(chosen)])
            own = trial.network.layers[layer.name]
            torch.nn.init.normal_(own.up, generator=torch.Generator().manual_seed(0))
            x = torch.randn(1, 40, own.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
            trial.network.zero_grad(set_to_none=True)
            trial.model.diffusion_model.get_submodule(chosen)(x).sum().backward()
            found[how] = own.down.grad.clone(), own.up.grad.clone(), x.grad.clone()
    assert all(torch.equal(a, b) for a, b in zip(found[""][:2], found[kind][:2], strict=True))
    assert not torch.equal(found[""][2], found[kind][2])
    torch.testing.assert_close(found[""][2], found[kind][2], rtol=0.02, atol=0.02)


def test_a_run_that_is_broken_off_leaves_no_mark_on_the_model():
    model, patcher = build(NAME)
    with pytest.raises(KeyboardInterrupt), gradients.session(patcher):
        multiply_in("int8", inner(model).values())
        raise KeyboardInterrupt
    assert not any("multiplies_in" in module.__dict__ for module in model.modules())
