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
def each_estimate_once() -> Iterator[None]:
    """Count the bytes of the same step once in a file: a dry run of the same settings has the same outcome."""
    import dataclasses
    from unittest import mock

    import prepared

    from lora_atelier.trainer_core.config import MemoryConfig
    from lora_atelier.trainer_core.objective import terms_of
    from lora_atelier.trainer_core.preflight import memory as preflight

    plain, known = preflight.estimate_run, {}

    def once(config: Any, outline: Any, memory: Any, shape: Any, *of: Any) -> Any:
        asked = shape if terms_of(config) else dataclasses.replace(shape, caption="")  # which terms alone look at
        key = config.replace(memory=MemoryConfig()).digest(), repr((memory, asked, *of))
        if key not in known:
            known[key] = plain(config, outline, memory, shape, *of)
        return known[key]

    with mock.patch.object(preflight, "estimate_run", once), mock.patch.object(prepared, "estimate_run", once):
        yield


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share encodings and what is known of files between the runs of a file, where these name no folder for them."""
    import prepared

    prepared.SHARED.append(tmp_path_factory.mktemp("cache"))
    yield
    prepared.SHARED.clear()


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
