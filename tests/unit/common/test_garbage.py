"""Searches for garbage pause while many objects are made, also where two threads do so."""

import gc

import pytest

from lora_atelier.trainer_core.common.garbage import uncollected


class Held:
    """Something that only a search finds, as it names itself."""

    def __init__(self):
        self.own = self


def test_nothing_is_searched_meanwhile_and_again_afterwards():
    searched = []
    gc.callbacks.append(lambda phase, _: searched.append(phase))
    try:
        with uncollected():
            kept = [Held() for _ in range(100_000)]
            assert not searched
        kept += [Held() for _ in range(100_000)]
        assert searched
    finally:
        gc.callbacks.pop()


def test_who_comes_second_leaves_the_searches_to_the_first():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_lets_them_go_on():
    with pytest.raises(ValueError, match="x"), uncollected():
        raise ValueError("x")
    assert gc.isenabled()
