"""The seconds that tests take: those of a browser count once, however it ends."""

import processor_time
import pytest
from processor_time import ProcessorTime


def test_seconds_that_are_lost_with_a_process_and_come_back_at_the_end_count_once(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, looks = tmp_path / "seconds", iter([10.0, 110.0, 20.0, 25.0, 131.0])
    monkeypatch.setenv(processor_time.TOLD, str(told))
    measured = ProcessorTime(shares=False)
    measured.spent = lambda: next(looks)
    laps = [measured._lap() for _ in range(4)]  # imports; a browser's test; its end; a test
    assert laps == [10, 100, 0, 5]
    measured.pytest_sessionfinish()  # the browser's seconds come back, and 16 are new
    assert [float(number) for number in told.read_text().split()] == [131]
