"""The recipes on each pretended device: what is learned there is what is learned here."""

from __future__ import annotations

import pytest
from recipes.recipes import RECIPES, carry_out
from second_device import PRETENDED, device_is  # noqa: F401 (a fixture)

# tools/test_second_device.py carries out a run with most parts on each device in the gate.
pytestmark = pytest.mark.thorough

REFUSED = {  # (recipe, device): how the sentence begins
    **{("weights in 8 bits", kind): r"^weights is float8, which card cannot store;" for kind in ("mac", "old")},
    ("bfloat16 rounded at random", "old"): r"^card does not compute in bfloat16;",
}


@pytest.mark.parametrize("kind", PRETENDED)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_goes_there_as_here(name, kind, run_of, material, tmp_path, device_is):  # noqa: F811
    device = device_is(kind)
    if sentence := REFUSED.get((name, kind)):
        with pytest.raises(ValueError, match=sentence):
            carry_out(name, material, tmp_path, device=device)
        return
    here, there = run_of(name), carry_out(name, material, tmp_path, device=device)
    assert there.losses == pytest.approx(here.losses, rel=1e-3)
    assert here.tensors.keys() == there.tensors.keys()
