"""Measure the memory and time of this process, and describe its machine."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # writing 5 resets the high-water mark (proc_pid_clear_refs(5))


def now(device: torch.device) -> float:
    """Wait for the device's queued work, then read the clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Marks:
    """Times of a step's phases, on CUDA by events of the stream, so that nothing waits before the step ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, now(device)
        self._marks: list[tuple[str, Any]] = []
        self.set("")

    def set(self, name: str) -> None:
        """End the phase `name` here."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Wait for the device and return the seconds by phase, and the total as `seconds`."""
        timings = {"seconds": now(self._device) - self._began}
        for (_, before), (name, after) in pairwise(self._marks):
            cuda = self._device.type == "cuda"
            timings[name] = before.elapsed_time(after) / 1000 if cuda else after - before
        return timings


def start_peak(device: torch.device) -> float:
    """Reset the peak and return the MB in use now: of the CUDA device, else of the process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 1e6
    try:
        CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak then includes loading
        return _highest()
    return _status("VmRSS")


def read_peak(device: torch.device) -> float:
    """Read the peak since `start_peak`, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _status("VmHWM") if STATUS.exists() else _highest()


def read_reserved(device: torch.device) -> float | None:
    """Read the peak MB that torch reserved on a CUDA device since `start_peak`; more than its tensors use."""
    return torch.cuda.max_memory_reserved(device) / 1e6 if device.type == "cuda" else None


def read_overhead(device: torch.device) -> float | None:
    """Read the MB of a CUDA card that torch did not reserve: of CUDA itself, and of other processes if any."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 1e6


def _status(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found, name
    return int(found[1]) * 1024 / 1e6


def _highest() -> float:
    """Read the highest resident size of the process, in MB (POSIX; Darwin counts bytes, others KiB)."""
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 1e6 if sys.platform == "darwin" else size * 1024 / 1e6


def describe_machine(device: torch.device) -> dict[str, str | int | float]:
    """Describe the measuring machine."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)):
        model = found[1]
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
    }
