"""The Scheduler in a real ComfyUI: what its prompts may say, and the curve that the editor asks for."""

import urllib.error

import pytest
from train_graph import chosen, node

from comfy_client import ComfyClient, ComfyServer, answer_of

OLD = {"warmup_steps": 0, "min_lr_ratio": 0.0}  # all that prompts had besides the name, before the later inputs
WIDGETS = {**chosen("name", "rex", d=0.5), "warmup_steps": 10, "min_lr_ratio": 0.0, "warmup_unit": "steps"}


def run(comfy: ComfyClient, **inputs: object):
    """Queue a Scheduler alone and return what came of it."""
    return comfy.queue({"s": node("AtelierScheduler", **inputs), "show": node("PreviewAny", source=["s", 0])})


def ask(comfy: ComfyClient, question: object) -> dict:
    """Ask for a curve as the editor does."""
    return answer_of(comfy.request("/api/atelier/schedule", question))


def test_prompts_name_the_fields_of_the_chosen_shape(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    for shape, said in (
        ({"name": "linear"}, "name='linear'"),  # as prompts from before
        (chosen("name", "rex", d=0.25), "d=0.25"),
        (chosen("name", "rex_restarts", cycles=5, gamma=0.5, d=0.9, cycle_multiplier=2.0), "cycles=5"),
        (chosen("name", "rex", d=0.5, power=9.0), "power=2.0"),  # of another shape: not asked for
    ):
        result = run(comfy, **shape, **OLD)
        assert result.ok, result.error
        assert said in result.outputs["show"]["text"][0]
    assert "Required input is missing: d" in run(comfy, name="rex", **OLD).error
    assert "bigger than max of 0.999: name.d" in run(comfy, **chosen("name", "rex", d=2.0), **OLD).error
    assert "name of Scheduler is missing; set it to cosine, constant," in run(comfy, name="sawtooth", **OLD).error
    assert "'(' was never closed" in run(comfy, **chosen("name", "expression", expression="(t"), **OLD).error


def test_the_curve_is_that_of_the_run(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    short = ask(comfy, {"values": WIDGETS, "steps": 100})
    assert (short["steps"], short["warmup"], short["floor"]) == (100, 10, 0)
    factors = dict(map(tuple, short["points"]))
    assert list(factors) == list(range(100)) and factors[4] == 0.5 and factors[55] == pytest.approx(2 / 3, abs=1e-6)
    long = ask(comfy, {"values": WIDGETS, "steps": 1_000_000})["points"]
    assert len(long) == 241 and long[0][0] == 0 and long[-1][0] == 999_999
    unknown = {"values": {**WIDGETS, "planned_steps": 50}, "steps": None}
    assert ask(comfy, unknown)["steps"] == 50
    assert ask(comfy, {"values": {**WIDGETS, "warmup_steps": 3000}, "steps": None})["steps"] == 6000


@pytest.mark.parametrize(
    ("values", "steps", "sentence"),
    [
        (WIDGETS, 10, "warmup_steps is 10, and the run has 10 steps"),
        (WIDGETS, 0, "steps is 0; it must be a whole number"),
        (WIDGETS, 10**9, "steps is 1000000000; it must be a whole number"),
        (WIDGETS, "many", "steps is 'many'"),
        ({**WIDGETS, "name.d": "0.5"}, 100, "d of Scheduler cannot be '0.5'"),
        ({**WIDGETS, "warmup_steps": True}, 100, "warmup_steps of Scheduler cannot be True"),
        ({**WIDGETS, "path": "/etc"}, 100, "path of Scheduler cannot be"),
        ({**WIDGETS, "name": None}, 100, "name of Scheduler cannot be None"),
        ({"warmup_steps": 1}, 100, "name of Scheduler is missing"),
        ({**WIDGETS, "name": "sawtooth"}, 100, "name of Scheduler is 'sawtooth'; choose one of"),
        (chosen("name", "expression", expression="1 / t"), 100, "has no value (float division by zero)"),
        ([], 100, "needs the Scheduler's values"),
    ],
)
def test_a_curve_that_there_is_not_is_a_sentence(comfy: ComfyClient, values, steps, sentence: str) -> None:
    assert sentence in ask(comfy, {"values": values, "steps": steps})["error"]


def test_a_question_that_is_none_is_refused(comfy: ComfyClient) -> None:
    for data, status in ((b"no json", 400), (b"\xff\xfe", 400), (b" " * 9000, 413)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            comfy.request("/api/atelier/schedule", data)
        assert refused.value.code == status
