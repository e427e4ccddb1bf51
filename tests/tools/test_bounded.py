"""The bound on a block's computing stops what hangs, and does not count waiting."""

import time

import pytest
from bounded import bounded


def test_a_block_that_computes_forever_is_stopped():
    with pytest.raises(AssertionError, match=r"0\.2 s"), bounded(0.2):
        while True:
            pass


def test_a_block_that_waits_is_not_stopped():
    with bounded(0.2):
        time.sleep(0.5)


def test_an_error_of_the_block_passes_through():
    with pytest.raises(KeyError), bounded(5):
        raise KeyError
