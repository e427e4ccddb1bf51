"""The one rule of the time that is left."""

from lora_atelier.trainer_core.common.remaining import WINDOW, Remaining


def test_the_pace_is_that_of_the_last_steps():
    remaining = Remaining()
    assert remaining.texts(10) == []
    remaining.add(4, 100.0)
    assert remaining.texts(10) == []
    remaining.add(5, 102.0)
    assert remaining.texts(10) == ["0:10 left", "2.00 s/it"]
    for step in range(WINDOW):
        remaining.add(6 + step, 102.5 + step / 2)
    assert remaining.texts(6 + 2 * WINDOW) == ["1:40 left", "2.0 it/s"]  # what was slow before does not count


def test_a_run_that_went_back_or_is_longer_than_planned_has_no_odd_time():
    remaining = Remaining()
    for step, seconds in ((8, 1.0), (9, 2.0), (5, 3.0), (6, 5.0)):
        remaining.add(step, seconds)
    assert remaining.texts(8) == ["0:04 left", "2.00 s/it"] and remaining.texts(3)[0] == "0:00 left"


def test_the_first_step_counts_where_its_duration_is_known():
    remaining = Remaining()
    remaining.add(5, 102.0, 2.0)
    assert remaining.texts(10) == ["0:10 left", "2.00 s/it"]
    remaining.add(6, 103.0, 1.0)
    assert remaining.texts(10) == ["0:06 left", "1.50 s/it"]
