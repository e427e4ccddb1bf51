"""What a run that was imported trains by, as numbers to hold beside those of the program that its file is of."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from lora_atelier.trainer_core.config import RunConfig
from lora_atelier.trainer_core.data.buckets import parse_resolution
from lora_atelier.trainer_core.data.captions import compose_caption
from lora_atelier.trainer_core.data.shapes import shape_of
from lora_atelier.trainer_core.data.visits import trained_resolutions
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective.objective import level_weights
from lora_atelier.trainer_core.objective.path import AffinePath, flow_noise
from lora_atelier.trainer_core.objective.timesteps import level_probabilities
from lora_atelier.trainer_core.optim.schedule import curve_of, factor_on, warmup_steps
from lora_atelier.trainer_core.workflow.foreign import Imported
from lora_atelier.trainer_core.workflow.run_file import read_open

SIZES = ((512, 512), (640, 480), (480, 640), (1024, 512), (1920, 1080))
SIZES += ((1080, 1920), (3000, 1000), (700, 500), (333, 777), (1536, 1024))
LEVELS = (0, 50, 100, 200, 300, 400, 500, 700, 900, 999)
FLOW_LEVELS = (49, 99, 199, 299, 399, 499, 599, 699, 899, 998)  # times 0.05, 0.1 … 0.999
TEXTS = ("a, b, c", "a", "a, b", "red hair, blue eyes, smile", "a photo of a cat, sitting", "A cat sits. It waits")
TEXTS += ("(a:1.2), b", "猫, 犬", "café, naïve", "1girl, solo, long hair (style)")
SHARES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)  # of draws below each time


def opened(found: Imported) -> RunConfig:
    """Open the run of a file; a model of another family is as ComfyUI's own nodes load it."""
    if found.family:
        base = found.values.setdefault("base_model", {})
        base |= {"path": found.family, "connected": base.get("connected", {})}
    return read_open(found.values)


def schedule(config: RunConfig, length: int, late: int = 1) -> list[float]:
    """List the factor at ten steps; in a warm-up that of `late` steps before, as most of theirs begin at rate 0."""
    rises, curve = warmup_steps(length, config.scheduler), curve_of(length, config.scheduler)
    steps = [length * place // 10 for place in range(10)]
    earlier = [step - late * (step < rises) for step in steps]
    return [0.0 if step < 0 else factor_on(curve, step, config.scheduler) for step in earlier]


def buckets(config: RunConfig) -> list[tuple[int, ...]]:
    text, *_ = trained_resolutions(config.dataset.concepts[0], config.train)
    resolution = parse_resolution(text)
    return [tuple(shape_of(size, resolution, config.train.buckets, config.train.bucket_step).bucket) for size in SIZES]


def weights(config: RunConfig, family: str) -> list[float]:
    kind = "v_prediction" if config.base_model.prediction == "v_prediction" else "epsilon"
    noise = flow_noise() if family else noise_model(kind, zero_terminal_snr=False)
    return level_weights(config.objective, AffinePath(noise))[list(FLOW_LEVELS if family else LEVELS)].tolist()


def shares(config: RunConfig, times: list[float]) -> list[float]:
    """Compute how many draws lie below each time, of those between the least and the largest."""
    objective = config.objective
    found = level_probabilities(objective, AffinePath(flow_noise()), shift=objective.timestep_shift or 1.0)
    at = torch.tensor(times, dtype=torch.float64) * 1000 - 1 - objective.min_timestep
    below = at.floor().long().clamp(0, len(found) - 2)
    return found[below].lerp(found[below + 1], at - below).tolist()


def captions(config: RunConfig, lines: tuple[str, ...]) -> set[str]:
    """Compose the captions of ten pictures under five seeds; none is left out as a whole."""
    own = replace(config.dataset.concepts[0].captions, dropout=0.0)
    lines = () if own.source == "none" else lines
    draws = itertools.product(range(5), range(10))
    return {compose_caption(lines, own, seed=seed, picture=picture, visit=0) for seed, picture in draws}
