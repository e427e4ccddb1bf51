"""What suits a model is taken where the person sets nothing, and said; what is set stays."""

import pytest
from safetensors.torch import load_file, save_file

from lora_atelier.trainer_core.config import (
    AUTO_RATE,
    BaseModelConfig,
    DatasetConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.models import Usual, source_of
from lora_atelier.trainer_core.preflight.defaults import filled_lora, with_defaults

OPEN = {"lora": LoraConfig(rank=0, alpha=0), "optimizer": OptimizerConfig(learning_rate=AUTO_RATE)}
OPEN |= {"train": TrainConfig(resolution=0), "sample": SampleConfig(width=0, height=0)}


class Video:
    """A source of a family with settings of its own."""

    def usual(self) -> Usual:
        return Usual(title="Video", rank=32, learning_rate=2e-4, resolution=720, source="somebody")


def config(**settings):
    return RunConfig(base_model=BaseModelConfig(path="x"), dataset=DatasetConfig(concepts=()), **settings)


def test_what_is_open_is_taken_from_the_family_and_said():
    filled, said = with_defaults(config(**OPEN), Video())
    assert (filled.lora.rank, filled.lora.alpha, filled.train.resolution) == (32, 32.0, 720)
    assert filled.optimizer.learning_rate == 2e-4
    assert (filled.sample.width, filled.sample.height) == (704, 704)
    assert said == ["Taken as suits Video: rank 32, learning rate 0.0002, resolution 720 (somebody)."]
    assert with_defaults(filled, Video()) == (filled, [])


def test_what_is_set_stays():
    given = config(
        lora=LoraConfig(rank=4, alpha=2),
        optimizer=OptimizerConfig(learning_rate=0.5),
        train=TrainConfig(resolution=640),
        sample=SampleConfig(width=64, height=128),
    )
    assert with_defaults(given, Video()) == (given, [])


@pytest.mark.parametrize(("name", "rate"), [("adamw", 2e-4), ("lion", 4e-5), ("prodigy", 1.0)])
def test_the_rate_suits_the_optimizer_too(name, rate):
    optimizer = OptimizerConfig(name=name, learning_rate=AUTO_RATE)
    filled, _ = with_defaults(config(**{**OPEN, "optimizer": optimizer}), Video())
    assert filled.optimizer.learning_rate == pytest.approx(rate)


def test_alpha_is_the_rank_or_what_was_set():
    assert LoraConfig(rank=8, alpha=0).alpha == 8
    assert filled_lora(LoraConfig(rank=0, alpha=4), Video().usual()).alpha == 4


@pytest.mark.parametrize(("resolution", "remarked"), [(512, False), (320, True), (1280, True)])
def test_a_resolution_that_the_model_was_not_made_for_is_remarked_on(resolution, remarked):
    _, said = with_defaults(config(train=TrainConfig(resolution=resolution)), Video())
    assert bool(said) == remarked
    assert all(f"about 720 pixels, and resolution is {resolution}" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("metadata", "side"), [({}, 512), ({"modelspec.resolution": "128x288"}, 192), ({"modelspec.resolution": "a"}, 512)]
)
def test_a_file_may_say_its_own_resolution(metadata, side, checkpoint, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(load_file(checkpoint), path, metadata)
    usual = source_of(BaseModelConfig(path=str(path))).usual()
    assert (usual.title, usual.resolution) == ("Stable Diffusion 1", side)


def test_xl_is_made_for_1024(checkpoint_xl):
    assert source_of(BaseModelConfig(path=str(checkpoint_xl))).usual().resolution == 1024
