"""The memory estimate decides before anything is loaded: what fits runs, what does not is refused with a way out."""

import pytest
import torch
from prepared import NeverLoaded, Ready, estimated
from tiny_runs import change, run, run_with_notes, tiny_config

from lora_atelier.trainer_core.config import MemoryConfig
from lora_atelier.trainer_core.memory import BUDGETS, LEVELS
from lora_atelier.trainer_core.preflight import memory as preflight
from lora_atelier.trainer_core.preflight.estimate import Encoding, Estimate, LiveBytes, estimate_encoding
from lora_atelier.trainer_core.preflight.memory import encoding_of

pytestmark = pytest.mark.usefixtures("each_estimate_once")


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint,
        pictures,
        base_model={"weights": "float32"},  # which no file has for certain, so that none stay in theirs
        lora={"rank": 4, "alpha": 4, "preset": "attn-mlp"},
        train={"steps": 2, "batch_size": 4, "resolution": 128, "bucket_step": 128},
    )


@pytest.fixture(scope="module")
def totals():
    """Give `totals(config)` -> the bytes that each level needs, estimated once."""
    known = {}

    def of(config):
        if config.digest() not in known:
            known[config.digest()] = {level: estimated(config, level).total for level in LEVELS}
        return known[config.digest()]

    return of


def let_be_free(monkeypatch, amount):
    monkeypatch.setattr(preflight, "free_bytes", lambda device: amount)


def run_and_estimate(config, folder):
    """Train; return the result and the sentence of the estimate before it."""
    result, notes = run_with_notes(config, folder)
    return result, next(note for note in notes if note.startswith("Memory: about"))


def test_each_level_needs_less(config, totals):
    totals = list(totals(config).values())
    assert totals == sorted(totals, reverse=True) and totals[-1] < 0.8 * totals[0]


def test_a_smaller_budget_of_the_compiler_needs_less_and_all_need_more_than_recomputed_blocks(config, totals):
    first, *_, last = (estimated(config, budget).total for budget in list(BUDGETS)[:: len(BUDGETS) - 1])
    assert totals(config)["0"] > first > last > totals(config)["full"]


def test_what_fits_is_not_slowed_down_and_what_does_not_takes_the_first_level_that_does(
    config, totals, tmp_path, monkeypatch
):
    plain, said = run_and_estimate(config, tmp_path)
    assert "with gradient checkpointing 0." in said
    needed = totals(config)
    let_be_free(monkeypatch, needed["2"])
    first = next(level for level in LEVELS if needed[level] <= needed["2"])
    small, said = run_and_estimate(config, tmp_path)
    assert f"with gradient checkpointing {first}." in said and first != "0"
    assert small.losses == pytest.approx(plain.losses, rel=1e-5)


def test_settings_that_do_not_fit_are_refused_with_the_cheapest_that_do(config, totals, tmp_path, monkeypatch):
    let_be_free(monkeypatch, 0.89 * totals(config)["0"])
    fixed = config.replace(memory=MemoryConfig(checkpointing="0"))
    refused = (
        r"needs about .* with gradient checkpointing 0, and .* free: "
        r"set gradient checkpointing [1-4f]"
    )
    with pytest.raises(ValueError, match=refused):
        run(fixed, tmp_path, source=NeverLoaded(config.base_model))


def test_what_fits_in_no_way_names_smaller_weights_and_batches(config, tmp_path, monkeypatch):
    small = change(config, base_model={"weights": "float8"})
    let_be_free(monkeypatch, estimated(small, "full").total)
    with pytest.raises(ValueError, match=r"set weights float8 with gradient checkpointing segments of 4 \(.* GB\)"):
        run(config, tmp_path, source=NeverLoaded(config.base_model))
    let_be_free(monkeypatch, 1)
    with pytest.raises(ValueError, match="lower the resolution"):
        run(config, tmp_path, source=NeverLoaded(config.base_model))


def test_what_other_programs_keep_is_no_room_to_be_tight_in(config, totals, tmp_path, monkeypatch):
    """A run that could begin without a budget is refused in one sentence, which names a budget that fits."""
    let_be_free(monkeypatch, round(0.95 * totals(config)["full"]) + 2 * 10**9)
    kept = config.replace(memory=MemoryConfig(keep_free=2))
    refused = r"and .* GB are free beside the 2 GB of keep_free of Memory: set .*; or keep_free 1\.9\.$"
    with pytest.raises(ValueError, match=refused):
        run(kept, tmp_path, source=NeverLoaded(config.base_model))


def test_trained_text_encoders_and_longer_captions_need_more(config):
    texts = change(config, optimizer={"text_encoder_learning_rate": 1e-4})
    plain = estimated(config).total
    assert estimated(texts).total > plain and estimated(config, tokens=231).total > plain


def test_models_that_encode_while_training_count(config, tmp_path, monkeypatch):
    """Until they no longer fit: then the refusal names the setting, and a run that keeps encodings goes on."""
    live = config.replace(memory=MemoryConfig(encodings="none"))
    base, vae = Ready(config.base_model).outline(), Ready(config.base_model).outline_autoencoder()
    weights = sum(t.nbytes for model in (vae, base.texts[0].model) for t in model.state_dict().values())
    result, said = run_and_estimate(live, tmp_path)
    plan = result.plan
    encoding = encoding_of(config, plan, base, vae, torch.device("cpu"))
    assert encoding.vae + encoding.texts == pytest.approx(weights, rel=0.01)
    plain = estimated(config, "full")
    assert f"Memory: about {encoding.beside(estimated(config), moves=False).gigabytes} of" in said
    assert said.endswith("with gradient checkpointing 0, encoding while training.")
    let_be_free(monkeypatch, plain.total)
    refused = r"checkpointing segments of 4, encoding while training, .* free: set encodings disk with gradient"
    with pytest.raises(ValueError, match=refused):
        run(live, tmp_path, source=NeverLoaded(config.base_model))
    assert "with gradient checkpointing full." in run_and_estimate(config, tmp_path)[1]


def test_models_that_encode_while_training_take_what_they_are():
    step = Estimate(weights=100, network=10, activations=50)
    small = Encoding(vae=20, texts=30, work=5)
    assert small.beside(step, moves=False) == Estimate(weights=150, network=10, activations=50)
    assert small.beside(step, moves=True) == step  # they are gone before the passes
    large = Encoding(vae=20, texts=30, work=70)
    assert large.beside(step, moves=False) == Estimate(weights=150, network=10, activations=70)
    assert large.beside(step, moves=True) == Estimate(weights=100, network=10, activations=90)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_autoencoders_work_is_estimated_as_it_is(config, precision):
    dtype, size = getattr(torch, precision), (48, 32)
    base, vae = Ready(config.base_model).load(torch.float32), Ready(config.base_model).outline_autoencoder()
    encoding = estimate_encoding(base, vae, (), size=size, dtype=dtype, block=1)
    real, pixels = base.autoencoder.module.to(dtype), torch.zeros(1, 3, 32, 48)
    with LiveBytes() as live:
        base.autoencoder.encode(real, pixels)
    assert encoding.work == pytest.approx(live.peak + pixels.nbytes, rel=0.02)
    single = sum(t.nbytes for t in base.autoencoder.module.float().state_dict().values())
    assert encoding.vae == pytest.approx(single * (1.5 if precision == "float16" else 1), rel=0.01)
