"""The defaults of Stable Diffusion, by family and kind of prediction."""

from types import SimpleNamespace

import pytest

from lora_atelier.trainer_core.models.sd.family import FAMILIES
from lora_atelier.trainer_core.models.sd.model import StableDiffusion


@pytest.mark.parametrize(
    ("family", "prediction", "channels", "resolution", "rate"),
    [
        ("sd1", "epsilon", 320, 512, 1e-4),
        ("sd1", "v_prediction", 320, 512, 1e-4),
        ("sd2", "epsilon", 320, 512, 1e-4),
        ("sd2", "v_prediction", 320, 768, 1e-4),
        ("sdxl", "epsilon", 320, 1024, 1e-4),
        ("sd1", "epsilon", 32, 128, 3e-3),
    ],
)
def test_the_defaults_are_those_of_the_family(
    family: str, prediction: str, channels: int, resolution: int, rate: float
) -> None:
    """A UNet of few channels is a toy."""
    unet = SimpleNamespace(config=SimpleNamespace(block_out_channels=(channels,)))
    base = StableDiffusion(family=FAMILIES[family], name="", unet=unet, texts=(), vae=None, tokenizer=None)
    base.prediction = prediction  # type: ignore[assignment]
    assert (base.defaults.resolution, base.defaults.learning_rate) == (resolution, rate)
    assert base.defaults.guidance is None
