"""Settings that guides recommend, as they write them: each trains, and does what it is called."""

import pytest
import torch
from clip_tokenizer import TOKENIZER
from tiny_runs import run

from lora_atelier.trainer_core.config import RunConfig

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")

# What a guide recommends, and the learning rate of the first steps as a share of the highest.
GUIDES = {
    "CAME, REX, Huber": (
        {
            "optimizer": {"name": "came", "learning_rate": 3e-4},
            "scheduler": {"name": "rex"},
            "objective": {"loss": "huber", "min_snr_gamma": 5.0},
        },
        [1.0, (1 - 1 / 3) / (0.1 + 0.9 * (1 - 1 / 3)), (1 - 2 / 3) / (0.1 + 0.9 * (1 - 2 / 3))],
    ),
    "Adafactor, constant with warm-up": (
        {
            "optimizer": {"name": "adafactor", "learning_rate": 1e-5},
            "scheduler": {"name": "constant", "warmup_steps": 2},
        },
        [0.5, 1.0, 1.0],
    ),
    "Prodigy Plus, schedule-free": (
        {
            "optimizer": {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0},
            "scheduler": {"name": "constant"},
        },
        [1e-6, 1e-6],  # it estimates its rate, and begins with this
    ),
    "LoCon of sd-scripts, alpha of each block, bounded norms": (
        {
            "lora": {
                "preset": "full",
                "rank": 8,
                "alpha": 4.0,
                "conv_rank": 16,
                "conv_alpha": 4.0,
                "block_alphas": [0.0625] * 25,
                "scale_weight_norms": 1.0,
            },
            "optimizer": {"name": "adamw", "learning_rate": 1e-4, "text_encoder_learning_rate": 1e-4},
            "scheduler": {"name": "cosine"},
            "objective": {"pyramid_iterations": 10, "pyramid_discount": 0.1},
            "captions": {"shuffle": True},
        },
        [1.0, 0.75, 0.25],
    ),
    "masks of OneTrainer": (
        {
            "optimizer": {"name": "adamw", "learning_rate": 3e-4},
            "scheduler": {"name": "linear"},
            "masks": {"unmasked_probability": 0.1, "unmasked_weight": 0.1, "missing": "ones"},
            "resolutions": ("64", "96"),
        },
        [1.0, 2 / 3, 1 / 3],
    ),
}


# In every run others take steps by these optimizers, and test_schedule.py knows the curves.
AGAIN = ("CAME, REX, Huber", "Adafactor, constant with warm-up", "Prodigy Plus, schedule-free")


@pytest.mark.parametrize(
    "guide", [pytest.param(name, marks=pytest.mark.thorough if name in AGAIN else ()) for name in GUIDES]
)
def test_a_guide_s_settings_train_as_they_are_written(guide, checkpoint, pictures, tmp_path):
    settings, shares = GUIDES[guide]
    more = dict(settings)
    concept = {"folder": str(pictures), "captions": more.pop("captions", {}), "masks": more.pop("masks", None)}
    buckets = {"resolutions": more.pop("resolutions", ())}
    config = RunConfig.from_dict(
        {
            "base_model": {"tokenizer": str(TOKENIZER), "path": str(checkpoint)},
            "dataset": {"concepts": [concept]},
            "lora": {"rank": 8, "alpha": 4.0},
            "train": {"steps": 3, "batch_size": 2, "resolution": 64, "bucket_step": 32, "buckets": buckets},
            "existing": {"on_existing": "train again"},
            **more,
        }
    )
    reports = []
    result = run(config, tmp_path, step=reports.append)
    assert all(report.updated for report in reports)
    rates = [max(report.learning_rates.values()) / config.optimizer.learning_rate for report in reports]
    assert rates[: len(shares)] == pytest.approx(shares)
    ups = [tensor for name, tensor in result.tensors.items() if name.endswith("lora_up.weight")]
    assert ups and all(torch.isfinite(up).all() for up in ups) and any(up.any() for up in ups)
