"""What a process is asked about itself: its memory, and the machine it runs on."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # writing 5 resets the high-water mark (proc_pid_clear_refs(5))


def now(device: torch.device) -> float:
    """Return the time in seconds once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start_peak(device: torch.device) -> float:
    """Reset the peak and return what is in use now, in MB: of the CUDA device, else of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 1e6
    try:
        CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak then includes loading
        return _highest()
    return _status("VmRSS")


def read_peak(device: torch.device) -> float:
    """Return the peak since `start_peak` in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return _status("VmHWM") if STATUS.exists() else _highest()


def _status(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found, name
    return int(found[1]) * 1024 / 1e6


def _highest() -> float:
    """Return the highest resident size the process ever had, in MB (POSIX; Darwin counts bytes, others KiB)."""
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 1e6 if sys.platform == "darwin" else size * 1024 / 1e6


def describe_machine(device: torch.device) -> dict[str, str | int | float]:
    """Return what the numbers were measured on."""
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
