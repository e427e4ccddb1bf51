"""What the first batches tell a network before its first step: inputs of layers, and gradients of weights."""

from itertools import islice

import pytest
import torch
from gradients import gradients
from prepared import prepared
from tiny_runs import run, tiny_config
from toy_layers import LAYERS, one_layer

from lora_atelier.trainer_core.common.axes import convolve
from lora_atelier.trainer_core.common.wording import count
from lora_atelier.trainer_core.objective import Pass
from lora_atelier.trainer_core.training import calibrate as looking
from lora_atelier.trainer_core.training.batch import read_batch
from lora_atelier.trainer_core.training.calibrate import calibrate, covariance_product, right_vectors
from lora_atelier.trainer_core.training.guard import looked_at

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")
BATCHES = 2


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(looking, "BATCHES", BATCHES)
    monkeypatch.setattr(looking, "TURNS", 6)  # random weights have no few main directions
    monkeypatch.setattr(looking, "GRADIENT_TURNS", 5)


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint,
        pictures,
        lora={"preset": "full", "rank": 3, "alpha": 3.0, "conv_rank": 2},
        train={"steps": 12, "seed": 5},
    )


def set_up(config, folder, **lora):
    """Prepare a run with settings of LoRA Config, and look at its first batches."""
    made = prepared(config.replace(lora=config.lora.replace(**lora)), folder)
    with made.network.attached():
        calibrate(made)
    return made


def first_losses(made):
    """Compute the losses of the first batches without the network, as the run's own step would."""
    for micro in islice((each for step in range(made.plan.steps) for each in made.plan.step(step)), BATCHES):
        draws = made.objective.draw(
            read_batch(made.encoded, micro, made.plan, made.config, made.objective.terms), made.device
        )
        seen = made.passing(micro.samples, draws, made.reader(training=True), micro.index)
        yield made.objective.loss(seen.predict(), seen).sum()


def inputs_of(made):
    """Collect all inputs of layers during the first batches."""
    found = {name: [] for name in made.network.layers}

    def hook(name, module, given):
        found[name].append((module, given[0].detach()))

    hooks = [
        module.register_forward_pre_hook(lambda module, given, name=name: hook(name, module, given))
        for name, module in made.network._frozen.items()
    ]
    with torch.no_grad():
        list(first_losses(made))
    for each in hooks:
        each.remove()
    return found


def as_read(module, x):
    """Give an input as a weight reads it, (N, in * kernel)."""
    if not isinstance(module, torch.nn.Conv2d):
        return x.flatten(0, -2)
    patches = torch.nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    return patches.transpose(1, 2).flatten(0, -2)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_products_with_all_inputs_are_those_of_their_covariance(kind):
    _, made, x = one_layer(kind)
    rows = torch.randn(3, *made.shape[1:], generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    inputs = []  # a row for each output position, found by what each input adds to it
    for place in range(rows[0].numel()):
        each = torch.zeros_like(rows[:1]).flatten()
        each[place] = 1
        each = each.view(1, *rows.shape[1:])
        seen = convolve(x, each, **made.geometry) if made.geometry else x @ each.t()
        inputs.append(seen.flatten())
    inputs = torch.stack(inputs, 1)
    expected = rows.flatten(1) @ (inputs.t() @ inputs)
    torch.testing.assert_close(covariance_product(x, rows, made).flatten(1), expected, rtol=1e-4, atol=1e-4)
    vectors = right_vectors(expected.view(rows.shape)).flatten(1)
    torch.testing.assert_close(vectors @ vectors.t(), torch.eye(3, dtype=x.dtype), atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_eva_begins_along_the_main_directions_of_the_inputs(config, tmp_path):
    made = set_up(config, tmp_path, init="eva")
    kinds, shares = set(), []
    for name, seen in inputs_of(made).items():
        layer, inputs = made.network.layers[name], torch.cat([as_read(*each) for each in seen]).double()
        rows, rank = layer.down.detach().flatten(1).double(), layer.rank
        values = torch.linalg.eigvalsh(inputs.t() @ inputs).flip(0)
        assert torch.allclose(rows.norm(dim=1), torch.ones(rank, dtype=torch.float64), atol=1e-4)
        shares.append(float((inputs @ rows.t()).square().sum() / values[:rank].sum()))
        assert not layer.up.any()
        kinds.add(layer.down.dim())
    # Noise, which conv_in reads, has no main direction.
    assert kinds == {2, 4} and sum(shares) / len(shares) > 0.98 and sorted(shares)[1] > 0.85


def test_lora_ga_begins_along_the_first_gradients_and_changes_nothing(config, tmp_path):
    made = set_up(config, tmp_path, init="lora_ga")
    frozen = made.network._frozen
    for module in frozen.values():
        module.weight.requires_grad_()
    total = sum(first_losses(made))
    found = torch.autograd.grad(total, [module.weight for module in frozen.values()], allow_unused=True)
    for name, gradient in zip(frozen, found, strict=True):
        layer, gradient = made.network.layers[name], gradient.flatten(1).double()
        rank = layer.rank
        stable = len(gradient) ** 0.25 / 4
        right, left = layer.down_0.flatten(1).double() / stable, layer.up_0.flatten(1).double() / stable
        values = torch.linalg.svdvals(gradient)
        assert (gradient @ right.t()).square().sum() > 0.97 * values[:rank].square().sum(), name
        behind = values[rank : 2 * rank].square().sum()
        assert 0.8 * behind < (left.t() @ gradient).square().sum() < 1.2 * behind, name
        for each in (right, left.t()):
            torch.testing.assert_close(each @ each.t(), torch.eye(rank, dtype=torch.float64), atol=1e-4, rtol=0)
        assert not layer.down.any() and not layer.up.any() and not layer.delta_weight().any()


@pytest.mark.parametrize(
    ("lora", "work", "failing"),
    [
        ({"init": "lora_ga"}, "predict", (3, 8)),
        pytest.param(
            {"init": "eva", "channel_scaling": True}, "without_gradients", (3, 17), marks=pytest.mark.thorough
        ),
    ],
    ids=["lora_ga", "eva"],
)
def test_where_memory_runs_out_the_first_batches_are_read_again_with_less(
    config, tmp_path, lora, work, failing, monkeypatch
):
    monkeypatch.setattr(looking, "GRADIENT_TURNS", 2)
    whole = set_up(config, tmp_path / "whole", **lora)
    notes: list[str] = []
    made = prepared(config.replace(lora=config.lora.replace(**lora)), tmp_path, note=notes.append)
    original, calls = getattr(Pass, work), []

    def fails(self):
        calls.append(self.index)
        if len(calls) in failing:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self)

    monkeypatch.setattr(Pass, work, fails)
    ladder = [config.memory.replace(checkpointing=level) for level in ("0", "1", "2")]
    with made.network.attached():
        with pytest.raises(torch.cuda.OutOfMemoryError):  # again: settings are lowered once, as in a step
            looked_at(made, ladder, calibrate)
        assert [each.checkpointing for each in ladder] == ["1", "2"] and made.memory == ladder[0]
        monkeypatch.setattr(Pass, work, original)
        looked_at(made, ladder, calibrate)
    assert len(ladder) == 2
    assert [note for note in notes if "Out of memory at the first batches" in note] == notes and len(notes) == 1
    assert "with gradient checkpointing 1" in notes[0]
    for name, layer in made.network.layers.items():
        for part, tensor in layer.state_dict().items():
            torch.testing.assert_close(tensor, whole.network.layers[name].state_dict()[part], rtol=1e-3, atol=1e-5)


def test_layers_whose_first_gradients_overflow_begin_as_default_and_are_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(looking, "GRADIENT_TURNS", 1)
    notes: list[str] = []
    made = prepared(config.replace(lora=config.lora.replace(init="lora_ga")), tmp_path, note=notes.append)
    made.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with made.network.attached():
        calibrate(made)
    without = [name for name, layer in made.network.layers.items() if not layer.up_0.any()]
    assert 0 < len(without) < len(made.network.layers)
    (note,) = (note for note in notes if "not finite" in note)
    assert note.startswith(f"{count(without, 'layer')} begin") and sorted(without)[0] in note and "precision" in note


def test_channels_are_scaled_by_their_sizes_and_the_file_holds_the_product(config, tmp_path):
    plain = prepared(config, tmp_path / "plain")
    averaged = config.replace(optimizer=config.optimizer.replace(ema_decay=0.9))
    made = set_up(averaged, tmp_path, channel_scaling=True)
    assert all(map(torch.equal, made.ema.averages, made.ema.parameters))  # the average begins with what was measured
    for name, seen in inputs_of(made).items():
        layer, before = made.network.layers[name], plain.network.layers[name]
        convolves = isinstance(seen[0][0], torch.nn.Conv2d)
        channels = torch.cat([(x.movedim(1, -1) if convolves else x).flatten(0, -2) for _, x in seen])
        roots = channels.abs().mean(0).sqrt()
        torch.testing.assert_close(layer.scales, (roots / roots.mean()).clamp(min=0.01), rtol=1e-4, atol=1e-5)
        ones = (1,) * (layer.down.dim() - 2)
        torch.testing.assert_close(layer.down, before.down * layer.scales.view(1, -1, *ones), rtol=1e-5, atol=1e-7)
        torch.nn.init.normal_(layer.up, generator=torch.Generator().manual_seed(1))
        down = layer.down / layer.scales.view(1, -1, *ones)
        saved = layer.tensors()
        torch.testing.assert_close(saved["lora_down.weight"], down)
        product = layer.scale * layer.up.flatten(1) @ down.flatten(1)
        torch.testing.assert_close(layer.delta_weight(), product.view(layer.shape))


def test_a_scaled_channel_gets_a_gradient_that_is_divided_by_its_scale(config, tmp_path):
    made, plain = set_up(config, tmp_path, channel_scaling=True), prepared(config, tmp_path / "plain")
    for each in (made, plain):
        for layer in each.network.layers.values():
            torch.nn.init.normal_(layer.up, std=0.1, generator=torch.Generator().manual_seed(1))
        with each.network.attached():
            gradients(each)
    for name, layer in made.network.layers.items():
        ones = (1,) * (layer.down.dim() - 2)
        expected = plain.network.layers[name].down.grad / layer.scales.view(1, -1, *ones)
        torch.testing.assert_close(layer.down.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lora",
    [{"init": "eva", "channel_scaling": True}, {"init": "lora_ga", "dora": True}],
    ids=["eva, scaled channels", "lora_ga, dora"],
)
def test_what_was_measured_is_part_of_the_run(config, tmp_path, lora):
    """A run begins at the model's own predictions, repeats to the last bit, and learns otherwise than a plain one."""
    short = config.replace(lora=config.lora.replace(**lora), train=config.train.replace(steps=4))
    first, second = run(short, tmp_path / "first"), run(short, tmp_path / "second")
    assert first.losses == second.losses
    plain = run(short.replace(lora=config.lora), tmp_path / "plain")
    assert first.losses[0] == pytest.approx(plain.losses[0], rel=1e-6) and first.losses[-1] != plain.losses[-1]
