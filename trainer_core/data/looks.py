"""Measure what a picture looks like: a hash that near-duplicates share, its blur, its borders of one colour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image

SIDE = 512  # pixels; longer pictures are shrunk to this before blur and borders are measured
LEAST = 32  # pixels; a shorter side tells nothing about blur and borders
MOST_APART = 6  # bits of 64 in which the hashes of near-duplicates differ at most
WINDOW = 11  # pixels that Crete's measure averages
FLAT = 4.0  # standard deviation of the greys, 0..255, below which a picture has no shapes to hash
ALIKE, UNLIKE = 12, 24  # differences of a colour channel, 0..255, that count as none and as another colour
EDGE = 3  # lines within which a border has to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a picture looks like."""

    hash: str = ""  # 16 hexadecimal digits; "" for a picture without shapes
    blur: float = 0.0  # 0 = sharp, 1 = blurred
    border: float = 0.0  # share of the area in borders of one colour, 0..1


def look_at(image: Image.Image) -> Look:
    """Measure an RGB picture."""
    scale = min(1.0, SIDE / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image.resize(size, Image.Resampling.BOX, reducing_gap=1.0)
    grey = np.asarray(small.convert("L"), np.int16)
    return Look(hash=_hash(small), blur=round(_blur(grey), 3), border=round(_border(np.asarray(small)), 4))


def near_duplicates(hashes: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (picture, the first earlier one that it looks like) by their hashes, in the order of the pictures.

    Earlier ones that are near-duplicates themselves do not count. Two hashes that differ in at most MOST_APART bits
    share one of MOST_APART + 1 bands of bits, so that only pictures with a common band are compared.
    """
    bands: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    values = [int(text, 16) if text else None for text in hashes]
    for i, value in enumerate(values):
        if value is None:
            continue
        own = list(_bands(value))
        close = (j for band in own for j in bands[band] if ((values[j] or 0) ^ value).bit_count() <= MOST_APART)
        if (first := min(close, default=None)) is not None:
            yield i, first
            continue
        for band in own:
            bands[band].append(i)


def _bands(value: int) -> Iterable[tuple[int, int]]:
    """Cut the bits of a hash into numbered bands."""
    edges = [64 * n // (MOST_APART + 1) for n in range(MOST_APART + 2)]
    return ((low, value >> low & ((1 << (high - low)) - 1)) for low, high in pairwise(edges))


def _hash(image: Image.Image) -> str:
    """Compute a perceptual hash: the signs of low frequencies about their median (Zauner 2010, section 3.2.1)."""
    grey = np.asarray(image.resize((32, 32), Image.Resampling.BOX).convert("L"), np.float64)
    if grey.std() < FLAT:
        return ""
    waves = np.cos(np.pi / 32 * np.outer(np.arange(1, 9), np.arange(32) + 0.5))  # of the cosine transform, 1 to 8
    low = (waves @ grey @ waves.T).ravel()
    return np.packbits(low > np.median(low)).tobytes().hex()


def _blur(grey: np.ndarray) -> float:
    """Compute the perceptual blur of Crete et al. (2007): what a mean over WINDOW pixels leaves of all differences.

    grey: (H, W) int16. The larger of both directions; 0 for pictures that are small or of one colour.
    """
    if min(grey.shape) < LEAST:
        return 0.0
    return max(_lost_sharpness(grey), _lost_sharpness(grey.T))


def _lost_sharpness(lines: np.ndarray) -> float:
    """Compute Crete's blur along the first axis of 0..255 in int16, which holds WINDOW times as much."""
    half = WINDOW // 2
    sharp = WINDOW * np.abs(np.diff(lines[half:-half], axis=0))
    soft = np.abs(lines[WINDOW:] - lines[:-WINDOW])  # neighbouring means differ by what enters and leaves the window
    total = int(sharp.sum(dtype=np.int64))
    return 1 - int(np.maximum(sharp - soft, 0).sum(dtype=np.int64)) / total if total else 0.0


def _border(pixels: np.ndarray) -> float:
    """Compute the share of a picture (H, W, 3) in borders of one colour, above and below or on the left and right."""
    height, width = pixels.shape[:2]
    if min(height, width) < LEAST:
        return 0.0
    across, down = pixels.swapaxes(0, 1), pixels
    return 1 - (height - _bars(down)) * (width - _bars(across)) / (height * width)


def _bars(lines: np.ndarray) -> int:
    """Count the lines (N, L, 3) of two bars of the same colour, one at each end."""
    first, last = (np.median(lines[end], axis=0) for end in (0, -1))
    if np.abs(first - last).max() > ALIKE:
        return 0
    before, after = _bar(lines, first), _bar(lines[::-1], last)
    return before + after if before and after else 0


def _bar(lines: np.ndarray, colour: np.ndarray) -> int:
    """Count the first lines of one colour, if at least half of a line right behind them has another one."""

    def others(number: int, difference: int) -> float:
        return float((np.abs(lines[number] - colour).max(axis=-1) > difference).mean())

    most = len(lines) // 2
    number = next((n for n in range(most) if others(n, ALIKE) >= 0.01), 0)
    ends = number and max(others(n, UNLIKE) for n in range(number, number + EDGE)) >= 0.5
    return number if ends else 0
