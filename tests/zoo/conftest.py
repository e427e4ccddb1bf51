"""Fixtures of the zoo: its tiny models, each built anew for every test."""

import pytest
from zoo.zoo import ZOO


@pytest.fixture(params=list(ZOO))
def name(request: pytest.FixtureRequest) -> str:
    """Run a test once for each architecture that this ComfyUI has."""
    return request.param
