"""Averages of the weights in a whole run: both versions are saved and sampled, and training does not notice."""

import shutil

import pytest
import torch
from durable import apart, equal
from lora_runs import metadata_in
from safetensors.torch import load_file
from tiny_runs import change, run, tiny_config

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, SampleConfig

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")


@pytest.fixture
def config(checkpoint, pictures, tmp_path):
    kept = tmp_path / "kept"  # one picture that is not trained
    kept.mkdir()
    for name in ("0.png", "0.txt"):
        shutil.copy(pictures / name, kept)
    return tiny_config(
        checkpoint,
        ConceptConfig(folder=str(pictures), captions=CaptionConfig(dropout=0.2)),
        ConceptConfig(folder=str(kept), role="validation"),
        lora={"preset": "attn-mlp"},
        optimizer={"learning_rate": 1e-2},
        train={"seed": 11, "save_dtype": "float32"},
    )


def test_the_running_average_is_saved_sampled_and_validated_beside_the_plain_weights(config, tmp_path):
    config = config.replace(sample=SampleConfig(prompts=("a",), width=64, height=64, steps=1))
    average = {"ema_decay": 0.5, "ema_device": "cpu"}
    plain = [run(change(config, train={"steps": n}), tmp_path) for n in (1, 2)]
    both = run(change(config, train={"steps": 2}, optimizer=average), tmp_path)
    assert (both.path.name, both.others[0].name) == ("lora-3-ema.safetensors", "lora-3.safetensors")
    assert equal(load_file(both.others[0]), plain[1].tensors) and both.losses == plain[1].losses
    assert equal(load_file(both.path), both.tensors)
    for name in both.tensors:
        if name.endswith("lora_up.weight"):  # begins with 0
            expected = torch.zeros(())
            for decay, weights in zip((0.1, 2 / 11), plain, strict=True):
                expected = decay * expected + (1 - decay) * weights.tensors[name]
            torch.testing.assert_close(both.tensors[name], expected)
    assert both.samples.shape == (2, 64, 64, 3) and torch.equal(both.samples[1:], plain[1].samples)
    assert not torch.equal(both.samples[0], both.samples[1])
    assert both.validation[0] == plain[1].validation[0] and apart(both.validation[1][1], plain[1].validation[1][1])
    assert metadata_in(both.path)["atelier.average"] == "ema"
    assert metadata_in(both.path)["ss_optimizer"].startswith("torch.optim.adamw.AdamW(weight_decay=0.01,")
    plainly = average | {"ema_output": "plain"}
    other = run(change(config, train={"steps": 2}, optimizer=plainly), tmp_path)
    assert (other.path.name, other.others[0].name) == ("lora-4.safetensors", "lora-4-ema.safetensors")
    assert equal(other.tensors, plain[1].tensors) and other.validation == plain[1].validation


def test_schedule_free_training_continues_exactly_after_validation_and_saves_its_average(config, tmp_path):
    """In bfloat16 and with a text encoder that stops, whose captions are remembered from then on."""
    config = change(config, lora={"dtype": "bfloat16"})
    settings = {"name": "schedulefree_adamw", "text_encoder_learning_rate": 1e-2, "text_encoder_stop": 2}
    config = change(config, optimizer=settings)
    often = run(change(config, train={"validate_every": 1}), tmp_path)
    assert len(often.validation) == 5
    learning = {k: t.bfloat16().float() for k, t in often.tensors.items()}
    assert not equal(often.tensors, learning)  # what learns is bfloat16, its average is not

    def stop(report):
        if report.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(change(config, train={"steps": 6}), tmp_path, step=stop)
    assert equal(load_file(tmp_path / "lora-stopped-at-4.safetensors"), often.tensors)


def test_a_step_size_that_is_found_is_reported_and_a_strange_rate_remarked(config, tmp_path):
    reports, notes = [], []
    options = {"use_bias_correction": False, "safeguard_warmup": False, "d_coef": 50.0}
    optimizer = {"name": "prodigy", "options": options, "learning_rate": 0.1, "text_encoder_learning_rate": 1.0}
    run(change(config, optimizer=optimizer), tmp_path, step=reports.append, note=notes.append)
    rates = [report.learning_rates["lora_unet"] for report in reports]
    assert rates[0] == pytest.approx(1e-7) and rates == sorted(rates) and rates[-1] > rates[0]
    assert any("estimates its step size, and learning_rate 0.1 multiplies it" in note for note in notes)
