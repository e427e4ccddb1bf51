"""Estimate the memory of a step on a model that cannot run without data: from passes of the smallest sizes.

What a pass allocates at its peak is c + n (a + b p) for n samples with p positions of their latents: c is there once, a
belongs to a sample's caption, b to each position. Three small passes give the three numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.axes import Framing, Shape
from ..common.devices import kind_of
from ..config import MemoryConfig, ObjectiveConfig, RunConfig, setting
from ..data.plan import Plan
from ..lora_files.continued import load_continued
from ..memory import (
    FULL,
    PARTS,
    WHOLE,
    are_free,
    chosen_compute,
    describe,
    empty_cache,
    free_bytes,
    out_of_memory,
    recompute,
    rounded_bytes,
    rungs,
)
from ..models import BaseModel, Conditioning, Host, LatentFormat, differentiable, word_ids
from ..models.base import NOTHING, Shown
from ..networks import Network
from ..networks.of_model import build_network, learning_rates
from ..networks.rounded import rounding_layers
from ..objective import Objective, Pass, draws_at, other_captions, terms_of, texts_beside
from ..optim.noise_scale import looked_at
from .estimate import LiveBytes, dry_run, optimizer_state
from .outline import trains_text

SHARES = ((0.5, 0.75), (0.75, 1.0))  # of the sides of the largest bucket: the two sizes; the second where models refuse
UNSURE = 0.15  # of what is measured, by which the largest batch may take more
SPARE = 2**30  # bytes that rounded weights leave to ComfyUI, samples and other programs
SMALL = 256  # pixels of a side that a model is tried on


@dataclass(frozen=True, slots=True)
class Peak:
    """The bytes of a pass at its peak: once, for each sample, and for each position of its latents."""

    once: float
    sample: float
    position: float
    latents: LatentFormat

    def at(self, samples: int, size: Shape) -> int:
        """Compute the bytes for a number of samples of a picture's size or a clip's shape."""
        return round(self.once + samples * (self.sample + self.position * math.prod(self.latents.axes(size))))


def measure_peak(
    base: BaseModel,
    network: Network,
    caption: Conditioning,
    largest: Shape,
    device: torch.device,
    shown: Shown = NOTHING,
    objective: Objective | None = None,
    text: str = "",
    live: Callable[[], Conditioning] | None = None,
) -> Peak:
    """Measure passes with gradients on smaller pictures than the largest, on a model in its session.

    shown: control pictures of each sample, which are as large as it. objective: with the terms of the run. text: a
    caption for which these act; all captions are as long as the encoded one. live: encodes it, where text encoders are
    trained.
    """
    goal, form = objective or Objective(ObjectiveConfig(), base.noise, 0), base.latents
    read = live or (lambda: caption)

    def measured(shares: tuple[float, float]) -> Peak:
        small, larger = (form.scaled(largest, share) for share in shares)
        one, wide, two = (
            _pass_bytes(base, network, goal, read, samples, text, size, device, shown)
            for samples, size in ((1, small), (1, larger), (2, small))
        )
        few, many = (math.prod(form.axes(size)) for size in (small, larger))
        position = (wide - one) / (many - few) if many > few else 0.0
        return Peak(once=2 * one - two, sample=two - one - position * few, position=position, latents=form)

    try:
        return measured(SHARES[0])
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise
        return measured(SHARES[1])  # some models take no pictures below a size
    finally:
        network.zero_grad(set_to_none=True)


def _pass_bytes(
    base: BaseModel,
    network: Network,
    objective: Objective,
    read: Callable[[], Conditioning],
    count: int,
    text: str,
    size: Shape,
    device: torch.device,
    shown: Shown,
) -> int:
    """Count the bytes that the forward and backward passes of a micro-batch allocate at their peak."""
    form = base.latents
    live = LiveBytes(kind_of(device).block)
    framings = [Framing.whole(size)] * count
    shape = (count, form.channels, *form.axes(size))
    levels = torch.full((count,), base.levels.at(0.5, len(base.noise.alpha)))
    with live, differentiable(base, shape):
        latents: Tensor = torch.zeros(shape, device=device)
        beside = [[*[each] * shown.count, *shown.told] for each in latents]
        seen = Pass(
            base=base,
            network=network,
            draws=draws_at(latents, torch.zeros_like(latents), levels, objective.path.at(levels, device)),
            captions=[text] * count,
            conditions=lambda *_: base.conditions.batch([read() for _ in beside], framings, device, None, beside),
            loss=objective.config.loss,
            space=objective.config.loss_on,
        )
        network.set_micro_batch(0)
        dry_run(seen, objective)
    network.set_micro_batch(None)
    return live.peak


def fit_measured(
    config: RunConfig, plan: Plan, base: BaseModel, host: Host, device: torch.device, dtype: torch.dtype
) -> tuple[list[MemoryConfig], str]:
    """Choose the fastest memory settings that fit, by measured passes; return them, the fallbacks, and a sentence.

    Raises ValueError when none fits. dtype: of the network's weights.
    """
    size, samples = max(plan.fullest_batches().items(), key=lambda batch: batch[1] * math.prod(batch[0]))
    objective = Objective(config.objective, base.noise, config.train.seed, base.levels, terms_of(config))
    for term in objective.terms:
        term.begin(objective.path, config.train.seed, device)
    captions = plan.captions() | other_captions(objective.terms, plan)
    longest = max(captions, key=lambda caption: base.text.count_tokens(caption, word_ids(())))
    text = max(sorted(plan.captions()), key=lambda caption: len(texts_beside(objective.terms, caption)))
    shown = _shown(plan, base, size)
    pictures = [torch.zeros(3, size[1], size[0])] * shown.count if base.text.seen_as else ()
    trains = trains_text(config, base)

    def encoded() -> Conditioning:
        return base.text.encode(longest, device, pictures)

    with torch.no_grad():
        caption = encoded()
    live = encoded if trains else None
    every = (memory.replace(offload_weights="none") for memory in rungs(config.memory, device, parts=False))
    ladder = list(dict.fromkeys(every))  # where weights lie is the host's business
    with host.session(device, texts=trains):
        start = load_continued(config, base)
        rates = learning_rates(config.optimizer, base)
        network = build_network(base, config, rates, start.layers if start else None).to(device, dtype)
        kept = network_bytes(network, config)
        others, shares = config.memory.kept_free, kind_of(device).shares_ram
        free = free_bytes(device) - others
        with network.attached():
            smallest = min(plan.fullest_batches(), key=math.prod)
            remarks = _try_out(host, base.latents, network, caption, smallest, shown, live)
            if config.memory.checkpointing == PARTS and all(least >= WHOLE for _, least in base.denoiser.units()):
                raise ValueError(
                    "The blocks of this MODEL have no feed-forward parts that can be recomputed alone; set "
                    f"{setting('memory.checkpointing')} to auto."
                )
            for number, memory in enumerate(ladder):
                recompute(base.denoiser.units(), memory.checkpointing, copies=base.denoiser.written is not None)
                last = number + 1 == len(ladder)
                # Where no more blocks can be recomputed, ComfyUI keeps a part of the weights in RAM.
                all_blocks = memory.checkpointing in (ladder[-1].checkpointing, FULL)
                room = free + (host.movable if all_blocks else 0)
                peak = _peak(base, network, caption, size, device, shown, objective, text, live)
                if peak is None:
                    continue
                needed = kept + peak.at(samples, size)
                # Not reserved: once they are held, ComfyUI would count them as taken and as wanted.
                host.holds = _held(config, base, device, free - round((1 + UNSURE) * needed) - SPARE)
                host.reserve(needed + others)
                needed += host.holds
                if needed <= (free if shares else room) or (last and not shares and not others):
                    sizes = f"{needed / 1e9:.1f} GB beside the model's weights, {are_free(free, config.memory)}"
                    return ladder[number:], " ".join([f"Memory: about {sizes}, with {describe(memory)}.", *remarks])
    about = "more" if peak is None else f"about {needed / 1e9:.1f} GB"
    lower = f"{setting('memory.keep_free')}, batch_size" if others else "batch_size"
    raise ValueError(
        f"This run needs {about} beside the model's weights with {describe(ladder[-1])}, and "
        f"{are_free(free, config.memory)}; lower {lower} or {setting('train.resolution')}."
    )


def _shown(plan: Plan, base: BaseModel, size: Shape) -> Shown:
    """Find the most control pictures of a sample, and what CLIP vision says of grey ones."""
    every = range(len(plan.manifest.pictures))
    count = max(len(plan.references(i, plan.first_crops(i)[0])) for i in every)
    if not count or base.controls is None:
        return NOTHING
    frames = (2,) if any(each.last for each in plan.all_references()) else ()
    told = base.controls.told(torch.zeros(1, 3, *frames, size[1], size[0]))
    return Shown(count, () if told is None else (told,))


def _try_out(
    host: Host,
    form: LatentFormat,
    network: Network,
    caption: Conditioning,
    size: Shape,
    shown: Shown,
    live: Callable[[], Conditioning] | None,
) -> list[str]:
    """Try the model on small pictures, as nothing is recomputed yet; some models take none below a size."""
    layers = dict(network.layers.items())
    small = form.at_most(size, SMALL)
    try:
        return host.try_out(layers, caption, small, shown, live)
    except ValueError:
        if small == size:
            raise
    return host.try_out(layers, caption, size, shown, live)


def _peak(
    base: BaseModel,
    network: Network,
    caption: Conditioning,
    size: Shape,
    device: torch.device,
    shown: Shown,
    objective: Objective,
    text: str,
    live: Callable[[], Conditioning] | None = None,
) -> Peak | None:
    """Measure passes on smaller pictures than the largest; None where even these do not fit."""
    try:
        return measure_peak(base, network, caption, size, device, shown, objective, text, live)
    except RuntimeError as error:
        if device.type == "cpu" or not out_of_memory(error):
            raise
    empty_cache(device)
    return None


def _held(config: RunConfig, base: BaseModel, device: torch.device, room: int) -> int:
    """Count the bytes of rounded weights that layers may hold in so much room beside all else."""
    if chosen_compute(config.memory.compute, device, config.base_model.weights) == "exact":
        return 0
    sizes = [rounded_bytes(layer) for layers in rounding_layers(base).values() for layer in layers]
    return max(0, min(sum(sizes), room))


def network_bytes(network: Network, config: RunConfig) -> int:
    """Count the bytes of the network's tensors, of gradients, and of the state of the optimizer and the noise scale."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    state = optimizer_state(parameters, config.optimizer)
    state.append((sum(looked_at(parameters)), torch.float32))
    held = (*network.parameters(), *network.buffers(), *parameters)  # these twice, for their gradients
    return sum(t.nbytes for t in held) + sum(number * dtype.itemsize for number, dtype in state)
