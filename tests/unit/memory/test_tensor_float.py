"""TF32 is set for a run alone: every flag of torch is afterwards what it was, also after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lora_atelier.trainer_core.memory import tensor_float

PRODUCTS: Any = torch.backends.cuda.matmul
CONVOLUTIONS: Any = torch.backends.cudnn
NEW = hasattr(PRODUCTS, "fp32_precision")


def flags() -> list[object]:
    places = (PRODUCTS, CONVOLUTIONS.conv, CONVOLUTIONS.rnn) if NEW else ()
    return [PRODUCTS.allow_tf32, CONVOLUTIONS.allow_tf32, *(each.fp32_precision for each in places)]


@pytest.fixture(params=["plain", "on", "off"])
def before(request: pytest.FixtureRequest) -> Iterator[list[object]]:
    kept = flags()
    if request.param != "plain":  # as a person or another node has set them
        PRODUCTS.allow_tf32 = CONVOLUTIONS.allow_tf32 = request.param == "on"
    yield flags()
    PRODUCTS.allow_tf32, CONVOLUTIONS.allow_tf32 = kept[:2]
    if NEW:
        for each, name in zip((PRODUCTS, CONVOLUTIONS.conv, CONVOLUTIONS.rnn), kept[2:], strict=True):
            each.fp32_precision = name


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_flags_are_set_and_put_back(before: list[object], choice: str, fails: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt), tensor_float(choice):
        expected = before[:2] if choice == "auto" else [choice == "on"] * 2
        assert flags()[:2] == expected
        if fails:
            raise KeyboardInterrupt
    assert flags() == before


@pytest.mark.skipif(not NEW, reason="torch before 2.9 has the older flags alone")
def test_a_newer_flag_that_a_person_set_is_kept(before: list[object]) -> None:
    """Torch refuses to read the older flags then."""
    PRODUCTS.fp32_precision = "tf32"
    with tensor_float("off"):
        assert not PRODUCTS.allow_tf32
    assert PRODUCTS.fp32_precision == "tf32"
