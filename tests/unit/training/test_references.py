"""Captions that text encoders read with control pictures: all that a run predicts for."""

from types import SimpleNamespace

import pytest

from lora_atelier.trainer_core.config import BaseModelConfig, DatasetConfig, ObjectiveConfig, RunConfig
from lora_atelier.trainer_core.objective import terms_of
from lora_atelier.trainer_core.training.references import seen_captions


@pytest.mark.parametrize(
    ("objective", "others"),
    [
        (ObjectiveConfig(), set()),
        (ObjectiveConfig(preservation="blank"), {""}),
        (ObjectiveConfig(guidance_loss=3.0), {""}),
        (ObjectiveConfig(slider="prompts", slider_positive="old", slider_negative="young"), {"old", "young"}),
    ],
)
def test_every_prompt_of_a_step_is_read_with_the_control_pictures(objective, others):
    plan = SimpleNamespace(
        manifest=SimpleNamespace(pictures=[SimpleNamespace(controls=("edge.png",)), SimpleNamespace(controls=())]),
        visits=lambda: {0: (0,), 1: (0,)},
        sample=lambda picture, visit: SimpleNamespace(picture=picture, caption=f"figure {picture}", crop=None),
        shown=lambda sample: ("edge",),
        validation=(),
    )
    run = RunConfig(base_model=BaseModelConfig(path="x"), dataset=DatasetConfig(), objective=objective)
    found = seen_captions(plan, SimpleNamespace(text=SimpleNamespace(seen_as="picture")), terms_of(run), {})
    assert found == {(text, ("edge",)) for text in {"figure 0", *others}}
