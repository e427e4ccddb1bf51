"""Texts in other languages: complete, in the form that the editor reads, and none that nobody shows."""

import ast
import json
import os
import re
from functools import cache
from typing import Any

import pytest
from node_texts import escaped, texts, tooltips, unescaped

from lora_atelier.dev import ROOT

SCHEMAS = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
DOCS = ROOT / "js" / "docs"  # prose alone; the server adds the tables
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
            called = ENGLISH[key[0]]["inputs"][key[2]]["name"].removesuffix(" (2nd pass)")
            assert text.startswith(f"{called}: "), key


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", sorted(page.stem for page in DOCS.glob("*.md")))
def test_the_help_page_is_translated(node: str, language: str) -> None:
    english = (DOCS / f"{node}.md").read_text(encoding="utf-8")
    page = (DOCS / node / f"{language}.md").read_text(encoding="utf-8")
    title = read(language)[node]["display_name"].removesuffix(" (Atelier)")
    assert page.startswith(f"# {title}\n"), "its title is not that of the node"
    assert page.count("\n#") == english.count("\n#"), "a section is missing"
    assert set(re.findall(r"`[^`]+`", english)) <= set(re.findall(r"`[^`]+`", page)), "something is not named"


def entries(page: str) -> list[str]:
    """List what the entries of a help page begin with: the first name in each that is set or bold."""
    found = (re.search(r"`([^`]+)`|\*\*([^*]+)\*\*", line) for line in page.splitlines() if line.startswith("- "))
    return [match[1] or match[2] for match in found if match]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", sorted(page.stem for page in DOCS.glob("*.md")))
def test_the_entries_of_a_help_page_have_the_order_of_the_english_ones(node: str, language: str) -> None:
    english = entries((DOCS / f"{node}.md").read_text(encoding="utf-8"))
    page = entries((DOCS / node / f"{language}.md").read_text(encoding="utf-8"))
    once = [name for name in english if english.count(name) == page.count(name) == 1]
    assert [name for name in page if name in once] == once


@cache
def literals() -> set[str]:
    """List the texts that the page's modules ask for."""
    found = set()
    for path in (ROOT / "js").glob("*.js"):
        for call in re.findall(r'\bt\(\s*("(?:[^"\\]|\\.)*"(?:\s*\+\s*"(?:[^"\\]|\\.)*")*)', path.read_text("utf-8")):
            found.add("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call)))
    return found


@cache
def said() -> set[str]:
    """List the templates of the sentences that the server says."""
    found, paths = set(), [*(ROOT / "nodes").rglob("*.py"), *(ROOT / "trainer_core").rglob("*.py")]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say":
            found.add(ast.literal_eval(node.args[0]))
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_of_the_page_is_translated(language: str) -> None:
    known = read(language, "main")["atelier"]
    assert sorted(literals() ^ known["page"].keys()) == []
    assert sorted(said() ^ known["server"].keys()) == []
    for kind in ("page", "server"):
        for text, translation in known[kind].items():
            assert sorted(PLACES.findall(text)) == sorted(PLACES.findall(translation)), text
            assert re.search(LETTERS[language], translation) or text == translation == "Zip", text


def test_every_language_has_the_same_texts_of_settings_and_templates() -> None:
    (first, *others) = (leaves({name: read(language, name) for name in ("main", "settings")}) for language in LANGUAGES)
    assert all(first.keys() == other.keys() for other in others)
    assert leaves({"main": read("en", "main")}).keys() <= first.keys()
    source = (ROOT / "js" / "atelier.js").read_text(encoding="utf-8")
    shown = {name.replace(".", "_") for name in re.findall(r'\bid: "(Atelier\.\w+)"', source)}
    assert read("zh", "settings").keys() == shown
