"""Texts in other languages: complete, in the form that the editor reads, and none that nobody shows."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from help_pages import escaped, explained, texts, tooltips, unescaped
from lora_atelier.dev import ROOT

SCHEMAS = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
LANGUAGES = ["zh", "ja"]
LETTERS = {"zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u30ff\u4e00-\u9fff]"}
ENGLISH = {node: texts(schema) for node, schema in SCHEMAS.items()}
PLACES = re.compile(r"\{\w*\}")


def read(language: str, name: str = "nodeDefs") -> dict[str, Any]:
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text(encoding="utf-8"))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Return every text of a nested dict by its keys."""
    if isinstance(tree, str):
        return {path: tree}
    return {key: text for name, each in tree.items() for key, text in leaves(each, (*path, name)).items()}


def varying() -> set[tuple[str, ...]]:
    """List the tooltips that differ between the options of a combo: other languages have one for all of them."""
    return {
        (node, "inputs", name.replace(".", "_"), "tooltip")
        for node, schema in SCHEMAS.items()
        for name, tips in tooltips(schema).items()
        if len(tips) > 1
    }


def test_the_english_texts_are_those_of_the_nodes() -> None:
    """ATELIER_WRITE_SNAPSHOT=1 writes them anew, after the snapshot of the schema."""
    if os.environ.get("ATELIER_WRITE_SNAPSHOT"):
        path = ROOT / "locales" / "en" / "nodeDefs.json"
        path.write_text(json.dumps(ENGLISH, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    assert read("en") == ENGLISH


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_of_a_node_is_translated(language: str) -> None:
    found, wanted = leaves(read(language)), leaves(ENGLISH)
    assert sorted((wanted.keys() | varying()) ^ found.keys()) == []
    for key, text in found.items():
        assert text.strip() == text and escaped(unescaped(text)) == text, key
        if key[-1] in ("tooltip", "description", "display_name"):
            assert re.search(LETTERS[language], text), f"{key} is not translated"
        if key[-1] == "tooltip" and key[1] == "inputs":  # messages name inputs in English
            assert text.startswith(f"{ENGLISH[key[0]]['inputs'][key[2]]['name']}: "), key
