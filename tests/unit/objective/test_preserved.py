"""Guidance loss and preservation: the captions, and the closed forms of both losses."""

import pytest
import torch
from gradients import Told, loss_of

from lora_atelier.trainer_core.config import ObjectiveConfig
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective import Batch, DrawIndex, Objective
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.objective.terms.preservation import Preservation

CLASS = ObjectiveConfig(preservation="class", preservation_trigger="ohwx.", preservation_class=r"a \\1 man")
LATENTS = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def drawn(objective):
    """Draw a batch of three; return the draws and two predictions."""
    batch = Batch(index=DrawIndex(micro_batch=2, step=0), latents=LATENTS, weights=torch.tensor([1.0, 0.5, 2.0]))
    draws = objective.draw(batch, torch.device("cpu"))
    return draws, draws.noised.sin(), draws.noised.cos()


@pytest.mark.parametrize(
    ("caption", "other"),
    [
        ("photo of ohwx. by the sea", r"photo of a \\1 man by the sea"),
        ("OHWX., ohwx.", r"a \\1 man, a \\1 man"),
        ("photo of ohwxy", None),  # the word's dot is a dot
        ("xohwx. and a_ohwx.", None),  # part of another word
        ("", None),
    ],
)
def test_the_class_stands_where_the_trigger_word_stood(caption, other):
    assert Preservation(CLASS).other(caption) == other


def test_a_blank_caption_is_kept_beside_every_other():
    blank = Preservation(ObjectiveConfig(preservation="blank"))
    assert blank.other("a cat") == "" and blank.other("") is None
    assert blank.beside("a cat") == {""} and blank.beside("") == set()


def test_a_preservation_of_nothing_is_refused():
    Preservation(CLASS).check(["a cat", "ohwx."])
    with pytest.raises(ValueError, match=r"No caption that is trained contains 'ohwx\.'; set preservation_trigger"):
        Preservation(CLASS).check(["a cat", ""])
    with pytest.raises(ValueError, match="No picture that is trained has a caption"):
        Preservation(ObjectiveConfig(preservation="blank")).check([""])


@pytest.mark.parametrize("noise", [noise_model("epsilon", False), flow_noise()], ids=["epsilon", "flow"])
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_guidance_moves_the_target_away_from_the_prediction_without_a_caption(noise, scale):
    objective = Objective(ObjectiveConfig(guidance_loss=scale), noise, 3)
    draws, prediction, blank = drawn(objective)
    target = blank + scale * (draws.target - blank)
    expected = (prediction - target).square().mean(dim=(1, 2, 3)) * draws.weights
    torch.testing.assert_close(loss_of(objective, prediction, draws, None, blank), expected)
    plain = loss_of(objective, prediction, draws)
    assert torch.allclose(expected, plain) == (scale == 1)


def test_preservation_weighs_samples_as_their_loss_and_skips_those_without_another_caption():
    config = ObjectiveConfig(preservation="blank", preservation_weight=0.25, min_snr_gamma=5, loss="l1")
    objective = Objective(config, noise_model("epsilon", False), 3)
    draws, prediction, frozen = drawn(objective)
    seen = Told(draws, frozen, None, objective)
    seen.captions, read = ["a cat", "", "a dog"], []
    seen.again = lambda captions: (read.extend(captions), (prediction, frozen))[1]
    found = Preservation(config).apart(seen)
    assert read == ["", "", ""]
    errors = (prediction - frozen).abs().mean(dim=(1, 2, 3)) * draws.weights
    torch.testing.assert_close(found, 0.25 * errors * torch.tensor([1.0, 0.0, 1.0]))
