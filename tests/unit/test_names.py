"""A class or a type alias has a name of its own, so that a name means one thing wherever it is read."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = {  # the same alias in rooms of one floor, which do not import each other
    "Unit": {"trainer_core/memory/gradient_checkpointing.py", "trainer_core/models/base.py"},
}


def is_type(node: ast.expr | None) -> bool:
    """Tell whether a value that is assigned to a name in CamelCase is a type; type variables name none."""
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return not (call and node.func.id == "TypeVar")


def types_of(code: str) -> set[str]:
    """Return the public classes and type aliases at the top of a module: names in CamelCase."""
    found = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and is_type(node.value):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if name[0].isupper() and not name.isupper()}


def test_no_two_modules_define_a_type_of_the_same_name() -> None:
    files = defaultdict(set)
    for folder in ("trainer_core", "nodes"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in types_of(path.read_text(encoding="utf-8")):
                files[name].add(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in files.items() if len(found) > 1} == SHARED


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class Plan: ...", {"Plan"}),
        ("Size = tuple[int, int]", {"Size"}),
        ("Size: TypeAlias = tuple[int, int]", {"Size"}),
        ("Item = TypeVar('Item')\nLIMIT = 2\n_Own = dict\nfirst = 1\nclass _Slot: ...", set()),
    ],
)
def test_what_counts_as_a_type(code: str, found: set[str]) -> None:
    assert types_of(code) == found


FOLDERS = [  # what each folder's docstring says
    path.relative_to(ROOT).as_posix()
    for room in ("trainer_core", "nodes")
    for path in (ROOT / room).rglob("__init__.py")
]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", *FOLDERS])
def test_every_module_that_the_docs_name_is_there(page: str) -> None:
    known = {
        path.name for folder in ("trainer_core", "nodes", "tests", "bench", "assets", ".") for path in modules(folder)
    }
    text = (ROOT / page).read_text(encoding="utf-8")
    assert sorted({name for name in re.findall(r"[\w-]+\.py\b", text)} - known) == []


def modules(folder: str) -> Iterator[Path]:
    """List the modules of a folder; of the project's own folder only those right in it."""
    return (ROOT / folder).glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
