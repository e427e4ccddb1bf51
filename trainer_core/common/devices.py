"""What the kinds of devices can do, a row each: no other line asks a device for the name of its kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 512  # bytes; torch's caching allocator of GPUs gives out whole blocks
RESERVE = 250_000_000  # bytes of kernels and torch's own bookkeeping on a GPU, beside the tensors


@dataclass(frozen=True)
class DeviceKind:
    """What a kind of device can do, as far as a run depends on it.

    dtypes: of precision auto; the first that it computes in. shares_ram: its memory is the computer's RAM, so that
    nothing is gained by keeping weights or activations there. block: bytes that its allocator gives out at a time.
    reserve: bytes that it needs beside the tensors. float8: it stores it. linalg: torch decomposes matrices there, and
    differentiates solutions of linear systems. kernels: torch has kernels of attention to choose among. channels_last:
    its convolutions in 16 bits want that order of memory. pages: its memory can go over to the RAM page by page. sends:
    torch's backend by which its processes exchange tensors; "" where one process uses it.
    scaled: torch multiplies float8 by rows there; elsewhere that is imitated. graphs: torch's compiler records
    kernels once and starts them together.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    shares_ram: bool = False
    block: int = BLOCK
    reserve: int = RESERVE
    float8: bool = True
    linalg: bool = True
    kernels: bool = False
    channels_last: bool = False
    pages: bool = False
    sends: str = ""
    scaled: bool = False
    graphs: bool = False


SIXTEEN = (torch.bfloat16, torch.float16)
KINDS = {
    # 16 bits are slower than float32 on most processors, and torch's allocator there gives out what was asked for.
    "cpu": DeviceKind(shares_ram=True, block=1, reserve=0),
    # NVIDIA's, and AMD's with ROCm, which torch calls by the same name. Tensor cores read channels last.
    "cuda": DeviceKind(SIXTEEN, kernels=True, channels_last=True, pages=True, sends="nccl", scaled=True, graphs=True),
    # Intel's. It has one kernel of attention, its own, which a choice among CUDA's would rule out.
    "xpu": DeviceKind(SIXTEEN, sends="xccl"),
    # Apple's. Its memory is the RAM. float16 needs a scaled loss, so that macOS before 14 has float32. It lacks
    # linalg_svd, eigh, qr and lu_solve.
    "mps": DeviceKind((torch.bfloat16, torch.float32), shares_ram=True, float8=False, linalg=False),
    "meta": DeviceKind(),  # a dry run, of a device whose settings have been checked
}
UNKNOWN = DeviceKind(
    float8=False, linalg=False
)  # of other makers: exact numbers, and nothing that only some devices have


def kind_of(device: torch.device) -> DeviceKind:
    """Find what a device can do."""
    return KINDS.get(device.type, UNKNOWN)


def for_linalg(tensor: Tensor) -> Tensor:
    """Give a matrix where torch decomposes it: as it is, or on the CPU."""
    return tensor if kind_of(tensor.device).linalg else tensor.cpu()


def module_of(device: torch.device) -> Any:
    """Find torch's module of a kind of GPUs, as torch.cuda; None for the CPU and a dry run."""
    return None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leave torch's generators, those of the processor and of all devices of a kind, as they were before."""
    module = module_of(device)
    several = range(module.device_count()) if hasattr(module, "get_rng_state_all") else ()
    with torch.random.fork_rng(devices=several, device_type=device.type if several else "cpu"):
        yield


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their device, for operators that take those of one."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def fastest() -> torch.device:
    """Find the fastest kind of device that this machine has."""
    for name in ("cuda", "xpu", "mps"):
        module = getattr(torch, name, None)  # an older torch lacks some
        if module is not None and module.is_available():
            return torch.device(name)
    return torch.device("cpu")


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a device computes in a dtype, by trying it."""
    try:
        tried = torch.ones(2, 2, dtype=dtype, device=device)
        return bool((tried @ tried).float().sum() == 8)
    except (RuntimeError, TypeError):  # TypeError: of MPS
        return False


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a device only imitates a dtype, very slowly: bfloat16 on NVIDIA's GPUs before Ampere."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major < 8
