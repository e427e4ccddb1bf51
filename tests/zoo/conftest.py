"""Fixtures of the zoo: its tiny models, each built anew for every test."""

import pytest
from zoo.comfy_here import VERSION
from zoo.zoo import OF_EACH_KIND, ZOO

from lora_atelier.dev import OLDEST

# What the oldest ComfyUI proves in every run of the tests; the newest proves the rest, and --thorough all on both.
FILES = ("test_names", "test_offline", "test_session")


def pytest_itemcollected(item: pytest.Function) -> None:
    """Leave most of the oldest ComfyUI to --thorough."""
    if VERSION != OLDEST or item.path.stem in FILES:
        return
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if not any(row in values for row in OF_EACH_KIND.values()):
        item.add_marker(pytest.mark.thorough)


@pytest.fixture(params=list(ZOO))
def name(request: pytest.FixtureRequest) -> str:
    """Run a test once for each architecture that this ComfyUI has."""
    return request.param
