"""What a run says of its base model before the first step."""

from pathlib import Path

import concept
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import checkpoint_tensors
from tiny_runs import run, tiny_config

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig
from lora_atelier.trainer_core.training.validate import _middle

pytestmark = pytest.mark.usefixtures("no_estimates")
TINY = concept.ASSETS / "atelier-tiny.safetensors"


def notes(path: Path, folder: Path, resolution: int = 128, **base) -> str:
    """Return all that a run of one step notes before its first step."""
    said, before = [], []
    config = tiny_config(
        path,
        ConceptConfig(folder=str(concept.CONCEPT), captions=CaptionConfig(missing="empty")),
        base_model=base,
        train={"steps": 1, "resolution": resolution, "bucket_step": 64},
    )
    run(config, folder, note=said.append, step=lambda _: before.extend(said))
    return "\n".join(before)


@pytest.mark.parametrize(
    ("prediction", "resolution"),
    [
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("auto", 320), ("epsilon", 128))),
        ("v_prediction", 320),
    ],
)
def test_a_model_that_behaves_like_the_other_kind_is_noticed(prediction, resolution, tmp_path):
    """The tiny base predicts noise, and its file says nothing of it; of a large picture the middle tells."""
    said = notes(TINY, tmp_path, resolution, prediction=prediction)
    wrong = "behaves like a model that predicts epsilon, not v_prediction" in said
    assert wrong == (prediction == "v_prediction") and ("Unless that is meant" in said) == wrong


def test_random_weights_are_of_no_kind_and_markers_are_heard(tmp_path):
    path = tmp_path / "some-lightning.safetensors"
    save_file(checkpoint_tensors(), path, {"modelspec.prediction_type": "epsilon"})
    said = notes(path, tmp_path, prediction="v_prediction")
    assert "behaves like" not in said
    assert "is a Lightning model" in said and "the run would be wasted" in said


def test_the_middle_of_a_large_picture_is_enough():
    latents = torch.arange(2 * 40 * 101).reshape(1, 2, 40, 101)
    assert torch.equal(_middle(latents), latents[..., 4:36, 34:66])
    assert torch.equal(_middle(latents[..., :16, :20]), latents[..., :16, :20])
