"""Measure what a picture looks like: a hash that near-duplicates share, blur, plain borders, marks in corners."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
CORNERS = ("top left", "top right", "bottom left", "bottom right")
CELL = (8, 16)  # rows and columns of a cell of a corner
CELLS = (12, 16)  # most cells down and across that a corner has, not beyond the middle of the picture
STEEP = 40  # difference of neighbouring greys, 0..255, that is an edge
BUSY = 0.15  # share of a cell in edges, from which it belongs to a mark
FEWEST_CELLS, MOST_CELLS = 3, 64  # of a mark
CROSSINGS, PER_SQUARE = 6.0, 1.5  # times that greys cross their middle in a row of text, and for each h x h of it
CONTRAST = 60  # of ink and ground, 0..255
SAME_MARK = 0.6  # share of common cells from which two marks are one
FEWEST_ALIKE = 3  # pictures with the same mark
MOST_MARKS = 64  # the most frequent of a corner, which are compared with all


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a picture looks like."""

    hash: str = ""  # 16 hexadecimal digits; "" for a picture without shapes
    blur: float = 0.0  # 0 = sharp, 1 = blurred
    border: float = 0.0  # share of the area in borders of one colour, 0..1
    marks: str = ""  # cells of a lone mark in each of CORNERS in hexadecimal digits, between commas; "" without any
    text: str = ""  # numbers of the corners whose mark looks like text


def look_at(image: Image.Image) -> Look:
    """Measure an RGB picture."""
    scale = min(1.0, SIDE / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image.resize(size, Image.Resampling.BOX, reducing_gap=1.0)
    grey = np.asarray(small.convert("L"), np.int16)
    found = [_mark(corner) for corner in _corners(grey)]
    return Look(
        hash=_hash(small),
        blur=round(_blur(grey), 3),
        border=round(_border(np.asarray(small)), 4),
        marks=",".join(mark for mark, _ in found) if any(mark for mark, _ in found) else "",
        text="".join(str(i) for i, (_, is_text) in enumerate(found) if is_text),
    )


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


def alike(hashes: Mapping[str, str]) -> list[frozenset[str]]:
    """Group names by their hashes: near-duplicates, and near-duplicates of those, are one group.

    The order does not matter. Whatever is near the same third picture must not be parted.
    """
    of_value: defaultdict[str, set[str]] = defaultdict(set)
    for name, text in hashes.items():
        of_value[text or f"none of {name}"].add(name)
    values = sorted(value for value in of_value if not value.startswith("none"))
    root = list(range(len(values)))

    def top(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    bands: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, text in enumerate(values):
        value = int(text, 16)
        for band in _bands(value):
            for j, other in bands[band]:
                if (other ^ value).bit_count() <= MOST_APART:
                    root[top(j)] = top(i)
            bands[band].append((i, value))
    groups: defaultdict[int | str, set[str]] = defaultdict(set)
    at = {value: i for i, value in enumerate(values)}
    for value, names in of_value.items():
        groups[top(at[value]) if value in at else value] |= names
    return [frozenset(group) for group in groups.values()]


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
    # Of a slope or of stripes all are zero but for rounding, which is another one on another processor.
    low = (waves @ grey @ waves.T).ravel().round(6)
    return np.packbits(low > np.median(low)).tobytes().hex() if low.any() else ""


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


def same_marks(marks: Sequence[str]) -> dict[int, list[int]]:
    """Group pictures by a mark that at least FEWEST_ALIKE of them have in the same corner: (corner, pictures).

    marks: of each picture, as in `Look`. Of each corner the mark that most pictures have.
    """
    found: dict[int, list[int]] = {}
    for corner in range(len(CORNERS)):
        cells = {i: int(text.split(",")[corner] or "0", 16) for i, text in enumerate(marks) if text}
        cells = {i: bits for i, bits in cells.items() if bits}
        usual = Counter(cells.values()).most_common(MOST_MARKS)
        groups = ([j for j, other in cells.items() if _alike(bits, other)] for bits, _ in usual)
        largest = max(groups, key=lambda group: (len(group), group), default=[])
        if len(largest) >= FEWEST_ALIKE:
            found[corner] = largest
    return found


def _alike(one: int, other: int) -> bool:
    """Tell whether two marks have most of their cells in common."""
    return (one & other).bit_count() >= SAME_MARK * (one | other).bit_count()


def _corners(grey: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the corners of a picture (H, W), each turned so that its corner is the first pixel; whole cells."""
    down, across = (
        min(most, side // 2 // cell) * cell for side, cell, most in zip(grey.shape, CELL, CELLS, strict=True)
    )
    for name in CORNERS:
        turned = grey[:: -1 if "bottom" in name else 1, :: -1 if "right" in name else 1]
        yield turned[:down, :across]


def _mark(corner: np.ndarray) -> tuple[str, bool]:
    """Find a mark that stands alone in a corner (h, w): its cells in hexadecimal digits, and whether it is like text.

    Something that goes on into the picture is none: the cells towards it must be calm.
    """
    if min(len(corner) // CELL[0], corner.shape[1] // CELL[1]) < 3:
        return "", False
    steep = np.zeros(corner.shape, bool)
    steep[:-1] |= np.abs(np.diff(corner, axis=0)) > STEEP
    steep[:, :-1] |= np.abs(np.diff(corner, axis=1)) > STEEP
    rows, columns = len(corner) // CELL[0], corner.shape[1] // CELL[1]
    shares = steep.reshape(rows, CELL[0], columns, CELL[1]).mean(axis=(1, 3))
    busy = shares >= BUSY
    # An edge of a thing in the picture fills few pixels of a cell, and yet goes on.
    calm = shares[-1].max() < BUSY / 5 and shares[:, -1].max() < BUSY / 5
    if not calm or not FEWEST_CELLS <= busy.sum() <= MOST_CELLS:
        return "", False
    grid = np.zeros(CELLS, bool)
    grid[:rows, :columns] = busy
    return np.packbits(grid).tobytes().hex(), _is_text(corner, steep)


def _is_text(corner: np.ndarray, steep: np.ndarray) -> bool:
    """Tell whether what is steep in a corner is like a line of text: two greys that change often along it."""
    down, across = np.flatnonzero(steep.any(axis=1)), np.flatnonzero(steep.any(axis=0))
    box = corner[down[0] : down[-1] + 1, across[0] : across[-1] + 1]
    low, high = np.percentile(box, (5, 95))
    height, width = box.shape
    if high - low < CONTRAST or width < 2 * height:
        return False
    crossings = np.count_nonzero(np.diff(box > (low + high) / 2, axis=1), axis=1)
    middle = crossings[height // 4 : height - height // 4]
    return bool(np.median(middle) >= max(CROSSINGS, PER_SQUARE * width / height))
