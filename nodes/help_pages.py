"""The help page of a node: its prose from js/docs, its tables from the node's schema, in the page's language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES, LOCALES = ROOT / "js" / "docs", ROOT / "locales"
LANGUAGES = frozenset(folder.name for folder in LOCALES.iterdir() if folder.is_dir())
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
KINDS = {DYNAMIC_COMBO: "choice", "COMBO": "choice", "BOOLEAN": "yes / no", "STRING": "text"}
KINDS |= {"INT": "whole number", "FLOAT": "number"}

Texts = Mapping[str, Any]  # of a node, in the form of ComfyUI's nodeDefs.json


def help_page(schema: Mapping[str, Any], language: str) -> str:
    """Write the help page of a node as Markdown; prose that is not translated stays English.

    schema: as /object_info gives it. language: one of LANGUAGES.
    """
    node = schema["name"]
    pages = (page for page in (PAGES / node / f"{language}.md", PAGES / f"{node}.md") if page.is_file())
    page = next(pages, None)
    prose = page.read_text(encoding="utf-8") if page else f"# {schema['display_name']}\n\n{schema['description']}"
    words = {} if language == "en" else _read(language, "main")["atelier"]["help"]
    texts = {} if language == "en" else _read(language, "nodeDefs")[node]
    outputs = [
        [f"`{name}`", _kind(kind), _unescaped(texts["outputs"][str(i)]["tooltip"]) if texts else tip]
        for i, (name, kind, tip) in enumerate(
            zip(schema["output_name"], schema["output"], schema["output_tooltips"], strict=True)
        )
    ]
    tables = (
        ("Inputs", ["Input", "Kind", "Default", "Meaning"], _rows(schema["input"], texts.get("inputs", {}))),
        ("Outputs", ["Output", "Kind", "Meaning"], outputs),
    )
    return "\n\n".join([prose.rstrip("\n"), *(_table(*table, words) for table in tables if table[2])]) + "\n"


@cache
def _read(language: str, name: str) -> Any:
    return json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8"))


def _rows(given: Mapping[str, Any], texts: Texts, before: str = "") -> list[list[str]]:
    """List the cells of each input; fields that several options of a choice share stand once."""
    found = []
    for name, (kind, details) in {**given.get("required", {}), **given.get("optional", {})}.items():
        title, meaning = f"`{name}`", details["tooltip"]
        if text := texts.get(before + name):  # a translated tooltip begins with the input's English name
            title, meaning = f"{title} {text['name']}", _unescaped(text["tooltip"].partition(": ")[2])
        found.append([title, _kind(kind), _default(kind, details), meaning])
        shared: dict[tuple[str, ...], list[str]] = {}  # the options with a field
        for option in details["options"] if kind == DYNAMIC_COMBO else ():
            for cells in _rows(option["inputs"], texts, f"{name}_"):
                shared.setdefault(tuple(cells), []).append(option["key"])
        found += [[f"{', '.join(keys)}: {name}", *rest] for (name, *rest), keys in shared.items()]
    return found


def _default(kind: str, details: Mapping[str, Any]) -> str:
    default = details.get("default", "")
    if kind in ("COMBO", DYNAMIC_COMBO):
        words = [each["key"] if isinstance(each, dict) else each for each in details.get("options", ())]
        return str(default if "default" in details or not words else words[0])
    if kind == "BOOLEAN":
        return "on" if default else "off"
    if kind == "FLOAT":
        return f"{default:.10g}"
    return str(default) if kind != "STRING" else default or "empty"


def _kind(kind: str) -> str:
    """Name a type for people."""
    return KINDS.get(kind, kind.removeprefix("ATELIER_"))


def _table(title: str, head: list[str], rows: list[list[str]], words: Mapping[str, str]) -> str:
    rows = [[row[0], *(words.get(cell, cell) for cell in row[1:-1]), row[-1]] for row in rows]
    cells = [[words.get(cell, cell) for cell in head], ["---"] * len(head), *rows]
    lines = [" | ".join(each.replace("|", "\\|").replace("\n", " ") for each in row) for row in cells]
    return "\n".join([f"## {words.get(title, title)}", "", *(f"| {line} |" for line in lines)])


def _unescaped(text: str) -> str:
    """Read a text as vue-i18n shows it, which has braces, @ and | as its own."""
    return re.sub(r"\{'([{}@|])'\}", r"\1", text)
