"""Cases that prove again what another case proves: they run with --thorough."""

from typing import Any

import pytest


def again(*cases: Any) -> list[Any]:
    """Mark cases of `parametrize`: values, or tuples of them."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in values]
