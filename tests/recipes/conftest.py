"""Fixtures of the recipes: their material, and one run of each that is asked for.

They import what they compute with: what hands out the tests needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from encoded_once import encoded_once  # noqa: F401 (a fixture)
from windows_rules import rules

if TYPE_CHECKING:
    from recipes.recipes import Material

# Recipes that write and read what others do not, which treat files as Windows does; with --windows-rules all do.
AS_ON_WINDOWS = ("resumed", "best by validation", "average", "embedding", "continued", "weights in 8 bits")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory, comfyui: Path) -> Material:
    """Give the models and pictures of all recipes."""
    from recipes.recipes import Material

    return Material(tmp_path_factory.mktemp("recipes") / "material", comfyui / "comfy" / "sd1_tokenizer")


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory, material: Material) -> Callable[[str], Any]:
    """Give `run_of(name)` -> the result of a recipe, which is carried out when it is first asked for."""
    from prepared import Ready
    from recipes.recipes import carry_out

    folder, results = tmp_path_factory.mktemp("recipes"), {}

    def find(name: str) -> Any:
        if name not in results:
            with rules() if name in AS_ON_WINDOWS else nullcontext():
                results[name] = carry_out(name, material, folder / f"run{len(results)}", Ready)
        return results[name]

    return find


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder for encodings that the tests of a file share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def no_estimates() -> Iterator[None]:
    """Leave out the estimates before each run, which test_preflight.py looks at."""
    from prepared import without_estimates

    with without_estimates():
        yield
