"""Draw what the ComfyUI registry and the Manager show of the pack: icon.png (400 x 400) and banner.png (1680 x 720).

python assets/draw_banner.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
from draw_concept import draw_motif
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SUPER = 3  # supersampling per side
ICON, BANNER = (400, 400), (1680, 720)  # pixels; a banner is 21:9
Colour = tuple[int, int, int]
NIGHT, DUSK, LILAC = (21, 17, 32), (46, 30, 74), (186, 150, 236)
PAPER = (246, 241, 232)
CURVE = (250, 150, 40)
SOCKETS = {"MODEL": (179, 157, 219), "CLIP": (255, 213, 0), "LATENT": (255, 110, 160)}  # as the editor colours links


def gradient(size: tuple[int, int], first: Colour, last: Colour, angle: float) -> Image.Image:
    """Fill a picture with a linear gradient; angle: of its direction in degrees, 0 = to the right."""
    x, y = np.meshgrid(np.linspace(-0.5, 0.5, size[0]), np.linspace(-0.5, 0.5, size[1]))
    turn = np.deg2rad(angle)
    along = x * np.cos(turn) + y * np.sin(turn)
    share = ((along - along.min()) / np.ptp(along))[..., None]
    return Image.fromarray((np.array(first) * (1 - share) + np.array(last) * share).round().astype(np.uint8))


def rounded(size: tuple[int, int], radius: float) -> Image.Image:
    """Return a mask (mode L) of a rectangle with round corners."""
    mask = Image.new("L", size, 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), radius, fill=255)
    return mask


def shadow(canvas: Image.Image, box: tuple[int, int, int, int], radius: float, blur: float, share: float) -> None:
    """Darken a picture under a box with round corners."""
    dark = Image.new("L", canvas.size, 0)
    ImageDraw.Draw(dark).rounded_rectangle(box, radius, fill=round(255 * share))
    canvas.paste((8, 5, 14), mask=dark.filter(ImageFilter.GaussianBlur(blur)))


def creature(side: int, half: float = 0.36, tilt: float = 4.0) -> Image.Image:
    """Draw a mossling on violet; side in pixels, half height as a fraction of it."""
    canvas = gradient((side, side), (136, 74, 205), (88, 38, 150), 60)
    floor = Image.new("L", canvas.size, 0)
    ImageDraw.Draw(floor).ellipse((side * 0.26, side * 0.8, side * 0.74, side * 0.9), fill=120)
    canvas.paste((52, 20, 96), mask=floor.filter(ImageFilter.GaussianBlur(side / 40)))
    draw_motif(canvas, side / 2, side * 0.53, half * side, tilt, 0.5)
    return canvas


def noisy(picture: Image.Image, level: float, cells: int) -> Image.Image:
    """Mix a picture with coarse coloured noise; level: share of the noise, 0 to 1."""
    side = picture.size[0]
    noise = np.random.default_rng(5).normal(120, 62, (cells, cells, 3))
    small = np.asarray(picture.resize((cells, cells), Image.Resampling.BOX), float)
    mixed = (np.sqrt(1 - level**2) * (small - 110) + level * (noise - 120) + 112).clip(0, 255).astype(np.uint8)
    return Image.fromarray(mixed).resize((side, side), Image.Resampling.NEAREST)


def text(canvas: Image.Image, at: tuple[float, float], words: str, size: float, colour: Colour, bold: float) -> None:
    """Write words in the font that comes with Pillow; at: left end of the base line; bold: extra width of strokes."""
    pen = ImageDraw.Draw(canvas)
    pen.text(at, words, colour, ImageFont.load_default(size), anchor="ls", stroke_width=round(bold), stroke_fill=colour)


def link(canvas: Image.Image, start: tuple[float, float], end: tuple[float, float], colour: Colour, width: int) -> None:
    """Draw a link as the editor does: a curve that leaves and arrives level."""
    reach = (end[0] - start[0]) * 0.5
    t = np.linspace(0, 1, 80)[:, None]
    knots = np.array([start, (start[0] + reach, start[1]), (end[0] - reach, end[1]), end])
    points = (1 - t) ** 3 * knots[0] + 3 * t * (1 - t) ** 2 * knots[1] + 3 * t**2 * (1 - t) * knots[2] + t**3 * knots[3]
    ImageDraw.Draw(canvas).line([tuple(p) for p in points], colour, width, joint="curve")


def sockets(canvas: Image.Image, places: Iterable[tuple[float, float]], colour: Colour) -> None:
    """Draw the dots at the ends of a link."""
    for x, y in places:
        size = 9 * SUPER
        ImageDraw.Draw(canvas).ellipse((x - size, y - size, x + size, y + size), colour, NIGHT, 3 * SUPER)


def falling_loss(canvas: Image.Image, box: tuple[float, float, float, float]) -> None:
    """Draw a loss that falls, in a box: each step pale, their running mean above it."""
    steps = np.linspace(0, 1, 260)
    mean = 0.9 * np.exp(-4.2 * steps) + 0.06
    single = mean * np.exp(np.random.default_rng(2).normal(0, 0.22, len(steps)))
    left, top, right, bottom = box

    def points(values: np.ndarray) -> list[tuple[float, float]]:
        return [
            (left + s * (right - left), bottom - min(v, 1.1) * (bottom - top))
            for s, v in zip(steps, values, strict=True)
        ]

    pen = ImageDraw.Draw(canvas)
    pen.line(points(single), (66, 48, 92), SUPER * 2, joint="curve")
    pen.line(points(mean), CURVE, SUPER * 4, joint="curve")


def framed(side: int, half: float) -> Image.Image:
    """Draw the mossling as a painting in a frame (RGBA); side in pixels."""
    painting, edge = Image.new("RGBA", (side, side)), round(side * 0.056)
    painting.paste(gradient((side, side), (255, 190, 92), (222, 112, 26), 60), mask=rounded((side, side), side * 0.06))
    inside = side - 2 * edge
    painting.paste(creature(inside, half), (edge, edge), rounded((inside, inside), side * 0.03))
    return painting


def draw_icon() -> Image.Image:
    """Draw the icon: the mossling as a painting in a frame, with round corners."""
    side = ICON[0] * SUPER
    canvas, edge = gradient((side, side), DUSK, NIGHT, 60), round(side * 0.1)
    painting = framed(side - 2 * edge, 0.39)
    shadow(canvas, (edge, edge + side // 40, side - edge, side - edge + side // 40), side * 0.05, side / 40, 0.8)
    canvas.paste(painting, (edge, edge), painting)
    whole = Image.new("RGBA", (side, side))
    whole.paste(canvas, mask=rounded((side, side), side * 0.18))
    return whole.reduce(SUPER)


def draw_banner() -> Image.Image:
    """Draw the banner: from noise to a painting of the mossling by the links of a graph, over a loss that falls."""
    width, height = (n * SUPER for n in BANNER)
    canvas = gradient((width, height), DUSK, NIGHT, 35)
    falling_loss(canvas, (0, height * 0.72, width, height * 0.97))
    places = [(n[0] * SUPER, n[1] * SUPER, n[2] * SUPER) for n in ((92, 330, 270), (570, 282, 310), (1112, 118, 470))]
    links = [
        ((left + side, top + side * share), (end, other + tall * share), colour)
        for (left, top, side), (end, other, tall) in pairwise(places)
        for share, colour in zip((0.3, 0.5, 0.7), SOCKETS.values(), strict=True)
    ]
    for start, end, colour in links:
        link(canvas, start, end, colour, 4 * SUPER)
    for (left, top, side), level in zip(places, (1.0, 0.55, 0.0), strict=True):
        lower = 14 * SUPER
        shadow(canvas, (left, top + lower, left + side, top + lower + side), 22 * SUPER, 14 * SUPER, 0.85)
        if level:
            canvas.paste(noisy(creature(side), level, 36), (left, top), rounded((side, side), 22 * SUPER))
        else:
            painting = framed(side, 0.37)
            canvas.paste(painting, (left, top), painting)
    for start, end, colour in links:
        sockets(canvas, (start, end), colour)
    text(canvas, (86 * SUPER, 164 * SUPER), "LoRA Atelier", 118 * SUPER, PAPER, 2.4 * SUPER)
    text(canvas, (92 * SUPER, 236 * SUPER), "Train a LoRA in the graph that uses it", 44 * SUPER, LILAC, 0)
    return canvas.reduce(SUPER)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_icon().save(folder / "icon.png", optimize=True)
    draw_banner().save(folder / "banner.png", optimize=True)
