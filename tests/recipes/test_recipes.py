"""Golden losses: what a run of every kind gives stays what it was when it was recorded, on every machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipes.recipes import RECIPES

GOLDEN = json.loads(Path(__file__).with_name("losses.json").read_text())
RESUMED = [name for name, recipe in RECIPES.items() if recipe.undisturbed]
CLOSE = 1e-5  # relative; the bits themselves depend on processor and libraries, see record.py


def test_every_recipe_is_recorded_and_no_other():
    assert list(GOLDEN) == list(RECIPES)


AGAIN = (
    # Their layers have tests of their own, against closed forms and against ComfyUI; so have rounding and clipping.
    *("loha in tucker's form", "boft", "glora", "ia3", "lokr", "oft", "dora", "norms and whole differences"),
    *(
        "bfloat16 rounded at random",
        "dropouts, bounded norms",
        "lora+, ranks and rates of blocks",
        "sgd, cut gradients",
    ),
    # test_train.py continues a LoRA and trains above one, test_averages.py and test_control.py have closed forms.
    *("continued", "one beneath", "average", "best by validation"),
    "resumed",  # test_resume.py and test_live.py go on
    # test_guides.py has several resolutions, test_control.py accumulates, and test_objectives.py has a prior.
    *("accumulated, several resolutions", "prior prediction"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in AGAIN else ()) for name in RECIPES]
)
def test_losses_are_what_they_were(name, run_of):
    result = run_of(name)
    assert result.losses == pytest.approx(GOLDEN[name]["losses"], rel=CLOSE, abs=0)
    assert [step for step, _ in result.validation] == [step for step, _ in GOLDEN[name]["validation"]]
    assert [loss for _, loss in result.validation] == pytest.approx(
        [loss for _, loss in GOLDEN[name]["validation"]], rel=CLOSE, abs=0
    )
    assert (result.best and result.best[0]) == GOLDEN[name].get("best")


@pytest.mark.thorough
@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_equals_the_undisturbed_one_to_the_last_bit(name, run_of):
    resumed, whole = run_of(name), run_of(RECIPES[name].undisturbed)
    assert resumed.losses == whole.losses and resumed.validation == whole.validation
    assert resumed.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(tensor, whole.tensors[key]) for key, tensor in resumed.tensors.items())
