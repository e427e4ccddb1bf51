"""Settings that are left open take the defaults of the model's family; those that are set stay."""

import pytest

from lora_atelier.trainer_core import config as c
from lora_atelier.trainer_core.config.defaults import resolution_remarks

FAMILY = c.Defaults(rank=32, learning_rate=2e-4, resolution=768, step=128, caption_dropout=0.1, guidance=1.0)
LINKED = c.BaseModelConfig(path="flux", connected=c.ConnectedConfig())


def run(**parts: c.Config) -> c.RunConfig:
    """Return a run of a linked model whose settings are open but for these parts."""
    roles = ("train", "regularisation", "validation", "prior_prediction")
    concepts = tuple(
        c.ConceptConfig(folder=role, role=role, captions=c.CaptionConfig(dropout=c.OPEN)) for role in roles
    )
    open_parts = {
        "base_model": LINKED,
        "dataset": c.DatasetConfig(concepts=concepts),
        "lora": c.LoraConfig(rank=0, alpha=0),
        "optimizer": c.OptimizerConfig(learning_rate=c.OPEN),
        "train": c.TrainConfig(resolution=0, bucket_step=0),
        "sample": c.SampleConfig(width=0, height=0),
    }
    return c.RunConfig(**{**open_parts, **parts})


def test_open_settings_take_the_familys_defaults() -> None:
    filled = c.fill(run(), FAMILY)
    assert (filled.lora.rank, filled.lora.alpha) == (32, 32.0)
    assert filled.optimizer.learning_rate == 2e-4
    assert (filled.train.resolution, filled.train.bucket_step) == (768, 128)
    assert (filled.sample.width, filled.sample.height) == (768, 768)
    assert [concept.captions.dropout for concept in filled.dataset.concepts] == [0.1, 0.1, 0.0, 0.0]
    assert filled.base_model.connected and filled.base_model.connected.guidance == 1.0
    assert c.fill(filled, c.Defaults()) == filled


def test_captions_have_variants_unless_they_are_encoded_at_each_step() -> None:
    def variants(**parts: c.Config) -> set[int]:
        return {concept.captions.variants for concept in c.fill(run(**parts), FAMILY).dataset.concepts}

    assert variants() == {8}
    assert variants(optimizer=c.OptimizerConfig(text_encoder_learning_rate=1e-4)) == {0}
    assert variants(lora=c.LoraConfig(embeddings=(c.EmbeddingConfig(token="moss"),))) == {0}
    kept = c.ConceptConfig(folder="x", captions=c.CaptionConfig(variants=3))
    assert variants(dataset=c.DatasetConfig(concepts=(kept,))) == {3}


def test_settings_that_are_set_stay() -> None:
    plain = c.RunConfig(base_model=c.BaseModelConfig(path="a"), dataset=c.DatasetConfig())
    assert c.fill(plain, FAMILY) == plain
    assert c.describe_filled(plain, c.fill(plain, FAMILY), "Flux") == ""
    filled = c.fill(run(lora=c.LoraConfig(rank=8, alpha=0)), FAMILY)
    assert (filled.lora.rank, filled.lora.alpha) == (8, 8.0)
    untrained = c.OptimizerConfig(learning_rate=0, text_encoder_learning_rate=1e-5)
    assert c.fill(run(optimizer=untrained), FAMILY).optimizer.learning_rate == 0


@pytest.mark.parametrize(("name", "rate"), [("adamw", 2e-4), ("lion", 2.0), ("prodigy", 1.0)])
def test_another_optimizers_own_rate_is_scaled_as_the_familys(name: str, rate: float) -> None:
    """An optimizer that estimates its step size keeps its factor."""
    found = c.fill(run(optimizer=c.OptimizerConfig(name=name, learning_rate=c.OPEN)), FAMILY).optimizer.learning_rate
    assert found == (rate if name != "lion" else c.OPTIMIZERS["lion"].learning_rate * rate)


@pytest.mark.parametrize(("algorithm", "preset"), [("lora", "full"), ("ia3", "attn-mlp")])
def test_an_open_preset_is_the_familys_except_where_the_algorithm_has_its_own_layers(
    algorithm: str, preset: str
) -> None:
    toy = c.Defaults(preset="full")
    config = run(lora=c.LoraConfig(preset="auto", algorithm=algorithm))
    filled = c.fill(config, toy)
    assert filled.lora.preset == preset
    assert f"preset {preset}" in c.describe_filled(config, filled, "a toy")
    assert c.fill(run(lora=c.LoraConfig(preset="attn-only")), toy).lora.preset == "attn-only"


def test_a_model_without_guidance_keeps_it_open() -> None:
    filled = c.fill(run(), c.Defaults())
    assert filled.base_model == LINKED


def test_the_defaults_that_were_taken_are_named_in_one_line() -> None:
    config = run()
    assert c.describe_filled(config, c.fill(config, FAMILY), "FLUX.1 dev") == (
        "Left open, so taken from the defaults for FLUX.1 dev: rank 32, alpha 32, learning rate 0.0002 (adamw), "
        "resolution 768, caption dropout 0.1, guidance 1."
    )


@pytest.mark.parametrize(("resolution", "far"), [(512, True), (640, False), (1024, False), (1280, True)])
def test_a_resolution_far_from_the_models_own_is_remarked_on(resolution: int, far: bool) -> None:
    train, dataset = c.TrainConfig(resolution=resolution), run().dataset
    assert bool(resolution_remarks(train, dataset, FAMILY, "a model")) == far
    several = train.replace(buckets=c.BucketConfig(resolutions=("768", "64")))
    assert resolution_remarks(several, dataset, FAMILY, "a model") == []


@pytest.mark.parametrize(("text", "far"), [("512", True), ("768", False), ("512x384", True), ("1152x512", False)])
def test_resolutions_of_buckets_and_concepts_are_remarked_on_by_their_node(text: str, far: bool) -> None:
    train, dataset = c.TrainConfig(resolution=768), run().dataset
    buckets = train.replace(buckets=c.BucketConfig(resolutions=(text,)))
    expected = f"resolutions of Buckets is {text}, and a model was made for about 768 pixels."
    assert [expected in said for said in resolution_remarks(buckets, dataset, FAMILY, "a model")] == [True] * far
    concepts = c.DatasetConfig(concepts=tuple(one.replace(resolutions=(text,)) for one in dataset.concepts[:1]))
    said = resolution_remarks(train, concepts, FAMILY, "a model")
    assert [one.startswith(f"resolutions of Pictures is {text}, ") for one in said] == [True] * far


@pytest.mark.parametrize(
    "clips, step, expected",
    [
        ([c.ClipConfig(frames=(17, 49)), c.ClipConfig(frames=(33,))], 4, 49),
        ([c.ClipConfig(take="full", most_frames=61)], 4, 61),
        ([None], 4, 33),
        ([c.ClipConfig(frames=(17,))], 0, 1),
    ],
)
def test_open_frames_of_samples_are_those_that_clips_are_trained_with(clips, step, expected) -> None:
    concepts = tuple(c.ConceptConfig(folder=str(number), clips=each) for number, each in enumerate(clips))
    held = c.ConceptConfig(folder="held", role="validation", clips=c.ClipConfig(frames=(81,)))
    sample = c.SampleConfig(frames=0, prompts=("a mossling",))
    config = run(dataset=c.DatasetConfig(concepts=(*concepts, held)), sample=sample)
    filled = c.fill(config, c.Defaults(clip_step=step, clip_rate=16.0))
    assert filled.sample.frames == expected
    assert f"sample frames {expected}" in c.describe_filled(config, filled, "Wan")
    assert c.fill(config.replace(sample=sample.replace(frames=5)), c.Defaults(clip_step=step)).sample.frames == 5
