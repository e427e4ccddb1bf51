"""Prompts of the samples, one per line with switches, as sd-scripts reads the files of `--sample_prompts`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import LONGEST_TEXT, Config
from .dataset import MOST_CONTROLS

MOST_PROMPTS = 1000
MOST_FRAMES = 1024  # of a clip
SIDES = (64, 8192)  # pixels
SIDE_STEP = 8  # pixels; sides are rounded down to its multiples
_SWITCH = re.compile(r"(?<!\S)--([^\W_]\S*)")  # a word of its own: "black--white" and " -- " are text
# sd-scripts' names of samplers, and ComfyUI's. dpmsolver and dpmsingle have no equal there.
SAMPLERS = {
    "k_euler": "euler",
    "euler_a": "euler_ancestral",
    "k_euler_a": "euler_ancestral",
    "k_lms": "lms",
    "k_heun": "heun",
    "pndm": "ipndm",
    "dpmsolver++": "dpmpp_2m",
    "k_dpm_2": "dpm_2",
    "dpm_2_a": "dpm_2_ancestral",
    "k_dpm_2_a": "dpm_2_ancestral",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine(Config):
    """A line: the prompt of a sample, and what it sets for itself. None: as the other settings of the samples say."""

    text: str  # the whole line, as it was written
    prompt: str
    negative: str | None = None
    width: int | None = None  # pixels, 64..8192, multiples of 8
    height: int | None = None
    steps: int | None = None  # 1..1000
    cfg: float | None = None  # 0.01..100
    seed: int | None = None
    guidance: float | None = None  # distilled guidance, 0..100
    sampler: str | None = None  # by ComfyUI's name
    frames: int | None = None  # of a clip, 1..1024
    controls: tuple[str, ...] | None = None  # control pictures, in the order in which the model sees them


def parse_prompts(text: str, setting: str) -> tuple[PromptLine, ...]:
    """Read a text of prompts line by line; empty lines, and lines that begin with #, are left out.

    setting: the text's name in messages. Raises ValueError for a wrong line, with its number and the switch.
    """
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    kept = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if len(kept) > MOST_PROMPTS:
        raise ValueError(f"There are {len(kept)} prompts in {setting}; set it to {MOST_PROMPTS} lines at most.")
    return tuple(parse_line(line, f"line {number} of {setting}") for number, line in kept)


def parse_line(line: str, where: str) -> PromptLine:
    """Read one prompt with its switches; where: names it in messages. Raises ValueError for a wrong one."""
    if len(line) > LONGEST_TEXT:
        raise ValueError(f"There are {len(line)} characters in {where}; shorten it to {LONGEST_TEXT} at most.")
    found = list(_SWITCH.finditer(line))
    ends = [*(switch.start() for switch in found), len(line)]  # of the prompt, and of each switch's value
    values: dict[str, Any] = {}
    for switch, end in zip(found, ends[1:], strict=True):
        name = switch[1]
        if name.lower() not in _SWITCHES:
            raise ValueError(f"--{_cut(name)} in {where} is none of {KNOWN}; remove it, or write one of these.")
        field, read = _SWITCHES[name.lower()]
        if field in values and field != "controls":
            raise ValueError(f"--{name} occurs twice in {where}; remove one of them.")
        value = line[switch.end() : end].strip()
        try:
            values[field] = (*values.get(field, ()), read(value)) if field == "controls" else read(value)
        except ValueError as error:
            raise ValueError(f"--{name} is {_cut(value)!r} in {where}; set it to {error}.") from None
    if len(values.get("controls", ())) > MOST_CONTROLS:
        raise ValueError(f"--ci occurs more than {MOST_CONTROLS} times in {where}; remove the others.")
    return PromptLine(text=line, prompt=line[: ends[0]].strip(), **values)


def _cut(text: str) -> str:
    shown = "".join(each if each.isprintable() else "?" for each in text[:40])
    return shown if len(text) <= 40 else f"{shown}..."


def _whole(low: int, high: int, step: int = 1) -> Callable[[str], int]:
    """Return a reader of whole numbers, rounded down to multiples of a step; its error says what it takes."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text) // step * step

    return read


def _number(low: float, high: float) -> Callable[[str], float]:
    """Return a reader of decimal numbers; its error says what it takes."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20}", text) or not low <= float(text) <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return float(text)

    return read


def _sampler(text: str) -> str:
    """Read the name of a sampler, ComfyUI's or sd-scripts'; which ones there are is known to the model."""
    if not re.fullmatch(r"[A-Za-z0-9_+]{1,40}", text):
        raise ValueError("the name of a sampler, for example euler")
    return SAMPLERS.get(text.lower(), text.lower())


def _file(text: str) -> str:
    """Read the name of a control picture."""
    if not text:
        raise ValueError("the name of a control picture")
    return text


# The field and the reader of each switch; --ci may occur several times.
_SWITCHES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n": ("negative", str),
    "w": ("width", _whole(*SIDES, SIDE_STEP)),
    "h": ("height", _whole(*SIDES, SIDE_STEP)),
    "d": ("seed", _whole(0, 2**64 - 1)),
    "s": ("steps", _whole(1, 1000)),
    "l": ("cfg", _number(0.01, 100)),
    "g": ("guidance", _number(0, 100)),
    "ss": ("sampler", _sampler),
    "f": ("frames", _whole(1, MOST_FRAMES)),
    "ci": ("controls", _file),
}
KNOWN = ", ".join(f"--{name}" for name in _SWITCHES)
