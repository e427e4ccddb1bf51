"""The processor time of files and tests, with the processes that they start: wall time differs from day to day."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest

SHOWN = 20  # files, and tests
TOLD = "ATELIER_TIME"  # names the file to which each process of the tests adds a line of numbers
SPENT, AT_START = "processor seconds", "imports and collection"  # of reports; the second is a row of the list, too
OPEN, LIST = open, os.listdir  # a test may put others in their place, and is measured meanwhile
EVERY = 25  # tests between two looks at the yardstick
WORK = [{"number": number, "text": str(number), "list": [number] * 5} for number in range(1500)]


def yardstick() -> float:
    """Measure the seconds that a fixed computation takes: machines differ, and each one from hour to hour."""
    before = time.process_time()
    json.loads(json.dumps(WORK))
    return time.process_time() - before


def own() -> float:
    """Read the seconds of this process alone."""
    times = os.times()
    return times.user + times.system


def spent() -> float:
    """Add up the seconds of this process and of all that it has started, such as servers and a browser at work."""
    left, seconds = _children(os.getpid()), sum(os.times()[:4])
    while left:
        number = left.pop()
        seconds += _of_process(number)
        left += _children(number)
    return seconds


def _children(number: int) -> list[int]:
    """List the processes that a process has started and that live; none where the system does not tell."""
    tasks = f"/proc/{number}/task"
    try:
        texts = [_read(f"{tasks}/{task}/children") for task in LIST(tasks)]
    except OSError:
        return []
    return [int(each) for text in texts for each in text.split()]


def _read(file: str) -> str:
    with OPEN(file, encoding="ascii") as opened:
        return opened.read()


def _of_process(number: int) -> float:
    """Read the seconds of a living process, and of its own that have ended; 0 where the system does not tell."""
    try:
        stat = _read(f"/proc/{number}/stat")
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """Measures each test, wherever it runs, and lists the files that take most at the end.

    shares: this process only hands the tests to others, each of which measures itself and what it starts.
    """

    def __init__(self, *, shares: bool) -> None:
        self._files: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self._shares = shares
        self.spent = own if shares else spent
        self.source: int | None = None  # the process from which those are forked that share the tests
        self._last = self._total = self._lost = 0.0
        self._begun = 0  # tests
        self._yardsticks: list[float] = []

    def _lap(self) -> float:
        """Measure the seconds since the lap before: none where more is lost of processes that nobody waited for."""
        now = self.spent()
        lap, self._last, self._lost = max(0.0, now - self._last), now, self._lost + max(0.0, self._last - now)
        self._total += lap
        return lap

    def _between(self) -> float:
        """Measure a lap outside of tests, where what was lost with a browser may come back: it was counted before."""
        lap = self._lap()
        back = min(lap, self._lost)
        self._lost -= back
        self._total -= back
        return lap - back

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note the time before a test and its fixtures; before the first one, libraries were imported."""
        if self._begun % EVERY == 0:
            self._yardsticks.append(yardstick())
        lap = self._between()
        if not self._begun:
            item.user_properties.append((AT_START, lap))
        self._begun += 1
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Put the time of each phase of a test into its report: a browser that ends in the last takes its own along."""
        report = yield
        report.user_properties.append((SPENT, self._lap()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what the reports of a file say."""
        told = dict(report.user_properties)
        seconds = told.get(SPENT, 0.0)  # the end of a process that crashed comes without
        self._files[report.nodeid.split("::")[0]] += seconds
        self._tests[report.nodeid] += seconds
        if report.when == "setup":
            self._files[AT_START] += told.get(AT_START, 0.0)

    @pytest.hookimpl(trylast=True)  # when the fixtures have ended their servers
    def pytest_sessionfinish(self) -> None:
        """Tell dev.py what this process has spent with all that it started, and how fast it was."""
        lap = self._between()
        if self._shares:
            self._files["what hands the tests out"] += lap
        if self.source:
            self._files[AT_START] += (imported := _of_process(self.source))
            self._total += imported
        if told := os.environ.get(TOLD):
            with open(told, "a", encoding="ascii") as file:
                file.write(" ".join(map(str, [self._total, *self._yardsticks])) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the files that took most."""
        terminalreporter.section(f"processor seconds: {sum(self._files.values()):.0f}", sep="-")
        for name, seconds in [*self._files.most_common(SHOWN), *self._tests.most_common(SHOWN)]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
