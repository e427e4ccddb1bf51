"""Draw the captioned pictures that the tiny base model is trained on; picture i is a pure function of (seed, i)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

SIZE = 128  # pixels, side of a training picture
SUPER = 3  # supersampling per side: everything is drawn at SIZE * SUPER and averaged down

COLOURS: dict[str, tuple[int, int, int]] = {  # sRGB, 0..255
    "red": (220, 35, 40), "orange": (250, 135, 20), "yellow": (250, 225, 50), "green": (35, 150, 60),
    "blue": (35, 75, 215), "purple": (125, 45, 165), "pink": (250, 150, 200), "white": (245, 245, 245),
    "gray": (128, 128, 128), "black": (22, 22, 22),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "diamond", "heart")
TEXTURES = ("striped", "dotted", "checkered")
PLACES: dict[str, tuple[float, float]] = {  # centre of the figure as a fraction of the picture (x, y)
    "on the left": (0.27, 0.5), "on the right": (0.73, 0.5), "at the top": (0.5, 0.27), "at the bottom": (0.5, 0.73),
    "at the top left": (0.28, 0.28), "at the top right": (0.72, 0.28), "at the bottom left": (0.28, 0.72),
    "at the bottom right": (0.72, 0.72), "in the centre": (0.5, 0.5),
}  # fmt: skip
RADII = {"small": (0.12, 0.16), "": (0.25, 0.32), "large": (0.37, 0.43)}  # fractions of the picture's side


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Describe one shape of a scene in words; empty words mean "not specified"."""

    shape: str
    colour: str
    size: str = ""
    place: str = ""
    texture: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Describe one picture in words; a scene without figures is a doodle."""

    figures: tuple[Figure, ...]
    ground: str
    ground_texture: str = ""
    relation: str = ""  # how figure 0 stands to figure 1: "and", "above" or "below"
    caption: str = ""


def held_out(shape: str, colour: str, ground: str) -> bool:
    """Say whether this (shape, colour, background colour) never occurs in the training pictures (about 1 in 16)."""
    names = list(COLOURS)
    return (3 * SHAPES.index(shape) + 5 * names.index(colour) + 7 * names.index(ground)) % 16 == 7


def held_out_combinations() -> list[tuple[str, str, str]]:
    """List every (shape, colour, background colour) that is never trained on."""
    return [
        (s, c, g) for s in SHAPES for c in COLOURS for g in COLOURS if c != g and held_out(s, c, g)
    ]  # fmt: skip


def scene_at(seed: int, index: int) -> Scene:
    """Choose what picture `index` shows and how it is captioned."""
    rng = np.random.default_rng((seed, index, 0))
    kind = rng.choice(("plain", "size", "place", "texture", "pair", "doodle"), p=(0.46, 0.13, 0.16, 0.12, 0.08, 0.05))
    ground = _pick(rng, COLOURS)
    ground_texture = _pick(rng, TEXTURES) if kind == "texture" and rng.random() < 0.65 else ""
    if kind not in ("plain", "texture") and rng.random() < 0.12:
        ground_texture = _pick(rng, TEXTURES)
    if kind == "doodle":
        scene = Scene(figures=(), ground=ground)
    elif kind == "pair":
        figures = (_figure(rng, ground), _figure(rng, ground))
        scene = Scene(figures=figures, ground=ground, relation=_pick(rng, ("and", "and", "above", "below")))
    else:
        words = {}
        if kind == "size" or (kind == "place" and rng.random() < 0.3):
            words["size"] = "small" if kind == "place" else _pick(rng, ("small", "large"))
        if kind == "place":
            words["place"] = _pick(rng, PLACES)
        if kind == "texture" and not ground_texture:
            words["texture"] = _pick(rng, TEXTURES)
        figure = _figure(rng, ground, **words)
        scene = Scene(figures=(figure,), ground=ground, ground_texture=ground_texture)
    return Scene(
        figures=scene.figures,
        ground=ground,
        ground_texture=scene.ground_texture,
        relation=scene.relation,
        caption=_caption(scene, rng),
    )


def draw(scene: Scene, seed: int, index: int, size: int = SIZE) -> Image.Image:
    """Draw a scene, an RGB picture of (size, size) pixels; (seed, index) decide position, tint and tilt."""
    rng = np.random.default_rng((seed, index, 1))
    side = size * SUPER
    canvas = fill((side, side), COLOURS[scene.ground], scene.ground_texture, rng)
    if not scene.figures:
        for _ in range(int(rng.integers(3, 7))):
            _scribble(canvas, rng, _pick(rng, COLOURS.values()))
    spots = {
        "and": ((0.28, 0.5), (0.72, 0.5)),
        "above": ((0.5, 0.27), (0.5, 0.73)),
        "below": ((0.5, 0.73), (0.5, 0.27)),
    }
    for k, figure in enumerate(scene.figures):
        low, high = RADII[figure.size]
        radius, jitter = rng.uniform(low, high), 0.045
        x, y = PLACES.get(figure.place, (0.5, 0.5))
        if scene.relation:
            (x, y), radius, jitter = spots[scene.relation][k], rng.uniform(0.15, 0.19), 0.025
        elif figure.place and figure.size == "":
            radius *= 0.72
        x, y = x + rng.uniform(-jitter, jitter), y + rng.uniform(-jitter, jitter)
        mask = shape_mask((side, side), figure.shape, x * side, y * side, radius * side, rng.uniform(-8, 8))
        canvas.paste(fill((side, side), COLOURS[figure.colour], figure.texture, rng), mask=mask)
    return canvas.reduce(SUPER)


def picture(seed: int, index: int) -> tuple[Image.Image, str]:
    """Return captioned picture `index`: RGB (SIZE, SIZE) and its caption."""
    scene = scene_at(seed, index)
    return draw(scene, seed, index), scene.caption


def rich_picture(seed: int, index: int) -> Image.Image:
    """Draw an uncaptioned picture for the autoencoder, RGB (SIZE, SIZE): scenes, doodles, gradients, faces, spots."""
    rng = np.random.default_rng((seed, index, 2))
    if rng.random() < 0.3:
        return picture(seed, index)[0]
    side = SIZE * SUPER
    shape = (side, side)
    canvas = fill(shape, _any_colour(rng), _pick(rng, ("", "", *TEXTURES)), rng)
    if rng.random() < 0.4:
        canvas = _gradient(side, _any_colour(rng), _any_colour(rng), rng)
    for _ in range(int(rng.integers(2, 9))):
        _scribble(canvas, rng, _any_colour(rng))
    if rng.random() < 0.45:
        _face(canvas, rng)
    if rng.random() < 0.3:
        mask = shape_mask(
            shape, _pick(rng, SHAPES), *(rng.uniform(0.2, 0.8, 2) * side), rng.uniform(0.1, 0.35) * side,
            rng.uniform(-180, 180),
        )  # fmt: skip
        canvas.paste(_gradient(side, _any_colour(rng), _any_colour(rng), rng), mask=mask)
    return canvas.reduce(SUPER)


def shape_mask(size: tuple[int, int], shape: str, x: float, y: float, radius: float, tilt: float) -> Image.Image:
    """Draw one shape white on black, mode L of `size` (width, height); radius in pixels, tilt in degrees."""
    mask = Image.new("L", size, 0)
    pen = ImageDraw.Draw(mask)
    turn = np.deg2rad(tilt)
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = (_outline("circle" if shape == "ring" else shape) * radius) @ rotation.T + (x, y)
    pen.polygon([tuple(p) for p in points], fill=255)
    if shape == "ring":
        inner = (_outline("circle") * radius * 0.55) + (x, y)
        pen.polygon([tuple(p) for p in inner], fill=0)
    return mask


def fill(size: tuple[int, int], colour: tuple[int, ...], texture: str, rng: np.random.Generator) -> Image.Image:
    """Fill a picture of `size` (width, height) with a slightly varied colour, textured in a second tone of it."""
    base = np.clip(np.asarray(colour, dtype=float) + rng.normal(0, 5, 3), 0, 255)
    canvas = Image.new("RGB", size, tuple(int(v) for v in base))
    if not texture:
        return canvas
    bright = base @ (0.299, 0.587, 0.114) > 128
    tone = base * 0.62 if bright else base + (255 - base) * 0.38
    ink = tuple(int(v) for v in tone)
    height = size[1]
    pen = ImageDraw.Draw(canvas)
    pitch = rng.uniform(0.12, 0.16) * max(size)
    ox, oy = rng.uniform(0, pitch, 2)
    count = int(2 * max(size) / pitch) + 2
    if texture == "striped":
        slant = _pick(rng, (0.0, 1.0))
        for k in range(-count, count):
            left = ox + k * pitch
            edge = (left, left + pitch / 2, left + pitch / 2 + slant * height, left + slant * height)
            pen.polygon(list(zip(edge, (0, 0, height, height), strict=True)), fill=ink)
    else:
        for row in range(-1, count):
            for column in range(-1, count):
                cx, cy = ox + column * pitch, oy + row * pitch
                if texture == "dotted":
                    r = pitch * 0.3
                    pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=ink)
                elif (row + column) % 2:
                    pen.rectangle((cx, cy, cx + pitch - 1, cy + pitch - 1), fill=ink)
    return canvas


def _pick(rng: np.random.Generator, options):
    options = tuple(options)
    return options[int(rng.integers(len(options)))]


def _any_colour(rng: np.random.Generator) -> tuple[int, ...]:
    if rng.random() < 0.5:
        return _pick(rng, COLOURS.values())
    return tuple(int(v) for v in rng.integers(0, 256, 3))


def _figure(rng: np.random.Generator, ground: str, **words: str) -> Figure:
    while True:
        shape, colour = _pick(rng, SHAPES), _pick(rng, COLOURS)
        if colour != ground and not held_out(shape, colour, ground):
            return Figure(shape=shape, colour=colour, **words)


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _caption(scene: Scene, rng: np.random.Generator) -> str:
    ground = " ".join(word for word in (scene.ground_texture, scene.ground) if word) + " background"
    if not scene.figures:
        return f"{_pick(rng, ('a doodle', 'an abstract doodle', 'a colorful doodle'))} on {_article(ground)}"
    named = [" ".join(w for w in (f.size, f.texture, f.colour, f.shape) if w) for f in scene.figures]
    subject = _article(named[0])
    place = scene.figures[0].place
    if scene.relation:
        subject = f"{subject} {scene.relation} {_article(named[1])}"
    elif place:
        subject = f"{subject} {place}"
    style = rng.random()
    if style < 0.74:
        return f"{subject} on {_article(ground)}"
    if style < 0.80:
        return f"{_pick(rng, ('a picture of', 'a drawing of', 'an image of'))} {subject} on {_article(ground)}"
    if style < 0.86:
        return f"{_article(ground)} with {subject}"
    if style < 0.93:
        return f"{named[0] if len(named) == 1 and not place else subject}, {ground}"
    return f"{subject}, {_article(ground)}"


@lru_cache
def _outline(shape: str) -> np.ndarray:
    """Return the outline of a shape as (N, 2) points within about [-1, 1]; y points down."""
    turn = np.linspace(0, 2 * np.pi, 96, endpoint=False)
    if shape == "circle":
        return np.stack([np.cos(turn), np.sin(turn)], 1)
    if shape == "heart":
        x = 16 * np.sin(turn) ** 3
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([x / 16, -(y + 2.5) / 15], 1)
    if shape == "star":
        angle = np.arange(10) * np.pi / 5 - np.pi / 2
        radius = np.where(np.arange(10) % 2, 0.46, 1.1)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle) + 0.06], 1)
    a = 0.32
    return np.array({
        "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
        "triangle": [(0, -0.95), (1, 0.8), (-1, 0.8)],
        "diamond": [(0, -1.1), (0.75, 0), (0, 1.1), (-0.75, 0)],
        "cross": [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a), (a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a),
                  (-a, -a)],
    }[shape])  # fmt: skip


def _gradient(side: int, first: tuple[int, ...], second: tuple[int, ...], rng: np.random.Generator) -> Image.Image:
    angle = rng.uniform(0, 2 * np.pi)
    grid = np.linspace(-0.5, 0.5, 64)
    ramp = np.clip(grid[None] * math.cos(angle) + grid[:, None] * math.sin(angle) + 0.5, 0, 1)[..., None]
    colours = np.asarray(first) * (1 - ramp) + np.asarray(second) * ramp
    return Image.fromarray(colours.astype(np.uint8)).resize((side, side), Image.Resampling.BILINEAR)


def _scribble(canvas: Image.Image, rng: np.random.Generator, colour: tuple[int, ...]) -> None:
    """Draw one random blob, polygon, curve or cluster of dots."""
    side = canvas.width
    pen = ImageDraw.Draw(canvas)
    x, y = rng.uniform(0.1, 0.9, 2) * side
    kind = _pick(rng, ("blob", "polygon", "curve", "curve", "dots"))
    if kind == "blob":
        turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        radius = rng.uniform(0.06, 0.26) * side * (
            1 + rng.uniform(0, 0.25) * np.sin(turn * rng.integers(2, 6) + rng.uniform(0, 6))
        )  # fmt: skip
        squash = rng.uniform(0.6, 1.4)
        pen.polygon(list(zip(x + radius * np.cos(turn), y + squash * radius * np.sin(turn), strict=True)), fill=colour)
    elif kind == "polygon":
        angles = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(3, 8))))
        radius = rng.uniform(0.08, 0.3, len(angles)) * side
        pen.polygon(list(zip(x + radius * np.cos(angles), y + radius * np.sin(angles), strict=True)), fill=colour)
    elif kind == "curve":
        t = np.linspace(0, 1, 24)[:, None]
        p = rng.uniform(0.02, 0.98, (4, 2)) * side
        curve = (1 - t) ** 3 * p[0] + 3 * t * (1 - t) ** 2 * p[1] + 3 * t**2 * (1 - t) * p[2] + t**3 * p[3]
        pen.line([tuple(q) for q in curve], fill=colour, width=int(rng.uniform(0.012, 0.06) * side), joint="curve")
    else:
        for dx, dy in rng.normal(0, 0.1, (int(rng.integers(3, 9)), 2)) * side:
            r = rng.uniform(0.012, 0.035) * side
            pen.ellipse((x + dx - r, y + dy - r, x + dx + r, y + dy + r), fill=colour)


def creature(seed: int, index: int) -> tuple[Image.Image, str]:
    """Draw one figure with eyes, mouth and limbs: RGB (SIZE, SIZE) and its caption, which names colour and ground.

    Body, eyes, feet and what grows on the head vary alone, so that the model learns how such figures are put together,
    and no single one.
    """
    rng = np.random.default_rng((seed, index, 3))
    ground, colour = (str(name) for name in rng.choice(list(COLOURS), 2, replace=False))
    texture = _pick(rng, TEXTURES) if rng.random() < 0.12 else ""
    side = SIZE * SUPER
    canvas = fill((side, side), COLOURS[ground], texture, rng)
    half, place = rng.uniform(0.24, 0.38) * side, ""
    x, y = (0.5 + rng.uniform(-0.08, 0.08, 2)) * side
    if rng.random() < 0.25:
        place = _pick(rng, ("on the left", "on the right", "at the top", "at the bottom"))
        half, (x, y) = 0.75 * half, (PLACES[place][0] * side, PLACES[place][1] * side)
    Body(canvas, x, y, half, rng.uniform(-8, 8)).draw(COLOURS[colour], rng)
    named = _article(f"{colour} creature" if rng.random() < 0.7 else "creature")
    words = f"{texture} {ground}".strip()
    return canvas.reduce(SUPER), f"{named} {place}".strip() + f" on {_article(words)} background"


class Body:
    """A creature on a canvas, in units of its half height around its middle; y points down."""

    def __init__(self, canvas: Image.Image, x: float, y: float, half: float, tilt: float) -> None:
        self._pen, self._half, self._at = ImageDraw.Draw(canvas), half, (x, y)
        turn = np.deg2rad(tilt)
        self._turn = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])

    def polygon(self, points: np.ndarray, colour: int | tuple[int, ...]) -> None:
        """Draw the outline through points (N, 2)."""
        self._pen.polygon([tuple(p) for p in points @ self._turn * self._half + self._at], fill=colour)

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: int | tuple[int, ...]) -> None:
        """Draw an ellipse around (x, y)."""
        turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        self.polygon(np.stack([x + rx * np.cos(turn), y + ry * np.sin(turn)], 1), colour)

    def smile(self, x: float, y: float, width: float, depth: float, thick: float, colour: tuple[int, ...]) -> None:
        """Draw a mouth: two parabolas between the same corners, the lower one deeper."""
        t = np.linspace(-1, 1, 24)
        bow = 1 - t**2
        upper, lower = (np.stack([x + width * t, y + deep * bow], 1) for deep in (depth, depth + thick))
        self.polygon(np.concatenate([upper, lower[::-1]]), colour)

    def draw(self, skin: tuple[int, ...], rng: np.random.Generator) -> None:
        """Draw what is behind the body, the body, and the face on it."""
        shade = tuple(int(v * 0.62) for v in skin)
        limb = _pick(rng, (shade, skin, _pick(rng, COLOURS.values())))
        wide, tall = rng.uniform(0.6, 0.95), rng.uniform(0.62, 0.85)
        low = 0.9 - tall
        self._head(rng, limb, shade, wide, low - tall)
        if rng.random() < 0.75:
            apart, foot = rng.uniform(0.25, 0.5), rng.uniform(0.18, 0.32)
            for sign in (-1, 1):
                self.ellipse(sign * apart, 0.86, foot, rng.uniform(0.5, 0.6) * foot, limb)
        if rng.random() < 0.35:
            for sign in (-1, 1):
                self.ellipse(sign * wide, low + 0.1, 0.24, 0.13, limb)
        if rng.random() < 0.75:
            self.ellipse(0, low, wide, tall, skin)
        else:
            top, bottom = low - tall, low + tall
            self.polygon(np.array([(-0.8 * wide, top), (0.8 * wide, top), (wide, bottom), (-wide, bottom)]), skin)
        if rng.random() < 0.6:
            belly = _pick(rng, ((250, 235, 190), COLOURS["white"], _pick(rng, COLOURS.values())))
            self.ellipse(0, low + 0.45 * tall, rng.uniform(0.45, 0.65) * wide, rng.uniform(0.32, 0.48) * tall, belly)
        self._eyes(rng, wide, low - rng.uniform(0.15, 0.4) * tall)

    def _head(self, rng, limb: tuple[int, ...], shade: tuple[int, ...], wide: float, top: float) -> None:
        kind = _pick(rng, ("ears", "horns", "stalks", "none"))
        apart = rng.uniform(0.4, 0.65) * wide
        for sign in (-1, 1) if kind != "none" else ():
            side = np.array((sign, 1.0))
            if kind == "stalks":
                tip = rng.uniform(0.1, 0.18)
                stalk = [
                    (apart - 0.1, top + 0.4),
                    (apart + 0.1, top + 0.4),
                    (apart + 0.2, top - 0.1),
                    (apart, top - 0.1),
                ]
                self.polygon(np.array(stalk) * side, shade)
                self.ellipse(sign * (apart + 0.1), top - 0.1, tip, tip, limb)
            elif kind == "ears":
                self.ellipse(sign * apart, top + 0.1, rng.uniform(0.15, 0.25), rng.uniform(0.2, 0.38), limb)
            else:
                horn = [(apart - 0.2, top + 0.3), (apart + 0.2, top + 0.35), (apart + 0.1, top - 0.2)]
                self.polygon(np.array(horn) * side, limb)

    def _eyes(self, rng: np.random.Generator, wide: float, y: float) -> None:
        ink, eye, gaze = (15, 15, 20), rng.uniform(0.16, 0.3), rng.uniform(-1, 1)
        count = _pick(rng, (1, 2, 2, 2, 2, 3))
        apart = max(0.36 * wide, 1.05 * eye)
        for x in {1: (0.0,), 2: (-apart, apart), 3: (-2 * eye, 0.0, 2 * eye)}[count]:
            self.ellipse(x, y, eye, eye, (255, 255, 255))
            pupil = rng.uniform(0.45, 0.6) * eye
            self.ellipse(x + gaze * 0.3 * eye, y + 0.02, pupil, pupil, ink)
        if rng.random() < 0.8:
            depth, thick = rng.uniform(0.04, 0.14), rng.uniform(0.07, 0.16)
            self.smile(0, y + eye + 0.06, rng.uniform(0.18, 0.4) * wide, depth, thick, ink)


def _face(canvas: Image.Image, rng: np.random.Generator) -> None:
    """Draw a random face-like composition: body, two eyes with pupils, a mouth, sometimes ears."""
    side = canvas.width
    pen = ImageDraw.Draw(canvas)
    (x, y), r = rng.uniform(0.3, 0.7, 2) * side, rng.uniform(0.12, 0.32) * side
    squash = rng.uniform(0.75, 1.25)
    body, white, pupil = _any_colour(rng), _pick(rng, (COLOURS["white"], _any_colour(rng))), _any_colour(rng)
    spread, eye, up = rng.uniform(0.25, 0.5) * r, rng.uniform(0.12, 0.28) * r, rng.uniform(0.0, 0.4) * r
    if rng.random() < 0.6:
        height = rng.uniform(0.9, 1.7) * r
        for sign in (-1, 1):
            base = x + sign * 0.55 * r
            pen.polygon([(base - 0.3 * r, y), (base + 0.3 * r, y), (base + sign * 0.2 * r, y - height)], fill=body)
    pen.ellipse((x - r, y - r * squash, x + r, y + r * squash), fill=body)
    if rng.random() < 0.4:
        belly = _any_colour(rng)
        pen.ellipse((x - 0.5 * r, y + 0.1 * r, x + 0.5 * r, y + 0.9 * r * squash), fill=belly)
    for sign in (-1, 1):
        ex, ey = x + sign * spread, y - up
        pen.ellipse((ex - eye, ey - eye, ex + eye, ey + eye), fill=white)
        pen.ellipse((ex - eye * 0.5, ey - eye * 0.5, ex + eye * 0.5, ey + eye * 0.5), fill=pupil)
    mouth = (x - 0.3 * r, y + 0.1 * r, x + 0.3 * r, y + 0.5 * r)
    pen.arc(mouth, 20, 160, fill=pupil, width=max(2, int(0.07 * r)))
