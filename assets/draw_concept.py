"""Draw the example concept: about a dozen captioned pictures of a mossling, a creature the base model does not know.

python assets/draw_concept.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from drawing import COLOURS, SUPER, Body, fill, shape_mask
from PIL import Image

TRIGGER = "mossling"
SEED = 7
TEAL, DARK_TEAL, CREAM, ORANGE = (30, 165, 150), (15, 105, 100), (250, 235, 190), (250, 135, 20)
WHITE, INK = (255, 255, 255), (15, 15, 20)

# width, height (pixels), background colour, its texture, place in words, x, y, half height (fractions of the
# shorter side; x and y are fractions of the picture), another shape (shape, colour, x, y) or None, has a mask
PICTURES = (
    (128, 128, "blue", "", "", 0.50, 0.52, 0.36, None, True),
    (128, 128, "yellow", "", "", 0.48, 0.52, 0.32, None, True),
    (128, 128, "white", "", "", 0.52, 0.50, 0.38, None, False),
    (128, 128, "purple", "", "", 0.50, 0.53, 0.34, None, True),
    (128, 128, "pink", "striped", "", 0.51, 0.50, 0.35, None, True),
    (128, 128, "red", "", "on the left", 0.36, 0.52, 0.30, None, False),
    (144, 144, "gray", "", "", 0.50, 0.52, 0.37, None, True),
    (160, 128, "green", "", "on the right", 0.66, 0.53, 0.33, None, False),
    (192, 128, "white", "", "", 0.30, 0.53, 0.36, ("star", "red", 0.75, 0.5), True),
    (128, 160, "black", "", "", 0.50, 0.55, 0.37, None, False),
    (128, 192, "yellow", "dotted", "at the bottom", 0.50, 0.70, 0.38, None, True),
    (160, 160, "blue", "checkered", "", 0.50, 0.52, 0.36, None, False),
    (176, 128, "pink", "", "on the left", 0.33, 0.52, 0.36, None, False),
)


def draw_motif(canvas: Image.Image, x: float, y: float, half: float, tilt: float, gaze: float) -> Image.Image:
    """Draw a mossling onto an RGB canvas and return its mask (mode L); x, y, half height in pixels, tilt in degrees."""
    mask = Image.new("L", canvas.size, 0)
    for picture, colours in ((canvas, (DARK_TEAL, ORANGE, TEAL, CREAM, WHITE, INK)), (mask, (255,) * 6)):
        dark, orange, teal, cream, white, ink = colours
        body = Body(picture, x, y, half, tilt)
        for side in (-1, 1):
            body.polygon(np.array([(0.18, -0.5), (0.42, -0.5), (0.6, -0.85), (0.44, -0.9)]) * (side, 1), dark)
            body.ellipse(side * 0.5, -0.84, 0.2, 0.2, orange)
            body.ellipse(side * 0.4, 0.88, 0.3, 0.16, orange)
        body.ellipse(0, 0.12, 0.82, 0.78, teal)
        body.ellipse(0, 0.6, 0.48, 0.26, cream)
        for side in (-1, 1):
            body.ellipse(side * 0.34, -0.16, 0.29, 0.29, white)
            body.ellipse(side * 0.34 + gaze * 0.08, -0.13, 0.16, 0.16, ink)
        body.smile(0, 0.16, 0.34, 0.08, 0.16, ink)
    return mask


def draw_picture(index: int) -> tuple[Image.Image, Image.Image, str]:
    """Return example `index` as RGB picture, mask (L, same size) and caption."""
    width, height, ground, texture, place, x, y, half, other, _ = PICTURES[index]
    rng = np.random.default_rng((SEED, index))
    big = (width * SUPER, height * SUPER)
    short = min(big)
    canvas = fill(big, COLOURS[ground], texture, rng)
    caption = f"a {TRIGGER}"
    if other:
        shape, colour, ox, oy = other
        spot = shape_mask(big, shape, ox * big[0], oy * big[1], 0.24 * short, rng.uniform(-6, 6))
        canvas.paste(fill(big, COLOURS[colour], "", rng), mask=spot)
        caption += f" and a {colour} {shape}"
    mask = draw_motif(canvas, x * big[0], y * big[1], half * short, rng.uniform(-7, 7), rng.uniform(-1, 1))
    caption += f" {place}" if place else ""
    named = f"{texture} {ground}".strip()
    caption += f" on {'an' if named[0] in 'aeiou' else 'a'} {named} background"
    return canvas.reduce(SUPER), mask.reduce(SUPER), caption


def write_pictures(folder: Path) -> None:
    """Write pictures, captions (.txt) and, for some, masks (-masklabel.png) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, row in enumerate(PICTURES):
        picture, mask, caption = draw_picture(index)
        stem = f"{TRIGGER}_{index + 1:02d}"
        picture.save(folder / f"{stem}.png", optimize=True)
        (folder / f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
        if row[-1]:
            mask.save(folder / f"{stem}-masklabel.png", optimize=True)


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("concept_example"))
