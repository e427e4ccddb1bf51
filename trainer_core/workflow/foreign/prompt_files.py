"""Files of sample prompts as sd-scripts reads them: a prompt a line, or TOML and JSON with a table for each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...common.json_files import parse_json
from ..toml_text import read_toml
from .imported import table, tables

MOST = 1000  # prompts
# Names in a table, and their switches in a line.
SWITCHES = {
    "negative_prompt": "n",
    "width": "w",
    "height": "h",
    "sample_steps": "s",
    "scale": "l",
    "guidance_scale": "g",
    "seed": "d",
    "sample_sampler": "ss",
    "frame_count": "f",
}


def read_prompts(name: str, text: str) -> list[str]:
    """Read the prompts of a file as lines with switches; raises ValueError for TOML or JSON that cannot be read."""
    ending = name.rpartition(".")[2].lower()
    if ending == "toml":
        return [_line(each) for each in _of_toml(read_toml(text))][:MOST]
    if ending == "json":
        return [_line(each) for each in tables(parse_json(text))][:MOST]
    lines = (line.strip() for line in text.splitlines()[:MOST])
    return [line for line in lines if line and not line.startswith("#")]


def _of_toml(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List the tables [[prompt.subset]]; what stands in [prompt] itself counts for each of them."""
    shared = table(given.get("prompt"))
    for each in tables(shared.get("subset")):
        yield {**shared, **each}


def _line(given: Mapping[str, Any]) -> str:
    """Write a table as a line; a text of several lines becomes one, as a line break would begin another prompt."""
    words = [str(given.get("prompt") or "")]
    words += [f"--{switch} {given[name]}" for name, switch in SWITCHES.items() if given.get(name) not in (None, "")]
    return " ".join(" ".join(words).split())
