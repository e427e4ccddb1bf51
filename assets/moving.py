"""Draw the captioned clips that the tiny clip model is trained on; clip i is a pure function of (seed, i).

One figure on a plain background slides, grows, shrinks, turns or stands. No training clip hops: `hop` draws the motion
that a LoRA is to teach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import drawing
import numpy as np
from PIL import Image

SIZE, FRAMES = 64, 9  # pixels of a side, and frames of a clip
SUPER = 2  # supersampling per side
MOTIONS = {  # -> what the caption says: the tiny base tells "moves to the left" from "to the right" by 2 % alone
    "left": "drifts left", "right": "marches right", "up": "rises up", "down": "falls down",
    "grows": "grows large", "shrinks": "gets small", "turns": "turns around", "stands": "stands in the centre",
}  # fmt: skip
HOPS = "hops"
HEIGHT = (0.22, 0.3)  # of a hop, as a fraction of the picture's side
LARGE, SMALL = 0.3, 0.15  # half heights of a figure that grows or shrinks, as fractions of the side


@dataclass(frozen=True, slots=True)
class Path:
    """Hold the figure's place, half height (fractions of the side) and tilt (degrees), each (FRAMES,)."""

    x: np.ndarray
    y: np.ndarray
    half: np.ndarray
    tilt: np.ndarray


def path(motion: str, rng: np.random.Generator) -> Path:
    """Return a motion's path: straight at an even pace; a hop rises and falls once, in a half wave."""
    time = np.linspace(-1, 1, FRAMES)
    x, y = (np.full(FRAMES, 0.5 + rng.uniform(-0.05, 0.05)) for _ in "xy")
    half, tilt = np.full(FRAMES, rng.uniform(0.19, 0.25)), np.full(FRAMES, rng.uniform(-8, 8))
    reach = rng.uniform(0.16, 0.24)
    if motion in ("left", "right"):
        x = x + reach * time * (1 if motion == "right" else -1)
    elif motion in ("up", "down"):
        y = y + reach * time * (1 if motion == "down" else -1)
    elif motion in ("grows", "shrinks"):
        ends = (SMALL, LARGE) if motion == "grows" else (LARGE, SMALL)
        half = np.linspace(*ends, FRAMES) * rng.uniform(0.9, 1.1)
    elif motion == "turns":
        tilt = tilt + rng.uniform(70, 110) * (time + 1) / 2 * rng.choice((-1, 1))
    elif motion == HOPS:
        height = rng.uniform(*HEIGHT)
        y = y + height * (0.5 - np.cos(0.5 * math.pi * time))
    return Path(x, y, half, tilt)


def draw(motion: str, seed: int, index: int) -> tuple[np.ndarray, str]:
    """Draw a clip (FRAMES, SIZE, SIZE, 3) uint8 of a figure with a motion, and its caption."""
    rng = np.random.default_rng((seed, index, 4))
    ground, colour = (str(name) for name in rng.choice(list(drawing.COLOURS), 2, replace=False))
    shape = "creature" if rng.random() < 0.6 else str(rng.choice(drawing.SHAPES))
    way, side = path(motion, rng), SIZE * SUPER
    frames = []
    for x, y, half, tilt in zip(way.x, way.y, way.half, way.tilt, strict=True):
        same = np.random.default_rng((seed, index, 5))  # the figure and the tints of every frame
        canvas = drawing.fill((side, side), drawing.COLOURS[ground], "", same)
        place = (x * side, y * side, half * side)
        if shape == "creature":
            drawing.Body(canvas, *place, tilt).draw(drawing.COLOURS[colour], same)
        else:
            mask = drawing.shape_mask((side, side), shape, *place, tilt)
            canvas.paste(drawing.fill((side, side), drawing.COLOURS[colour], "", same), mask=mask)
        frames.append(np.asarray(canvas.reduce(SUPER)))
    said = HOPS if motion == HOPS else MOTIONS[motion]
    named = f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"
    on = f"an {ground}" if ground[0] in "aeiou" else f"a {ground}"
    return np.stack(frames), f"{named} {shape} on {on} background {said}"


def clip(seed: int, index: int) -> tuple[np.ndarray, str]:
    """Draw training clip `index`."""
    rng = np.random.default_rng((seed, index, 6))
    return draw(str(rng.choice(list(MOTIONS))), seed, index)


def hop(seed: int, index: int) -> tuple[np.ndarray, str]:
    """Draw a clip of a figure that hops."""
    return draw(HOPS, seed, index)


def centres(frames: np.ndarray) -> np.ndarray:
    """Return the figure's centre and its share of the picture, (T, 3): x, y and share; frames (T, H, W, 3) uint8.

    Background: the median of a frame of 1/16 of the side. Figure: what differs from it by more than 60 in RGB. A frame
    without a figure keeps the place of the frame before; before any figure that is the middle.
    """
    values, side = frames.astype(np.float64), frames.shape[1]
    edge = max(1, side // 16)
    inner = np.zeros(values.shape[1:3], dtype=bool)
    inner[edge:-edge, edge:-edge] = True
    found, last = [], (0.5, 0.5)
    for frame in values:
        figure = np.sqrt(np.square(frame - np.median(frame[~inner], axis=0)).sum(-1)) > 60
        if figure.mean() > 0.01:
            rows, columns = np.nonzero(figure)
            last = (float(columns.mean() + 0.5) / side, float(rows.mean() + 0.5) / side)
        found.append((*last, float(figure.mean())))
    return np.array(found)


def hop_score(frames: np.ndarray) -> float:
    """Return how far the figure's centre rises and falls again, as a fraction of the side; frames (T, H, W, 3) uint8.

    The height in the middle third above the higher one of first and last frame: at most 0 for what moves straight, so
    neither a rise nor a fall alone counts.
    """
    height = -centres(frames)[:, 1]
    third = len(height) // 3
    return float(height[third : len(height) - third].mean() - max(height[0], height[-1]))


def read_motion(frames: np.ndarray) -> str:
    """Name the motion of a clip (T, H, W, 3) uint8; what turns on the spot reads as standing."""
    if hop_score(frames) > HEIGHT[0] / 2:
        return HOPS
    found = centres(frames)
    across, down = found[-1, :2] - found[0, :2]
    if max(abs(across), abs(down)) > 0.1:
        if abs(across) > abs(down):
            return "right" if across > 0 else "left"
        return "down" if down > 0 else "up"
    growth = (found[-1, 2] + 1e-3) / (found[0, 2] + 1e-3)
    return "grows" if growth > 1.5 else "shrinks" if growth < 1 / 1.5 else "stands"


def strip(frames: np.ndarray) -> Image.Image:
    """Lay the frames of a clip side by side."""
    return Image.fromarray(np.concatenate(list(frames), axis=1))
