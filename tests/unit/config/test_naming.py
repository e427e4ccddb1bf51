"""Messages name settings and nodes by one table, for the page and for a shell."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_atelier.dev import ROOT
from lora_atelier.trainer_core.config.base import Config
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.config.naming import OTHERS, SECTIONS, node, put_beneath, run_again, setting
from lora_atelier.trainer_core.config.optimizer_table import OPTIMIZERS
from lora_atelier.trainer_core.config.rows import read_in_a_shell, rows_of

CORE = ROOT / "trainer_core"
PLAIN = {"Augmentation", "Buckets", "Captions", "Embedding", "Memory", "Optimizer", "Pictures", "Sample", "Scheduler"}
PLAIN |= {"Sweep", "Validation"}


def titles() -> set[str]:
    """List the titles of all nodes."""
    schemas = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
    found = {schema["display_name"].removesuffix(" (Atelier)") for schema in schemas.values()}
    assert {form.title for form in FORMS.values()} <= found
    return found


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """List a module's texts that are no docstring, with their lines; values of an f-string count as {}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(part) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in each.values}
    docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            yield each.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in inner | docs:
            yield each.lineno, each.value


def test_no_line_of_the_core_names_a_node_by_hand() -> None:
    """Titles of one plain word count where they name a node: alone, or after a preposition."""
    assert len(titles()) > 30
    several = "|".join(map(re.escape, sorted(titles() - PLAIN, key=len, reverse=True)))
    plain = "|".join(sorted(PLAIN))
    names = re.compile(rf"\b({several})\b|\b(of|in|into|to|from|by|with|node|and|or) ({plain})\b|^({plain})$")
    found = [
        f"{path.relative_to(CORE)}:{line}: {text}"
        for path in CORE.rglob("*.py")
        if path.relative_to(CORE).parts[0] != "config"
        for line, text in literals(path)
        if names.search(text)
    ]
    assert found == []


def calls(*names: str) -> list[set[str]]:
    """List the literals that the core gives to each of these functions."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in CORE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in found
            if named and call.args and isinstance(call.args[0], ast.Constant):
                found[call.func.id].add(call.args[0].value)
    return list(found.values())


def test_each_setting_that_a_message_names_exists() -> None:
    known = {f"{section}.{name}" for section, config in SECTIONS.items() for name in rows_of(config)}
    known |= {f"{place}.{name}" for place, other in OTHERS.items() for name in other.inputs}
    known |= {f"options.{each.name}" for kind in OPTIMIZERS.values() for each in kind.settings}
    settings, nodes = calls("setting", "node")
    assert len(settings) > 60 and settings <= known
    assert nodes <= SECTIONS.keys() | OTHERS.keys()
    assert not SECTIONS.keys() & OTHERS.keys()
    assert {other.title for other in OTHERS.values()} <= titles()


def test_each_section_is_found_by_a_name_of_its_own() -> None:
    sections = {config.SECTION for config in Config.__subclasses__()}
    assert sections - {""} == {config.SECTION for config in SECTIONS.values()}


@pytest.mark.parametrize(
    ("name", "page", "shell"),
    [
        (lambda: setting("optimizer.learning_rate"), "learning_rate of Optimizer", "optimizer.learning_rate"),
        (lambda: setting("captions.file"), "caption_file of Concept Dataset", "dataset.concepts.captions.file"),
        (lambda: setting("train.validate_every"), "validate_every of Validation", "train.validate_every"),
        (lambda: setting("options.eps"), "eps of Optimizer", "optimizer.options.eps"),
        (lambda: setting("resize.rank"), "rank of Resize LoRA", "--rank"),
        (lambda: setting("run.name"), "name of Train LoRA", "name"),
        (lambda: node("lora"), "LoRA Config", "lora"),
        (lambda: node("convert"), "Convert LoRA", "lora convert"),
        (run_again, "press Run again", "run the command again"),
        (put_beneath, "set use of Existing LoRA to beneath", "name the file in lora.beneath, not in lora.start"),
    ],
)
def test_a_shell_reads_other_names_than_the_page(name, page, shell) -> None:
    assert name() == page
    with read_in_a_shell():
        assert name() == shell
    assert name() == page
