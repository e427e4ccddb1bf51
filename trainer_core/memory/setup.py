"""A frozen UNet made ready for training as the memory settings say; and the settings from cheapest to smallest."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import MemoryConfig
from .checkpoint import recompute
from .stream import Stream, activations_in_ram
from .weights import SHARES, keep_weights

# What each rung gives up beyond the one before: time for memory, cheapest first.
RUNGS = (
    *((level, "none", "off") for level in ("0", "1", "2", "3", "4", "full")),
    ("full", "half", "off"),
    ("full", "all", "off"),
    ("full", "all", "on"),
)
ATTENTION = {
    # flash takes no mask, which CLIP has, and no float32: the next in the row does it then
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
    # Flash is fastest where it runs (16-bit numbers on newer cards), efficient runs everywhere else on CUDA, and math
    # always does. cuDNN is left out: it makes a plan for every new shape, and pictures come in many.
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


def rungs(config: MemoryConfig, device: torch.device) -> list[MemoryConfig]:
    """Return the settings to try, what the person has fixed left as it is, from the fastest to the smallest."""
    fields = ("checkpointing", "offload_weights", "offload_activations")
    found: list[MemoryConfig] = []
    for rung in RUNGS:
        settings = dict(zip(fields, rung, strict=True))
        settings |= {name: value for name in fields if (value := getattr(config, name)) != "auto"}
        if device.type == "cpu":  # everything is in RAM already
            settings |= {"offload_weights": "none", "offload_activations": "off"}
        candidate = config.replace(**settings)
        if candidate not in found:
            found.append(candidate)
    return found


def describe(memory: MemoryConfig) -> str:
    """Return settings in words: "checkpointing 2", "checkpointing full, half of the weights in RAM"."""
    words = [f"checkpointing {memory.checkpointing}"]
    if memory.offload_weights in ("half", "all"):
        words.append(("half of the weights" if memory.offload_weights == "half" else "the weights") + " in RAM")
    if memory.offload_activations == "on":
        words.append("activations in RAM")
    return ", ".join(words)


def prepare(
    unet: nn.Module, memory: MemoryConfig, weights: str, dtype: torch.dtype, device: torch.device, stream: Stream
) -> None:
    """Move a frozen UNet to the device as the settings say; may be called again with settings further down.

    weights: how they are kept, a name of `Weights`. stream brings what stays in RAM.
    """
    # In this order half-precision convolutions run on a GPU's tensor cores as they are; in the other they are turned
    # at each call.
    last = memory.channels_last == "on" or (
        memory.channels_last == "auto" and device.type == "cuda" and dtype != torch.float32
    )
    if last:
        unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    share = SHARES.get(memory.offload_weights, 0.0)
    keep_weights(unet, weights, dtype, device, share=share, stream=stream)
    recompute(unet, memory.checkpointing if memory.checkpointing != "auto" else "0")


def kept_activations(
    memory: MemoryConfig, models: Iterable[nn.Module], device: torch.device
) -> AbstractContextManager[None]:
    """Return the context in which a forward pass runs: what it saves goes to RAM, or stays."""
    return activations_in_ram(device, models) if memory.offload_activations == "on" else nullcontext()


@contextmanager
def attention_kernel(name: str, device: torch.device) -> Iterator[None]:
    """Choose how scaled dot product attention is computed on a GPU for the length of a `with` block."""
    if device.type != "cuda":
        yield
        return
    in_order = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}
    with sdpa_kernel(ATTENTION[name], **in_order):
        yield
