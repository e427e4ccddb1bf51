"""Numbers of what models compute are one where they differ by rounding, and compared only where both are known."""

import pytest

from lora_atelier.trainer_core.common.computed import KEY, Computed

FOUND = Computed((3.0, -4.0), 0.01)


@pytest.mark.parametrize(
    ("known", "differs"),
    [
        ([3.0, -4.0], False),
        ([3.03, -4.03], False),  # 0.042 of 5
        ([3.0, -4.06], True),
        ([3.0], True),
        ([], True),
        (None, False),
        ("text", False),
        (["3", "-4"], False),
        ([3.0, [4.0]], False),
    ],
)
def test_a_run_of_other_numbers_is_of_another_model(known: object, differs: bool) -> None:
    assert FOUND.differs({KEY: known}) is differs
    assert not Computed().differs({KEY: known}) and not FOUND.differs({})
