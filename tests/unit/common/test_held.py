"""Large files lie in memory together only as far as they fit."""

import threading
import time

import pytest

from lora_atelier.trainer_core.common import held as module
from lora_atelier.trainer_core.common.held import held


@pytest.mark.parametrize("size, together", [(3, 3), (6, 1), (100, 1)])
def test_no_more_is_held_than_fits_and_each_gets_its_turn(monkeypatch, size, together):
    monkeypatch.setattr(module, "MOST_AT_ONCE", 10)
    now, most, done = 0, 0, threading.Semaphore(0)
    lock, full = threading.Lock(), threading.Barrier(together)

    def work():
        nonlocal now, most
        with held(size):
            with lock:
                now += 1
                most = max(most, now)
            full.wait(10)  # until as many hold as may
            time.sleep(0.02)  # for others that may not
            with lock:
                now -= 1
        done.release()

    for _ in range(6):
        threading.Thread(target=work, daemon=True).start()
    assert all(done.acquire(timeout=20) for _ in range(6))
    assert most == together
