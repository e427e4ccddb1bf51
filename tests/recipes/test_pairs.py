"""Sliders of pairs in whole runs: both ends are alike but for the picture, and a step learns both."""

import math
from dataclasses import replace

import pytest
import torch
from gradients import gradients
from PIL import Image, ImageOps
from prepared import NeverLoaded, estimated, prepared
from safetensors.torch import save_file
from tiny_models import checkpoint_tensors
from tiny_runs import change, run, tiny_config

from lora_atelier.trainer_core.config import ConceptConfig, ControlConfig, DatasetConfig, MaskConfig, ObjectiveConfig
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.objective import Term
from lora_atelier.trainer_core.preflight.memory import largest_micro_batch
from lora_atelier.trainer_core.training.batch import read_batch
from lora_atelier.trainer_core.training.pixels import pixels
from lora_atelier.trainer_core.training.validate import TIMES, validation_loss

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")


@pytest.fixture(scope="module")
def less(pictures, tmp_path_factory):
    """Give a folder with the negative of each picture, of twice its size."""
    folder = tmp_path_factory.mktemp("less")
    for path in pictures.glob("[0-9].png"):
        negative = ImageOps.invert(Image.open(path))
        negative.resize((2 * negative.width, 2 * negative.height)).save(folder / path.name)
    return folder


@pytest.fixture
def config(checkpoint, pictures, less):
    controls = ControlConfig(folders=(str(less),), use="slider")
    return tiny_config(
        checkpoint,
        ConceptConfig(folder=str(pictures), flip=True, controls=controls, masks=MaskConfig(missing="ones")),
        lora={"preset": "attn-mlp"},
        optimizer={"learning_rate": 1e-2, "text_encoder_learning_rate": 1e-2},
        objective={"noise_offset": 0.1},
        train={"steps": 3, "accumulate": 2, "seed": 5},
    )


def with_concepts(config, *more):
    return config.replace(dataset=DatasetConfig(concepts=(*config.dataset.concepts, *more)))


def shaken(run):
    """Give the network's parameters numbers of their own, so that it is no fresh one; list them by name."""
    draws = torch.Generator().manual_seed(3)
    named = dict(run.network.named_parameters())
    for parameter in named.values():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=draws))
    return named


def stepped(run):
    """Return the loss of the first step; the gradients are the parameters'."""
    run.network.zero_grad()
    with run.network.attached():
        return float(gradients(run).loss)


def test_both_ends_are_alike_but_for_the_picture(config, pictures, tmp_path):
    """Noise, level, crop, flip, caption and mask are the same; a picture of no pair is itself at both ends."""
    run = prepared(with_concepts(config, ConceptConfig(folder=str(pictures), role="regularisation")), tmp_path)
    flips, kept = set(), 0
    for step in range(run.plan.steps):
        for micro in run.plan.step(step):
            more, other = (
                read_batch(run.encoded, each, run.plan, run.config, run.objective.terms)
                for each in (micro, micro.other_end())
            )
            one, two = (run.objective.draw(batch, run.device) for batch in (more, other))
            assert torch.equal(one.levels, two.levels) and torch.equal(one.weights, two.weights)
            assert other.mask is None if more.mask is None else torch.equal(more.mask, other.mask)
            assert torch.equal(one.target, two.target)  # of epsilon: the noise itself
            for i, sample in enumerate(micro.samples):
                paired = run.plan.concepts[sample.picture].role == "train"
                assert torch.equal(more.latents[i], other.latents[i]) != paired
                flips.add(sample.crop.flip)
                kept += not paired
    assert flips == {False, True} and kept


def test_the_other_end_is_encoded_by_the_crop_of_its_picture(config, less, tmp_path):
    run = prepared(config, tmp_path)
    sample = replace(run.plan.step(0)[0].samples[0], other_end=True)
    name = run.plan.manifest.pictures[sample.picture].name
    shown = pixels(cut(load_picture(less / name), sample.crop))[None]
    mean, _ = run.base.autoencoder.encode(run.base.autoencoder.module, shown)
    torch.testing.assert_close(run.encoded.latents(sample)[0], mean[0].float(), rtol=1e-4, atol=1e-4)


def test_the_estimate_counts_the_gradients_of_the_first_end(config, tmp_path):
    """The second end adds to them; without pairs one micro-batch has none beside its own pass."""
    run = prepared(change(config, train={"accumulate": 1}), tmp_path)
    assert largest_micro_batch(run.config, run.plan, run.base).accumulates
    plain = replace(run.config.dataset.concepts[0], controls=None)
    alone = run.config.replace(dataset=DatasetConfig(concepts=(plain,)))
    assert not largest_micro_batch(alone, run.plan, run.base).accumulates


def test_the_gradient_of_a_pair_is_the_sum_of_both_halves(config, tmp_path):
    """In closed form: at -1 the factors that begin with 0 have the other sign, and so has their gradient."""
    run = prepared(config, tmp_path)
    named = shaken(run)
    loss = stepped(run)
    found = {name: parameter.grad.clone() for name, parameter in named.items()}
    run.network.zero_grad()
    ups, total = [each for name, each in named.items() if name.endswith(".up")], 0.0
    assert 0 < len(ups) < len(named)
    wanted = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for sign in (1, -1):
        run.network.zero_grad()
        for up in ups:
            up.data.mul_(sign)
        with run.network.attached():
            for micro in run.plan.step(0):
                half = micro if sign > 0 else micro.other_end()
                draws = run.objective.draw(
                    read_batch(run.encoded, half, run.plan, run.config, run.objective.terms), run.device
                )
                conditions = run.conditions(half.samples, run.reader(training=True))
                errors = (run.base.denoiser.predict(draws.noised, draws.levels, conditions) - draws.target).square()
                weighed = errors if draws.mask is None else errors * draws.mask
                each = weighed.mean() * len(half.samples) / half.step_samples
                each.backward()
                total += float(each.detach())
        for name, parameter in named.items():
            wanted[name] += parameter.grad * (sign if name.endswith(".up") else 1)
        for up in ups:
            up.data.mul_(sign)
    assert loss == pytest.approx(total, rel=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max()))


def test_the_gradient_of_a_pair_is_that_of_its_loss(config, tmp_path):
    """Central differences of the step's loss along its gradient, in which both halves take part."""
    run = prepared(config, tmp_path)
    named = shaken(run)
    stepped(run)
    gradient = {name: parameter.grad.clone() for name, parameter in named.items()}
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
    losses = []
    for way in (1, -2):
        for name, parameter in named.items():
            parameter.data.add_(gradient[name], alpha=way * 0.02 / norm)
        losses.append(stepped(run))
    assert (losses[0] - losses[1]) / 0.04 == pytest.approx(norm, rel=0.02)


class OneEnd(Term):
    """Measures each sample once, at the strength of its end."""

    def strengths(self, micro_batch):
        """Of the end that the samples are of."""
        return ((-1 if micro_batch.samples[0].other_end else 1, micro_batch),)


def test_the_validation_loss_is_of_both_ends(config, tmp_path):
    run = prepared(change(config, train={"validation_share": 0.2}), tmp_path)
    shaken(run)
    assert run.plan.validation
    with run.network.attached():
        both = validation_loss(run, run.reader(training=True))
        assert not any(layer.reversed for layer in run.network.layers.values())
        ends = []
        for other_end in (False, True):
            run.plan.validation = tuple(replace(sample, other_end=other_end) for sample in run.plan.validation)
            run.objective.terms = [OneEnd()]
            ends.append(validation_loss(run, run.reader(training=True)))
    assert both == pytest.approx(sum(ends), rel=1e-5) and ends[0] != pytest.approx(ends[1], rel=1e-3)
    assert len(TIMES) > 1


def test_an_inpainting_model_is_told_the_rest_of_the_same_end(config, tmp_path):
    tensors = checkpoint_tensors()
    first = "model.diffusion_model.input_blocks.0.0.weight"
    tensors[first] = torch.randn(32, 9, 3, 3, generator=torch.Generator().manual_seed(1)) / 9
    save_file(tensors, tmp_path / "inpainting.safetensors")
    base = config.base_model.replace(path=str(tmp_path / "inpainting.safetensors"))
    masks = MaskConfig(missing="ones", invert=True, unmasked_probability=0.3)
    (concept,) = config.dataset.concepts
    config = config.replace(base_model=base, dataset=DatasetConfig(concepts=(concept.replace(masks=masks),)))
    run = prepared(config, tmp_path)
    masked = 0
    for micro in run.plan.step(0) + run.plan.step(1):
        for sample in micro.samples:
            one, two = (run.encoded.painted(each) for each in (sample, replace(sample, other_end=True)))
            assert torch.equal(one[0], two[0])  # the mask
            covers = bool((one[0] == 1).all())
            masked += not covers
            assert covers or not torch.equal(one[1:], two[1:])
    assert masked
    assert math.isfinite(stepped(run))


def test_the_second_backward_pass_of_a_pair_is_counted(config):
    alone = change(config, train={"accumulate": 1})
    plain = alone.replace(dataset=DatasetConfig())
    pair, one = estimated(alone), estimated(plain)
    assert pair.total > one.total and pair.total == estimated(config).total


def test_pairs_and_prompts_together_are_refused_before_a_model_is_loaded(config, tmp_path):
    both = config.replace(objective=ObjectiveConfig(slider="prompts", slider_positive="old"))
    with pytest.raises(ValueError, match="Two prompts and pairs of pictures would be two sliders; set slider of"):
        run(both, tmp_path, source=NeverLoaded(config.base_model))
