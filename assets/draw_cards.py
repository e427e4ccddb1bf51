"""Draw the cards of the templates, workflows/*.jpg: what each is for, and what it needs.

python assets/draw_cards.py [FOLDER]
"""

from __future__ import annotations

import colorsys
import sys
from itertools import pairwise
from pathlib import Path

from draw_banner import (
    CURVE,
    LILAC,
    NIGHT,
    PAPER,
    SOCKETS,
    Colour,
    creature,
    gradient,
    link,
    noisy,
    rounded,
    shadow,
    text,
)
from PIL import Image, ImageDraw, ImageFont

SIDE, SUPER = 400, 3  # pixels of a card; supersampling per side

# File -> two lines of its name, what it needs, the card's hue as a part of the circle, and what is drawn.
CARDS: dict[str, tuple[str, str, str, float, str]] = {
    "1 Start here": ("Start here", "one node and a picture", "any computer, 2 minutes", 0.10, "picture"),
    "1 Start here.app": ("Start here", "as an app", "any computer, 2 minutes", 0.04, "form"),
    "2 Train a LoRA node by node": ("Node by node", "six nodes", "any computer, 2 minutes", 0.74, "nodes"),
    "3 Stable Diffusion 1.5": ("SD 1.5", "your own character", "GPU with 6 GB", 0.58, "nodes"),
    "4 Stable Diffusion XL": ("SDXL", "your own character", "GPU with 12 GB", 0.46, "nodes"),
    "5 Z-Image": ("Z-Image", "your own character", "GPU with 16 GB", 0.33, "linked"),
    "6 FLUX.1 dev": ("FLUX.1 dev", "your own character", "GPU with 24 GB", 0.93, "linked"),
    "7 Qwen-Image": ("Qwen-Image", "your own character", "GPU with 24 GB", 0.83, "linked"),
    "8 Compare, shrink, share": ("Share", "compare, shrink, save", "any computer, 4 minutes", 0.17, "grid"),
    "9 Make a training adapter": ("Adapter", "for Turbo models", "GPU with 16 GB", 0.65, "linked"),
    "10 Caption a folder": ("Captions", "by a vision model", "GPU with 12 GB", 0.52, "grid"),
    "11 Mask a folder": ("Masks", "by SAM 3", "GPU with 6 GB", 0.26, "grid"),
    "12 Wan 2.2 5B": ("Wan 2.2 5B", "your own motion", "GPU with 24 GB", 0.70, "clips"),
    "13 Wan 2.2 14B": ("Wan 2.2 14B", "both experts", "GPU with 32 GB", 0.88, "clips"),
    "14 LTX-2": ("LTX-2", "your own motion", "GPU with 32 GB", 0.50, "clips"),
}


def tint(hue: float, light: float, share: float = 0.45) -> Colour:
    """Return a colour of a hue; light and share (saturation): 0 to 1."""
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, light, share))
    return red, green, blue


def box(canvas: Image.Image, place: tuple[float, float, float, float], colour: Colour) -> None:
    """Draw a node: a bar with its title, and its body."""
    left, top, right, bottom = (round(SUPER * each) for each in place)
    shadow(canvas, (left, top + 4 * SUPER, right, bottom + 4 * SUPER), 6 * SUPER, 5 * SUPER, 0.7)
    pen = ImageDraw.Draw(canvas)
    pen.rounded_rectangle((left, top, right, bottom), 6 * SUPER, (44, 42, 52))
    pen.rounded_rectangle((left, top, right, top + 16 * SUPER), 6 * SUPER, colour)
    for line in range(top + 28 * SUPER, bottom - 8 * SUPER, 14 * SUPER):
        pen.rounded_rectangle((left + 8 * SUPER, line, right - 8 * SUPER, line + 7 * SUPER), 3 * SUPER, (70, 66, 82))


def picture(canvas: Image.Image, at: tuple[float, float], side: float, noise: float = 0.0) -> None:
    """Draw the creature, as clean as a model draws it; noise: what is left of its noise, 0 to 1."""
    pixels, (left, top) = round(side * SUPER), (round(SUPER * at[0]), round(SUPER * at[1]))
    drawn = creature(pixels)
    drawn = noisy(drawn, noise, 30) if noise else drawn
    shadow(canvas, (left, top + 5 * SUPER, left + pixels, top + pixels + 5 * SUPER), 10 * SUPER, 6 * SUPER, 0.7)
    canvas.paste(drawn, (left, top), rounded(drawn.size, 10 * SUPER))


def links(canvas: Image.Image, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw three links between two places."""
    for shift, colour in zip((-12, 0, 12), SOCKETS.values(), strict=True):
        ends = [(x * SUPER, (y + shift) * SUPER) for x, y in (start, end)]
        link(canvas, ends[0], ends[1], colour, 3 * SUPER)


def illustrate(canvas: Image.Image, what: str, hue: float) -> None:
    """Draw the upper half of a card."""
    bar = tint(hue, 0.42)
    if what == "picture":
        links(canvas, (170, 130), (205, 130))
        box(canvas, (30, 40, 170, 220), bar)
        picture(canvas, (205, 45), 165)
    elif what == "form":
        box(canvas, (215, 30, 370, 225), bar)
        ImageDraw.Draw(canvas).rounded_rectangle([SUPER * each for each in (228, 190, 357, 213)], 5 * SUPER, CURVE)
        picture(canvas, (30, 45), 165)
    elif what == "clips":
        box(canvas, (24, 60, 124, 210), bar)
        for number in range(4):  # frames of a hop
            picture(canvas, (142 + 50 * number, (112, 72, 60, 112)[number]), 84)
    elif what == "grid":
        for i, noise in enumerate((0.9, 0.6, 0.3, 0.0)):
            picture(canvas, (30 + 88 * i, 50 + 24 * (i % 2)), 76 if noise else 84, noise)
        for (x, y), (end, below) in pairwise([(70, 190), (160, 205), (250, 195), (340, 210)]):
            link(canvas, (x * SUPER, y * SUPER), (end * SUPER, below * SUPER), CURVE, 3 * SUPER)
    else:
        places = [(24, 40, 110, 110), (24, 140, 110, 215), (140, 60, 240, 210)]
        if what == "linked":
            places = [(24, 30, 104, 80), (24, 100, 104, 150), (24, 170, 104, 220), (134, 60, 234, 210)]
        *small, train = places
        for left, top, right, bottom in small:
            links(canvas, (right, (top + bottom) / 2), (train[0], (train[1] + train[3]) / 2))
            box(canvas, (left, top, right, bottom), bar)
        links(canvas, (train[2], 135), (265, 135))
        box(canvas, train, bar)
        picture(canvas, (262, 75), 115)


def draw_card(name: str, what_for: str, needs: str, hue: float, what: str) -> Image.Image:
    """Draw a card."""
    canvas = gradient((SIDE * SUPER, SIDE * SUPER), tint(hue, 0.2), NIGHT, 60)
    illustrate(canvas, what, hue)
    text(canvas, (28 * SUPER, 296 * SUPER), name, 54 * SUPER, PAPER, 1.2 * SUPER)
    text(canvas, (30 * SUPER, 332 * SUPER), what_for, 25 * SUPER, LILAC, 0)
    width = ImageFont.load_default(22 * SUPER).getlength(needs) + 28 * SUPER
    pill = (28 * SUPER, 350 * SUPER, 28 * SUPER + width, 384 * SUPER)
    ImageDraw.Draw(canvas).rounded_rectangle(pill, 17 * SUPER, tint(hue, 0.75, 0.6))
    text(canvas, (42 * SUPER, 375 * SUPER), needs, 22 * SUPER, NIGHT, 0.4 * SUPER)
    return canvas.reduce(SUPER)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "workflows"
    for file, (name, what_for, needs, hue, what) in CARDS.items():
        draw_card(name, what_for, needs, hue, what).save(folder / f"{file}.jpg", quality=88, optimize=True)
