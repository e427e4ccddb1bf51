"""A first guess of settings, from the pictures, the defaults of the model's family and the free memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..common.devices import kind_of
from ..common.wording import count, say
from ..config import ALGORITHMS, OPEN, Defaults, RunConfig, fill
from ..config.defaults import FAR
from ..data.plan import Plan
from ..memory import choose_dtype, rungs
from ..optim import estimates
from .memory import estimate_run, largest_micro_batch
from .outline import outline_run

BATCHES = (4, 2, 1)
LEAST_BATCHES = 8  # an epoch should have, so that its pictures meet others in each
VISITS = 100  # of a picture, where that is neither too little nor too much in all
FEWEST, MOST = 1500, 4000  # visits of a run
EPOCHS = 10  # that a large dataset gets, even beyond MOST
ROUND = 50  # steps
LARGE = (1000, 4), (100, 2)  # number of pictures, factor of the family's rank from that number on
Fits = Callable[[int, int], bool]  # whether (resolution, batch) fits into the free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessInputs:
    """The model, pictures and settings that a guess is computed from."""

    title: str  # of the base model
    defaults: Defaults  # of its family
    sides: tuple[float, ...]  # of each trained picture: the side of the square of its area, in pixels
    visits: float  # of all pictures in an epoch, also of those for regularisation
    repeats: float  # visits of a trained picture in an epoch, in the mean
    rate: float  # learning rate that suits the model and its optimizer
    estimates: bool = False  # the optimizer finds its step size
    accumulate: int = 1
    by_epochs: bool = False  # the length is set in epochs
    ranked: bool = True  # a rank is free to choose
    sized: bool = False  # Buckets sets the resolutions
    fits: Fits | None = None  # None: unknown before the run


class Guess(NamedTuple):
    """A guessed setting and the reason for it, in a sentence."""

    setting: str  # resolution, batch_size, steps, epochs, rank or learning_rate
    value: float
    reason: str

    @property
    def sentence(self) -> str:
        """The guess as text."""
        return f"{self.setting} {self.value:.10g}: {self.reason}"


def guess_settings(inputs: GuessInputs) -> list[Guess]:
    """Guess resolution, batch size, steps, rank and learning rate; what is decided elsewhere is left out.

    The learning rate grows with the square root of the batch, as suits Adam (Malladi et al. 2022, arXiv 2205.10287).
    """
    size = _resolution(inputs)
    batch = _batch(inputs, int(size.value))
    whole = int(batch.value) * inputs.accumulate
    found = [] if inputs.sized else [size]
    found += [batch, _steps(inputs, whole)]
    found += [Guess("epochs", 0, say("steps sets the length only then."))] if inputs.by_epochs else []
    found += [_rank(inputs)] if inputs.ranked else []
    return [*found, _rate(inputs, whole)]


def _resolution(inputs: GuessInputs) -> Guess:
    own, step, side = inputs.defaults.resolution, inputs.defaults.step, statistics.median(inputs.sides)
    least = math.ceil(own * FAR / step) * step
    found = min(max(int(side // step * step), least), own)
    why = say("{0} was made for it, and the pictures are large enough.", inputs.title)
    if found < own:
        why = say(
            "{0} was made for {1}, but half of the pictures have fewer than {2} pixels a side.",
            *(inputs.title, own, f"{side:.0f}"),
        )
    if inputs.fits and not inputs.fits(found, 1) and found > least and inputs.fits(least, 1):
        found, why = least, say("at {0} even a batch of 1 does not fit into the free memory.", found)
    return Guess("resolution", found, why)


def _batch(inputs: GuessInputs, resolution: int) -> Guess:
    pictures = count(inputs.sides, "picture")
    filled = next((batch for batch in BATCHES if inputs.visits >= batch * LEAST_BATCHES), 1)
    if inputs.fits is None:
        return Guess("batch_size", 1, say("the memory of a linked model is measured only when the run starts."))
    found = next((batch for batch in BATCHES if batch <= filled and inputs.fits(resolution, batch)), 1)
    if found < filled:
        return Guess("batch_size", found, say("{0} at a time do not fit into the free memory.", 2 * found))
    if found < BATCHES[0]:
        return Guess(
            "batch_size", found, say("an epoch of {0} then has at least {1} batches.", pictures, LEAST_BATCHES)
        )
    return Guess("batch_size", found, say("it fits into the free memory, and more would hardly help."))


def _steps(inputs: GuessInputs, batch: int) -> Guess:
    pictures = len(inputs.sides)
    visits = max(min(max(VISITS * pictures, FEWEST), MOST), EPOCHS * pictures)
    epochs = visits / (pictures * inputs.repeats)
    steps = math.ceil(epochs * inputs.visits / batch / ROUND) * ROUND
    each = round(visits / pictures)
    why = say("each of {0} is then trained about {1} times.", count(pictures, "picture"), each)
    return Guess("steps", steps, why)


def _rank(inputs: GuessInputs) -> Guess:
    pictures, own = len(inputs.sides), inputs.defaults.rank
    times = next((times for least, times in LARGE if pictures >= least), 1)
    why = say("it suits {0} and few pictures.", inputs.title)
    return Guess("rank", own * times, why if times == 1 else say("{0} pictures hold more to learn.", pictures))


def _rate(inputs: GuessInputs, batch: int) -> Guess:
    if inputs.estimates:
        return Guess("learning_rate", inputs.rate, say("this optimizer finds its own step size."))
    value = float(f"{inputs.rate * math.sqrt(batch):.2g}")
    rate = f"{inputs.rate:g}"
    why = say("{0} suits {1} and this optimizer.", rate, inputs.title)
    if batch > 1:
        why = say("{0} suits {1} and this optimizer, times the root of the batch, {2}.", rate, inputs.title, batch)
    return Guess("learning_rate", value, why)


def find_inputs(config: RunConfig, plan: Plan, title: str, defaults: Defaults, fits: Fits | None) -> GuessInputs:
    """Collect the inputs of a run: its settings as a person left them, and its plan with those that fill them in."""
    optimizer = config.optimizer.replace(learning_rate=OPEN)
    finds = estimates(optimizer)
    rate = 1.0 if finds else fill(config.replace(optimizer=optimizer), defaults).optimizer.learning_rate
    mine = [i for i in plan.trained if plan.concepts[i].role == "train"] or plan.trained
    pictures = [plan.manifest.pictures[i] for i in mine]
    return GuessInputs(
        title=title,
        defaults=defaults,
        sides=tuple(math.sqrt(picture.width * picture.height) for picture in pictures),
        visits=float(sum(plan.rates[i] for i in plan.trained)),
        repeats=float(sum(plan.rates[i] for i in mine)) / len(mine),
        rate=rate,
        estimates=finds,
        accumulate=config.train.accumulate,
        by_epochs=config.train.epochs > 0,
        ranked=ALGORITHMS[config.lora.algorithm].usual_rank and not config.lora.start,
        sized=bool(config.train.buckets.resolutions),
        fits=fits,
    )


def fits_memory(config: RunConfig, plan: Plan, device: torch.device, free: float) -> Fits:
    """Return a function that tells whether (resolution, batch) fits with all weights and activations on the device.

    config: filled. free: bytes on the device. Each call estimates a step, which takes seconds for a large model.
    """
    outline = outline_run(config, dtype=choose_dtype(config.base_model.precision, device))
    shape = largest_micro_batch(config, plan, outline.base)
    ladder = rungs(config.memory, device)
    stays = [each for each in ladder if (each.offload_weights, each.offload_activations) == ("none", "off")]
    smallest = (stays or ladder)[-1]
    room = free - kind_of(device).reserve - config.memory.kept_free

    def fits(resolution: int, batch: int) -> bool:
        square = outline.base.latents.axes((resolution, resolution))
        latents = shape.latents if config.train.buckets.resolutions else square
        wanted = replace(shape, samples=batch, latents=latents)
        return estimate_run(config, outline, smallest, wanted, device).total <= room

    return fits
