"""Words that are learned together with a LoRA: repeatable, from the cache where they can be, saved whatever happens."""

import io
import math
import zipfile

import pytest
import torch
from clip_tokenizer import TOKENIZER
from durable import Cut, cut_at
from lora_runs import metadata_in
from prepared import NeverLoaded, estimated
from safetensors.torch import load_file
from tiny_runs import change, run, tiny_config

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    OptimizerConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.runs.card import published_files_of
from lora_atelier.trainer_core.runs.export import save_to_export, write_archive
from lora_atelier.trainer_core.runs.folder import open_run
from lora_atelier.trainer_core.training import state

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")

THING = EmbeddingConfig(token="thing", vectors=3, init="creature", learning_rate=1e-2)


@pytest.fixture
def config(checkpoint, pictures):
    concept = ConceptConfig(folder=str(pictures), captions=CaptionConfig(dropout=0.3))
    train = {"accumulate": 2, "seed": 11, "save_dtype": "float32"}
    return tiny_config(checkpoint, concept, lora={"embeddings": (THING,)}, train=train)


def with_words(config, *embeddings):
    return change(config, lora={"embeddings": embeddings})


def run_words(config, folder, **options):
    """Train, with the files of words in a folder of their own."""
    output = folder / "out" / "my lora (1).safetensors"
    return run(config, folder, output=output, embeddings=folder / "words", **options)


def vectors(result, token="thing"):
    return load_file(result.embeddings[token])


def begun(config, token="creature"):
    base = load_base_model(config.base_model)
    ids = base.tokenizer(token, add_special_tokens=False)["input_ids"]
    return base.texts[0].model.get_input_embeddings().weight[ids]


def test_a_word_is_trained_exactly_twice_and_saved_as_comfyui_reads_it(config, tmp_path, monkeypatch):
    encoded, live = [], []
    original = state.text_reader

    def reader(base, cache, device, *, training):
        read = original(base, cache, device, training=training)
        encoded.extend(cache().text_keys)
        return lambda caption: live.append(caption) or read(caption)

    monkeypatch.setattr(state, "text_reader", reader)
    config = config.replace(sample=SampleConfig(prompts=("a thing", "a sky"), width=64, height=64, steps=2))
    first, second = run_words(config, tmp_path), run_words(config, tmp_path)
    assert first.losses == second.losses and all(map(math.isfinite, first.losses))
    assert all(torch.equal(t, second.tensors[k]) for k, t in first.tensors.items())
    assert torch.equal(first.samples, second.samples)
    assert not any(key.startswith("lora_te") for key in first.tensors)
    # captions without the word come from the cache, those with it from the text encoder
    assert set(encoded) == {"", "a sky"} and any("thing" in caption for caption in live)

    assert first.embeddings["thing"] == tmp_path / "words" / "my_lora_1_-thing.safetensors"
    assert second.embeddings["thing"].name == "my_lora_1_-2-thing.safetensors"
    mine = vectors(first)
    assert mine.keys() == {"emb_params"} and mine["emb_params"].shape == (3, 64)
    assert torch.equal(mine["emb_params"], vectors(second)["emb_params"])
    start = begun(config)
    assert torch.allclose(mine["emb_params"], start, atol=0.1)  # AdamW moves by the learning rate, four times
    assert len({tuple(row) for row in mine["emb_params"].tolist()}) == 3 and not torch.equal(
        mine["emb_params"][:1], start
    )
    metadata = metadata_in(first.embeddings["thing"])
    assert metadata["modelspec.architecture"] == "stable-diffusion-v1/textual-inversion"
    assert metadata["modelspec.trigger_phrase"] == "embedding:my_lora_1_-thing"


EFFECT = [True, True]  # the end compares the model with and without the network


def test_vectors_stop_and_captions_are_encoded_once_from_then_on(config, tmp_path, monkeypatch):
    two = run_words(change(config, train={"steps": 2}), tmp_path)
    calls, original = [], state.text_reader

    def reader(*args, training):
        calls.append(training)
        return original(*args, training=training)

    monkeypatch.setattr(state, "text_reader", reader)
    stopped = run_words(with_words(config, THING.replace(stop=0.5, stop_unit="share")), tmp_path)
    assert torch.equal(vectors(stopped)["emb_params"], vectors(two)["emb_params"])
    assert not torch.equal(vectors(two)["emb_params"], begun(config).expand(3, -1))
    assert stopped.losses[:2] == two.losses and calls == [True, False, *EFFECT]  # training, stopped
    # The stop of the text encoder does not concern them, nor theirs it.
    calls.clear()
    rates = config.optimizer.replace(text_encoder_learning_rate=1e-3, text_encoder_stop=1)
    both = run_words(with_words(config.replace(optimizer=rates), THING.replace(stop=3)), tmp_path)
    assert not torch.equal(vectors(both)["emb_params"], vectors(two)["emb_params"])
    assert any(key.startswith("lora_te") for key in both.tensors) and calls == [True, True, False, *EFFECT]


def test_xl_learns_a_word_in_both_text_encoders_in_half_precision(config, checkpoint_xl, tmp_path):
    words = (THING, EmbeddingConfig(token="number", vectors=1, keep_norm=True))
    config = config.replace(
        base_model=BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint_xl), precision="bfloat16"),
        lora=config.lora.replace(dtype="bfloat16", embeddings=words),
        train=config.train.replace(steps=1),
    )
    result = run_words(config, tmp_path)
    assert all(map(math.isfinite, result.losses))
    assert metadata_in(result.path)["ss_base_model_version"] == "sdxl_base_v1-0"
    for word in words:
        found = vectors(result, word.token)
        shapes = {"clip_l": (word.vectors, 64), "clip_g": (word.vectors, 128)}
        assert {name: tuple(t.shape) for name, t in found.items()} == shapes
    base = load_base_model(config.base_model)
    for text, name in zip(base.texts, ("clip_l", "clip_g"), strict=True):
        start = text.model.get_input_embeddings().weight[base.tokenizer("creature")["input_ids"][1]]
        assert not torch.equal(vectors(result)[name], start.bfloat16().float().expand(3, -1))


def test_a_stopped_run_keeps_the_vectors(config, tmp_path):
    reports, notes = [], []

    class Stop(BaseException):
        pass

    def check():
        if len(reports) == 1:
            raise Stop

    with pytest.raises(Stop):
        run_words(config, tmp_path, step=reports.append, note=notes.append, check=check)
    kept = tmp_path / "words" / "my_lora_1_-stopped-at-1-thing.safetensors"
    assert load_file(kept)["emb_params"].shape == (3, 64) and str(kept) in notes[-1]


def test_words_that_cannot_be_trained_are_refused_before_a_model_is_loaded(config, tmp_path, pictures):
    (concept,) = config.dataset.concepts
    held = concept.replace(role="validation", captions=CaptionConfig(prefix="mossling"))
    elsewhere = config.replace(dataset=DatasetConfig(concepts=(concept, held)))
    long = concept.replace(captions=CaptionConfig(prefix="far " * 2390))
    for sentence, wrong in {
        "No caption that is trained contains the word mossling": with_words(
            elsewhere, EmbeddingConfig(token="mossling")
        ),
        "has no room for the 75 vectors of thing: it is cut after 2400 tokens": with_words(
            config.replace(dataset=DatasetConfig(concepts=(long,))), THING.replace(vectors=75)
        ),
        "All that is trained stops after step 3 of 4, so the last steps would train nothing": with_words(
            config.replace(
                optimizer=OptimizerConfig(learning_rate=0, text_encoder_learning_rate=1e-3, text_encoder_stop=2)
            ),
            THING.replace(stop=3),
        ),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            run_words(wrong, tmp_path, source=NeverLoaded(wrong.base_model))


@pytest.mark.parametrize(
    ("sentence", "values"),
    [
        ("'two words' is not one plain word", {"token": "two words"}),
        ("'' is not one plain word", {"token": ""}),
        ("vectors of Embedding is 76; it must be between 1 and 75", {"vectors": 76}),
        ("learning_rate of Embedding is 0; it must be between 1e-08 and 100", {"learning_rate": 0}),
        ("stop of Embedding is 2; it must be between 0 and 1", {"stop": 2, "stop_unit": "share"}),
        (
            "stop of the embedding thing is 0.5 epochs; set stop of Embedding to a whole",
            {"stop": 0.5, "stop_unit": "epochs"},
        ),
    ],
)
def test_settings_of_no_sense_are_refused(sentence, values):
    with pytest.raises(ValueError, match=sentence):
        EmbeddingConfig(**{"token": "thing", **values})
    with pytest.raises(ValueError, match="Two embeddings have the token thing"):
        LoraConfig(embeddings=(THING, THING.replace(token="Thing")))


def test_the_estimate_counts_the_text_encoder_that_runs_live(config):
    without, words = estimated(with_words(config)), estimated(config)
    assert words.weights > without.weights and words.activations > without.activations
    assert words.network - without.network == pytest.approx(
        3 * 64 * 4 * 5, abs=64
    )  # weights, gradients, two moments, what is seen of the noise


def alone(config, **parts):
    """Train the words alone."""
    return change(config, optimizer={"learning_rate": 0}, **parts)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.thorough), "float16"])
def test_a_word_is_trained_alone(config, tmp_path, precision):
    """Most steps have no caption with the word, so that nothing is to be trained in them."""
    (concept,) = config.dataset.concepts
    rare = concept.replace(captions=CaptionConfig(dropout=0.75))
    config = alone(config, base_model={"precision": precision}, memory={"checkpointing": "full"})
    config = change(config, dataset={"concepts": (rare,)}, train={"steps": 6, "batch_size": 1, "accumulate": 1})
    config = config.replace(sample=SampleConfig(prompts=("a thing", "a sky"), width=64, height=64, steps=2))
    result = run_words(config, tmp_path)
    samples = [sample for step in range(6) for each in result.plan.step(step) for sample in each.samples]
    assert "" in {sample.caption for sample in samples} and all(map(math.isfinite, result.losses))
    assert not result.tensors and not list((tmp_path / "out").glob("*.safetensors"))
    assert result.path == result.embeddings["thing"] and not torch.equal(
        vectors(result)["emb_params"], begun(config).expand(3, -1)
    )
    assert result.effect.startswith("The embedding changes a prediction by ")
    folder = open_run(result.run)
    checkpoint, packed = save_to_export(folder, None), io.BytesIO()
    write_archive(folder, checkpoint, packed)
    with zipfile.ZipFile(packed) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".safetensors"))
    assert "embeddings/" in name
    published = published_files_of(folder, checkpoint, licence="mit", samples=False)
    (name,) = (name for name in published if name.endswith(".safetensors"))
    card = published["README.md"].decode()
    assert name.startswith("embeddings/") and "An embedding, trained" in card and "models/loras" not in card
    untrained = run_words(
        alone(config, train={"steps": 1}, lora={"embeddings": (THING.replace(learning_rate=1e-8),)}), tmp_path
    )
    assert not torch.equal(result.samples[0], untrained.samples[0])
    assert torch.equal(result.samples[1], untrained.samples[1])


def test_words_alone_resume_to_the_last_bit(config, tmp_path):
    whole = run_words(alone(config), tmp_path)
    config = alone(config, existing={"on_existing": "resume"})
    with pytest.raises(Cut):
        run_words(config, tmp_path / "cut", step=cut_at(2))
    (kept,) = (tmp_path / "cut").glob("[ow]*/*.safetensors")
    assert kept.name == "my_lora_1_-stopped-at-2-thing.safetensors"
    result = run_words(config, tmp_path / "cut")
    assert "Resumed after step 2" in result.origin and result.losses == whole.losses
    assert torch.equal(vectors(result)["emb_params"], vectors(whole)["emb_params"])
    (kept,) = (tmp_path / "cut").glob("[ow]*/*.safetensors")
    assert kept.name == "my_lora_1_-thing.safetensors"


def test_a_run_that_trains_nothing_is_refused(config):
    with pytest.raises(ValueError, match="no word is trained, so nothing is trained; set learning_rate of Optimizer"):
        alone(config, lora={"embeddings": ()})
