"""What the cache is filled with: the right pixels, in a precision that holds, and never anything stale."""

import math
import shutil

import pytest
import torch
from clip_tokenizer import TOKENIZER
from gradients import loss_of

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.cache import Cache
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.data.masks import cut_mask, latent_mask, load_mask
from lora_atelier.trainer_core.data.plan import Plan, build_plan
from lora_atelier.trainer_core.data.scan import scan
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.models.sd.autoencoder import encode_pixels
from lora_atelier.trainer_core.models.sd.text import encode_caption
from lora_atelier.trainer_core.objective import Objective, terms_of
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior
from lora_atelier.trainer_core.training.batch import read_batch
from lora_atelier.trainer_core.training.encode import encode_plan
from lora_atelier.trainer_core.training.pixels import pixels

CPU = torch.device("cpu")
CONCEPT = {
    "flip": True,
    "captions": CaptionConfig(shuffle=True, dropout=0.3, tag_dropout=0.2),
    "augment": AugmentConfig(variants=2, crop_jitter=1, zoom=0.2, rotation=10, brightness=0.2),
    "masks": MaskConfig(missing="ones", unmasked_probability=0.3, unmasked_weight=0.1, prior_weight=0.5),
}
BUCKETS = BucketConfig(resolutions=("64", "96x64"))


@pytest.fixture
def base(checkpoint):
    return load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))


@pytest.fixture
def narrow(base):
    """Give the base a narrow autoencoder, as some processors take seconds for a picture in float16."""
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    wide = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    base.vae = AutoencoderTiny(**wide, num_encoder_blocks=(1,) * 4, num_decoder_blocks=(1,) * 4).eval()
    return base


def make(pictures, concept=None, **train) -> tuple[Plan, RunConfig]:
    dataset = DatasetConfig(
        concepts=(ConceptConfig(folder=str(pictures), **(CONCEPT if concept is None else concept)),)
    )
    settings = {"batch_size": 2, "steps": 5, "seed": 3, "bucket_step": 32, "resolution": 64, "buckets": BUCKETS}
    config = RunConfig(
        base_model=BaseModelConfig(tokenizer=TOKENIZER, path="x"),
        dataset=dataset,
        train=TrainConfig(**{**settings, **train}),
    )
    return build_plan(scan(dataset), dataset, config.train), config


def test_a_batch_from_the_store_is_the_batch_without_one(base, pictures, tmp_path):
    """The same loss, to the last bit, whether pictures, masks and captions come from the cache or are made anew."""
    plan, config = make(pictures)
    objective = Objective(config.objective, base.noise, config.train.seed, terms=terms_of(config))
    with Cache(tmp_path) as cache:
        cold = encode_plan(base, plan, cache, CPU, Callbacks(), prompts=set())
    warm = encode_plan(base, plan, Cache(tmp_path), CPU, Callbacks(phase=pytest.fail), prompts=set())
    texts, base.texts = base.texts, ()
    dataset, drawn = config.dataset, set()
    for step in range(plan.steps):
        for micro_batch in plan.step(step):
            first, second = (read_batch(e, micro_batch, plan, config, objective.terms) for e in (cold, warm))
            shares = first.shares.get(MaskedPrior, torch.zeros(len(micro_batch.samples)))
            for i, sample in enumerate(micro_batch.samples):
                picture = plan.manifest.pictures[sample.picture]
                mean, std = encode_pixels(base.vae, pixels(cut(load_picture(picture.path), sample.crop))[None], 1.0)
                assert torch.equal(cold.latents(sample)[0], mean[0]) and torch.equal(cold.latents(sample)[1], std[0])
                masks = dataset.concepts[0].masks
                if picture.mask:
                    whole = load_mask(picture.mask, (picture.width, picture.height), masks)
                    assert torch.equal(cold.mask(sample), latent_mask(cut_mask(whole, sample.crop), 8))
                else:
                    assert cold.mask(sample) is None
                context = encode_caption(texts, base.tokenizer, sample.caption, CPU).context
                assert torch.equal(warm.conditioning(sample.caption)["context"], context)
                drawn.add((sample.use_mask, picture.mask is None))
                assert float(shares[i]) == (0.5 if sample.use_mask else 0)
            drawn_for = [objective.draw(batch, CPU) for batch in (first, second)]
            assert torch.equal(*(loss_of(objective, draws.noised, draws, -draws.noised) for draws in drawn_for))
    assert drawn == {(True, False), (False, False), (False, True)}


def test_a_vae_that_overflows_in_float16_is_asked_again_in_float32(narrow, pictures, tmp_path):
    plan, _ = make(pictures, {}, steps=1, batch_size=1, buckets=BucketConfig())
    exact = encode_plan(narrow, plan, Cache(tmp_path / "exact"), CPU, Callbacks(), prompts=None)
    first, last = narrow.vae.encoder.layers[0], narrow.vae.encoder.layers[-1]
    with torch.no_grad():  # an autoencoder of the same function in float32 whose inner values no float16 holds
        first.weight *= 2.0**17
        first.bias *= 2.0**17
    notes = []
    sample = plan.step(0)[0].samples[0]
    options = {"prompts": None, "vae_dtype": torch.float16}
    coded = encode_plan(narrow, plan, Cache(tmp_path / "a"), CPU, Callbacks(note=notes.append), **options)
    assert any("overflows in float16" in note and "encoded in float32 instead" in note for note in notes)
    assert coded.latents(sample)[0].isfinite().all()
    plain = encode_plan(narrow, plan, Cache(tmp_path / "b"), CPU, Callbacks(note=pytest.fail), prompts=None)
    assert torch.equal(coded.latents(sample)[0], plain.latents(sample)[0])
    assert coded.latent_keys[sample.view] != plain.latent_keys[sample.view]
    with torch.no_grad():
        last.weight *= math.inf
    with pytest.raises(ValueError, match=r"not finite for \d\.png; use another VAE"):
        encode_plan(narrow, plan, Cache(tmp_path / "c"), CPU, Callbacks(), **options)
    assert exact.latents(sample)[0].isfinite().all()


def test_float16_that_holds_is_used_and_close(narrow, pictures, tmp_path):
    plan, _ = make(pictures, {}, steps=1, batch_size=1, buckets=BucketConfig())
    exact = encode_plan(narrow, plan, Cache(tmp_path / "a"), CPU, Callbacks(), prompts=None)
    half = encode_plan(
        narrow, plan, Cache(tmp_path / "b"), CPU, Callbacks(note=pytest.fail), prompts=None, vae_dtype=torch.float16
    )
    for key in exact.latent_keys:
        one, other = exact.cache.get(exact.latent_keys[key]), half.cache.get(half.latent_keys[key])
        assert not torch.equal(one["mean"], other["mean"])
        assert torch.allclose(one["mean"], other["mean"], atol=0.02)
    assert next(narrow.vae.parameters()).dtype == torch.float32


def test_the_disk_is_asked_before_anything_is_encoded(base, pictures, tmp_path, monkeypatch):
    plan, _ = make(pictures)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    base.vae.encode = lambda *_: pytest.fail("something was encoded")
    with pytest.raises(
        ValueError,
        match=r"Encoded pictures need \d+ MB and 0 MB are free in .*; make room, or set encodings of Memory to RAM",
    ):
        encode_plan(base, plan, Cache(tmp_path / "new" / "cache"), CPU, Callbacks(), prompts=None)


def test_changed_and_vanished_files_are_named_and_never_stored(base, pictures, tmp_path):
    copy = tmp_path / "pictures"
    shutil.copytree(pictures, copy)
    plan, _ = make(copy)
    for break_it, sentence in (
        (lambda: (copy / "1.png").write_bytes((copy / "0.png").read_bytes()), r"1\.png has changed since the scan"),
        (lambda: (copy / "1.png").unlink(), r"1\.png has vanished since the scan"),
        (lambda: shutil.rmtree(copy), r"0\.png has vanished since the scan"),
    ):
        break_it()
        cache = Cache(tmp_path / "cache") if copy.exists() else Cache(tmp_path / "empty")
        with pytest.raises(ValueError, match=sentence):
            encode_plan(base, plan, cache, CPU, Callbacks(), prompts=None)
