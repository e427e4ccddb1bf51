"""Concept sliders: directions, prompts and target against a second implementation; what has no second direction."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gradients import loss_of
from torch import nn

from lora_atelier.trainer_core.config import (
    STAYING,
    BaseModelConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    ObjectiveConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.crops import Crop
from lora_atelier.trainer_core.data.plan import MicroBatch, Sample
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.networks.choose import TrainedLayer
from lora_atelier.trainer_core.networks.network import Network
from lora_atelier.trainer_core.objective import Batch, DrawIndex, Objective, prompts, strengths, terms_of
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior, PriorPrediction
from lora_atelier.trainer_core.objective.terms.slider import (
    PromptSlider,
    check_slider,
    slider_sign,
    slider_target,
)

AGE = ObjectiveConfig(
    slider="prompts",
    slider_positive=" old ",
    slider_negative="young",
    slider_keep=("man", "woman"),
    slider_strength=2.0,
)
HELD = ConceptConfig(folder="x", role="validation")
SMILES = ConceptConfig(folder="/faces/smiles", controls=ControlConfig(folders=("neutral",), use="slider"))


def test_both_directions_have_each_attribute_equally_often():
    age = PromptSlider(AGE)
    turns = [(slider_sign(i), age.pair(i)) for i in range(8)]
    man, woman = ("old, man", "young, man"), ("old, woman", "young, woman")
    assert turns == [(1, man), (-1, man), (1, woman), (-1, woman)] * 2
    assert age.prompts() == {*man, *woman} and prompts([]) == set()
    alone = AGE.replace(slider_keep=(), slider_negative="")
    assert PromptSlider(alone).pair(3) == ("old", "") and PromptSlider(alone).prompts() == {"old", ""}
    assert PromptSlider(alone.replace(slider_keep=("man",))).pair(0) == ("old, man", "man")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_target_is_the_papers_number_by_number(sign):
    """Against a loop in Python's own floats; the loss then is the mean squared error against it."""
    draws = torch.Generator().manual_seed(1)
    own, positive, negative, prediction = (torch.randn(2, 4, 2, 2, generator=draws) for _ in range(4))
    found = slider_target(own, positive, negative, sign * AGE.slider_strength)
    for here in torch.cartesian_prod(*(torch.arange(n) for n in own.shape)).tolist():
        e, p, n = (float(each[tuple(here)]) for each in (own, positive, negative))
        assert float(found[tuple(here)]) == pytest.approx(e + sign * 2.0 * (p - n), abs=1e-6)
    objective = Objective(AGE, noise_model("epsilon", False), 3)
    batch = Batch(index=DrawIndex(micro_batch=0, step=0), latents=own, weights=torch.tensor([1.0, 0.5]))
    drawn = objective.draw(batch, torch.device("cpu"))
    losses = loss_of(objective, prediction, drawn, slid=found)
    torch.testing.assert_close(losses, (prediction - found).square().mean(dim=(1, 2, 3)) * torch.tensor([1.0, 0.5]))


def test_captions_of_prior_prediction_stay_where_they_are():
    """Held samples keep the frozen model's prediction, and so does what masked prior preservation leaves out."""
    draws = torch.Generator().manual_seed(2)
    latents, frozen, slid = (torch.randn(2, 4, 4, 4, generator=draws) for _ in range(3))
    mask = torch.zeros(2, 1, 4, 4)
    mask[..., :2] = 1
    batch = Batch(
        index=DrawIndex(micro_batch=1, step=0),
        latents=latents,
        weights=torch.ones(2),
        mask=mask,
        shares={PriorPrediction: torch.tensor([1.0, 0.0]), MaskedPrior: torch.tensor([1.0, 1.0])},
    )
    objective = Objective(AGE, noise_model("epsilon", False), 3)
    drawn = objective.draw(batch, torch.device("cpu"))
    wanted = torch.where(mask > 0, torch.stack([frozen[0], slid[1]]), frozen)
    assert loss_of(objective, wanted, drawn, frozen, slid=slid).tolist() == [0.0, 0.0]
    assert bool((loss_of(objective, wanted, drawn, frozen, slid=frozen)[1:] > 0.1).all())


@pytest.mark.parametrize("algorithm", ["lora", "loha", "lokr", "full"])
@pytest.mark.parametrize("kind", [nn.Linear, partial(nn.Conv2d, kernel_size=3), partial(nn.Conv2d, kernel_size=1)])
def test_a_reversed_network_is_that_of_strength_minus_one(algorithm, kind):
    """Against the frozen layer with the delta of its weight subtracted; gradients are the opposite ones."""
    frozen = kind(6, 8).requires_grad_(False)
    trained = TrainedLayer("layer", frozen, 4, 4.0)
    network = Network([trained], LoraConfig(algorithm=algorithm, rank=4, alpha=4), seed=2)
    layer = network.layers["layer"]
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.3)
    x = torch.randn(3, 6, *(4, 4)[: 2 * isinstance(frozen, nn.Conv2d)], generator=draws)
    plain, slopes = frozen(x), []
    with network.attached():
        outputs = []
        for reverse in (False, True):
            network.reverse(reverse)
            outputs.append(frozen(x))
            network.zero_grad()
            outputs[-1].sum().backward()
            slopes.append([p.grad.clone() for p in network.parameters()])
        network.reverse(False)
        again = frozen(x)
    forward, backward = outputs
    assert torch.equal(again, forward) and not torch.allclose(forward, plain, atol=1e-3)
    torch.testing.assert_close(forward - plain, plain - backward, rtol=1e-4, atol=1e-5)
    if getattr(layer, "diff_b", None) is None:
        weight = frozen.weight - layer.delta_weight()
        expected = torch.func.functional_call(frozen, {"weight": weight}, (x,))
        torch.testing.assert_close(backward, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, -other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slider_negative": "old"}, "needs two different prompts; set slider_positive"),
        ({"guidance_loss": 3.0}, "set guidance_loss of Noise & Loss to 0"),
        ({"loss_on": "x0"}, "set loss_on of Noise & Loss to prediction"),
        ({"slider": "off"}, "slider_positive works with slider prompts only"),
        ({"slider_strength": 0.0}, "slider_strength"),
    ],
)
def test_settings_without_a_direction_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        AGE.replace(**settings)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"lora": LoraConfig(algorithm="oft")}, "oft does not; set algorithm of LoRA Config to lora"),
        ({"lora": LoraConfig(dora=True)}, "DoRA does not; set dora of LoRA Config to off"),
        ({"lora": LoraConfig(embeddings=(EmbeddingConfig(token="x", init="y"),))}, "remove Embedding"),
        ({"lora": LoraConfig(start="a.safetensors")}, "set use of Existing LoRA to beneath"),
        ({"train": TrainConfig(validation_share=0.1)}, "set validation_share of Validation to 0"),
        ({"dataset": DatasetConfig(concepts=(HELD.replace(role="regularisation"),))}, "or to prior_prediction for"),
        (
            {"dataset": DatasetConfig(concepts=(HELD,))},
            "to 0, and remove concepts with the role validation",
        ),
    ],
)
def test_a_run_without_a_second_direction_is_refused(part, said):
    run = RunConfig(base_model=BaseModelConfig(path="x"), dataset=DatasetConfig(), objective=AGE)
    check_slider(run)
    check_slider(run.replace(objective=ObjectiveConfig(), **part))
    with pytest.raises(ValueError, match=said):
        check_slider(run.replace(**part))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"objective": AGE}, "set slider of Noise & Loss to off, or use of Control Pictures to edit"),
        ({"lora": LoraConfig(algorithm="boft")}, "boft does not; set algorithm of LoRA Config to lora"),
        ({"lora": LoraConfig(start="a.safetensors")}, "set use of Existing LoRA to beneath"),
        (
            {"dataset": DatasetConfig(concepts=(SMILES, HELD))},
            "of x have no other end of the slider; link it into Control Pictures",
        ),
        (
            {"dataset": DatasetConfig(concepts=(SMILES, SMILES.replace(role="prior_prediction")))},
            "smiles should stay as they are at both ends of the slider, as their role is prior_prediction; set its rol",
        ),
        ({"objective": ObjectiveConfig(nearest_noise=4)}, "cannot be the nearest to each; set nearest_noise of Noise"),
    ],
)
def test_pairs_that_make_no_slider_are_refused(part, said):
    stays = [ConceptConfig(folder="y", role=role) for role in STAYING]
    concepts = (SMILES, SMILES.replace(role="validation"), *stays)
    run = RunConfig(base_model=BaseModelConfig(path="x"), dataset=DatasetConfig(concepts=concepts))
    check_slider(run.replace(train=TrainConfig(validation_share=0.1)))
    with pytest.raises(ValueError, match=said):
        check_slider(run.replace(**part))


def test_a_micro_batch_of_pairs_is_trained_in_both_directions_and_any_other_in_one():
    crop = Crop(resized=(64, 64), offset=(0, 0), bucket=(64, 64))
    sample = Sample(picture=3, visit=2, crop=crop, caption="a man", use_mask=True, weight=0.5)
    micro_batch = MicroBatch(index=1, samples=(sample,), bucket=(64, 64))
    run = RunConfig(base_model=BaseModelConfig(path="x"), dataset=DatasetConfig(concepts=(HELD,)))
    assert strengths(terms_of(run), micro_batch) == ((1, micro_batch),)
    slides = run.replace(dataset=DatasetConfig(), objective=AGE)
    assert strengths(terms_of(slides), micro_batch) == ((-1, micro_batch),)
    paired = run.replace(dataset=DatasetConfig(concepts=(SMILES,)))
    (up, more), (down, less) = strengths(terms_of(paired), micro_batch)
    assert (up, more, down) == (1, micro_batch, -1)
    assert less == replace(micro_batch, samples=(replace(sample, other_end=True),))
