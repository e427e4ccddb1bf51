"""Apply the memory settings to a frozen denoiser, and order the settings from fastest to smallest."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from ..common.devices import kind_of
from ..config import MemoryConfig, RunConfig, setting
from .eight_bits import chosen_compute
from .gradient_checkpointing import BUDGETS, FULL, LEVELS, PARTS, SEGMENTS, WHOLE, Unit, recompute
from .stream import Stream, activations_in_ram
from .weights import IN_FILE, SHARES, keep_weights, kept_layers

# Each rung takes less memory than the one before, and a saved gigabyte costs more time there: (checkpointing,
# offload_weights, offload_activations). Where all is recomputed, the inputs of blocks are what is kept: each goes to
# RAM once in a step and comes back once. A weight comes three times, for the forward pass, the second one and the
# backward pass, and moving it frees no more than its size. To compute an input again by the block before costs more
# than either, and saves nothing on a card whose inputs have gone to RAM: it is left where they cannot go.
RUNGS = (
    (LEVELS[0], "none", "off"),
    *((budget, "none", "off") for budget in BUDGETS),
    *((level, "none", "off") for level in LEVELS[1:]),
    (FULL, "none", "on"),
    (FULL, "half", "on"),
    (FULL, "all", "on"),
    *((segments, "all", "off") for segments in SEGMENTS),
)
# A compiler recomputes the cheapest operations of every block first, and so takes the place of the levels between.
WHOLE_LEVELS = LEVELS[WHOLE:-1]
# Where somebody wants less to be recomputed, all that blocks keep would move: weights move first.
WEIGHTS_FIRST = ((FULL, "none", "off"), (FULL, "half", "off"), (FULL, "all", "off"), (FULL, "all", "on"))


def rungs(config: MemoryConfig, device: torch.device, *, parts: bool = True) -> list[MemoryConfig]:
    """List the memory settings to try, from the fastest to the smallest; only settings at auto vary.

    parts: parts of blocks can be recomputed alone. They lie inside of compiled blocks, which would fall into pieces.
    """
    fields = ("checkpointing", "offload_weights", "offload_activations")
    found: list[MemoryConfig] = []
    stay = config.offload_activations == "off" or bool(config.second_card) or kind_of(device).shares_ram
    compiled = config.compile and parts
    for rung in RUNGS if config.checkpointing in ("auto", FULL) else WEIGHTS_FIRST:
        if rung[0] == PARTS and config.checkpointing == "auto" and (config.compile or not parts):
            continue
        if config.checkpointing == "auto" and rung[0] in (WHOLE_LEVELS if compiled else BUDGETS):
            continue
        if rung[0] in SEGMENTS and not stay:
            continue
        settings = dict(zip(fields, rung, strict=True))
        settings |= {name: value for name in fields if (value := getattr(config, name)) != "auto"}
        if config.second_card:
            settings |= {"offload_weights": "none", "offload_activations": "off"}
        if kind_of(device).shares_ram:  # everything is in RAM already
            stays = IN_FILE if config.offload_weights == IN_FILE else "none"
            settings |= {"offload_weights": stays, "offload_activations": "off"}
        candidate = config.replace(**settings)
        if candidate not in found:
            found.append(candidate)
    return found


def moves_weights(memory: MemoryConfig) -> bool:
    """Tell whether frozen weights wait in RAM or in a file; models that encode while training then do, too."""
    return SHARES.get(memory.offload_weights, 0.0) > 0


def why_no_graphs(config: RunConfig, memory: MemoryConfig, device: torch.device) -> str:
    """Say why a run records no CUDA graphs, as far as its settings decide that; "" if it may.

    They need every tensor at its place in all steps, and a backward pass that starts no forward pass. memory: the
    settings in use.
    """
    train, lora = config.train, config.lora
    if not memory.compile:
        return f"{setting('memory.compile')} is off"
    if not kind_of(device).graphs:
        return f"they are for NVIDIA GPUs, and this run is on {device.type}"
    if config.base_model.connected is not None:
        return "ComfyUI moves the weights of a connected model"
    if train.batch_size * train.accumulate > 1:
        return f"a step has more than one picture, by {setting('train.batch_size')} or {setting('train.accumulate')}"
    if moves_weights(memory):
        return "weights move to the GPU in every step"
    if memory.offload_activations == "on":
        return "activations move to RAM and back"
    if memory.checkpointing != LEVELS[0] and memory.checkpointing not in BUDGETS:
        return f"gradient checkpointing {memory.checkpointing} runs blocks again in the backward pass"
    if lora.dropout or lora.rank_dropout or lora.module_dropout:
        return "dropout is drawn outside of them"
    return ""


def describe(memory: MemoryConfig) -> str:
    """Describe settings: "gradient checkpointing 2", "gradient checkpointing full, half of the weights in RAM"."""
    by = " of the compiler" if memory.checkpointing in BUDGETS else ""
    words = [f"gradient checkpointing {memory.checkpointing}{by}"]
    if memory.offload_weights in ("half", "all"):
        words.append(("half of the weights" if memory.offload_weights == "half" else "the weights") + " in RAM")
    if memory.offload_weights == IN_FILE:
        words.append("the weights in their file")
    if memory.offload_activations == "on":
        words.append("activations in RAM")
    if memory.second_card:
        share = f"{memory.second_card_share:.0%} of the" if memory.second_card_share else "some"
        words.append(f"{share} blocks on the second card {memory.second_card}")
    if memory.encodings == "none":
        words.append("encoding while training")
    return ", ".join(words)


class FrozenDenoiser(Protocol):
    """What memory settings apply to."""

    @property
    def module(self) -> Any:
        """The denoiser, an nn.Module."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of frozen weights and activations."""
        ...

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Prefixes of layers whose weights are never quantized."""
        ...

    @property
    def written(self) -> Any:
        """The care for blocks that may write into their inputs; None where none does."""
        ...

    def units(self) -> Iterable[Unit]:
        """List the blocks that repeat, as `recompute` takes them."""
        ...


class Frozen(Protocol):
    """A base model whose weights this run holds, or another program does."""

    @property
    def denoiser(self) -> FrozenDenoiser:
        """What predicts."""
        ...

    @property
    def host(self) -> Any:
        """Who holds and moves the weights; None: this run does."""
        ...


def prepare(base: Frozen, memory: MemoryConfig, weights: str, device: torch.device, stream: Stream) -> None:
    """Apply memory settings to a frozen denoiser, on the device; may be called again with smaller settings.

    weights: their stored format, a name of `Weights`. stream: fetches weights from RAM. Where another program holds the
    weights, they stay where it has them.
    """
    if base.host is None:
        _hold(base.denoiser, memory, weights, device, stream)
    recompute(base.denoiser.units(), memory.checkpointing, copies=base.denoiser.written is not None)


def _hold(frozen: FrozenDenoiser, memory: MemoryConfig, weights: str, device: torch.device, stream: Stream) -> None:
    """Move the weights to the device, or to RAM, in their stored format; those that stay in a file do so."""
    denoiser, dtype, share = frozen.module, frozen.dtype, SHARES.get(memory.offload_weights, 0.0)
    # Tensor cores of a GPU take half-precision convolutions in this memory order; any other is converted at each call.
    last = memory.channels_last == "on" or (
        memory.channels_last == "auto" and kind_of(device).channels_last and dtype != torch.float32
    )
    if last:
        denoiser.to(memory_format=torch.channels_last)
        for kept in kept_layers(denoiser):
            if kept.stored is not None and len(kept.shape) == 4:
                kept.memory_format = torch.channels_last
    keep_weights(
        denoiser,
        weights,
        dtype,
        device,
        share=share,
        stream=stream,
        unquantized=frozen.unquantized,
        linear=chosen_compute(memory.compute, device, weights) != "exact",
    )


def kept_activations(
    memory: MemoryConfig, models: Iterable[nn.Module], device: torch.device, *, written: bool = False
) -> AbstractContextManager[None]:
    """Build the context of a forward pass, in which activations are kept in RAM or on the device.

    written: the models may write into them.
    """
    on = memory.offload_activations == "on"
    return activations_in_ram(device, models, written=written) if on else nullcontext()
