"""A step of each architecture on each pretended device: the gradients are those of the CPU."""

import comfy.model_management
import pytest
import second_device
from second_device import DOUBLE, NAME, PRETENDED, device_is  # noqa: F401 (a fixture)
from zoo.trial import Trial, apart
from zoo.zoo import OF_EACH_KIND, ZOO

from lora_atelier.nodes.comfyui.connected import gradients

BFLOAT16 = ("mage_flow", "old")  # ComfyUI's code computes a part in bfloat16, wherever it is
EACH = [
    pytest.param(row, kind, marks=() if row in OF_EACH_KIND.values() and kind == "mac" else pytest.mark.thorough)
    for row in ZOO
    for kind in PRETENDED
    if (row, kind) != BFLOAT16
]


def free_memory(_, torch_free_too=False):
    return (second_device.MEMORY,) * 2 if torch_free_too else second_device.MEMORY


@pytest.mark.parametrize(("row", "kind"), EACH)
def test_a_step_has_there_the_gradients_that_it_has_here(row, kind, device_is, monkeypatch):  # noqa: F811
    device, found = device_is(kind), []
    if kind == "mac":  # which ComfyUI tells by the name, and gives no float64
        monkeypatch.setattr(comfy.model_management, "is_device_mps", lambda device: device.type == NAME)
    else:  # our own code does without, but ComfyUI's does not where there is one
        lacks = tuple(dtype for dtype in second_device.now.lacks if dtype not in DOUBLE)
        monkeypatch.setattr(second_device, "now", second_device.now._replace(lacks=lacks))
    monkeypatch.setattr(comfy.model_management, "get_free_memory", free_memory)
    for place in ("cpu", device):
        trial = Trial(row, device=place)
        with gradients.session(trial.patcher), trial.network.attached():
            found.append([each.cpu() for each in trial.gradients()])
    assert apart(found[1], found[0]) < 1e-4
