"""The processor time of files and tests, with the processes that they start: wall time differs from day to day."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest
from server_time import of_servers, spent

SHOWN = 20  # files, and tests
TOLD = "ATELIER_TIME_OF_SERVERS"  # names the file to which each process of the tests adds a line of numbers
EVERY = 25  # tests between two looks at the yardstick
WORK = [{"number": number, "text": str(number), "list": [number] * 5} for number in range(1500)]


def yardstick() -> float:
    """Measure the seconds that a fixed computation takes: machines differ, and each one from hour to hour."""
    before = time.process_time()
    json.loads(json.dumps(WORK))
    return time.process_time() - before


class ProcessorTime:
    """Measures each test, wherever it runs, and lists the files that take most at the end."""

    def __init__(self) -> None:
        self._files: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self._begun = 0  # tests
        self._yardsticks: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note the time before a test and its fixtures."""
        if self._begun % EVERY == 0:
            self._yardsticks.append(yardstick())
        self._begun += 1
        item.stash[BEFORE] = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Put the time of a test into its last report."""
        report = yield
        if call.when == "teardown":  # a process that is killed takes the time of its own with it
            report.user_properties.append(("processor seconds", max(0.0, spent() - item.stash[BEFORE])))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what the reports of a file say."""
        seconds = [value for name, value in report.user_properties if name == "processor seconds"]
        spent = float(str(seconds[-1])) if seconds else 0.0
        self._files[report.nodeid.split("::")[0]] += spent
        self._tests[report.nodeid] += spent

    @pytest.hookimpl(trylast=True)  # when the fixtures have ended their servers
    def pytest_sessionfinish(self) -> None:
        """Tell dev.py of the servers' time, which the system does not add to that of this process, and of the speed."""
        if told := os.environ.get(TOLD):
            with open(told, "a", encoding="ascii") as file:
                file.write(" ".join(map(str, [of_servers(), *self._yardsticks])) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the files that took most."""
        terminalreporter.section(f"processor seconds: {sum(self._files.values()):.0f}", sep="-")
        for name, seconds in [*self._files.most_common(SHOWN), *self._tests.most_common(SHOWN)]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")


BEFORE = pytest.StashKey[float]()
