"""Read the settings of other trainers as they mean them: a module per program, which gives an `Imported`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...common.files import open_file
from ...common.json_files import parse_json
from ..toml_text import read_toml
from . import ai_toolkit, diffusion_pipe, easy, kohya_gui, onetrainer, sd_scripts, simpletuner
from .imported import Imported
from .texts import LARGEST, decode, read_yaml

__all__ = ["Imported", "read_foreign", "read_values"]
Readers = tuple[tuple[Callable[[Any], bool], Callable[[Any, Path], Imported]], ...]
# How to recognise a program's values, and its reader; the first that fits counts.
TABLES: Readers = (
    (easy.recognises, easy.read_easy),
    (diffusion_pipe.recognises, diffusion_pipe.read_diffusion_pipe),
    (diffusion_pipe.recognises_directories, diffusion_pipe.read_directories),
    (sd_scripts.recognises, lambda values, folder: sd_scripts.read_sd_scripts(sd_scripts.flat(values), folder)),
)
OBJECTS: Readers = (
    (ai_toolkit.recognises, ai_toolkit.read_ai_toolkit),
    (simpletuner.recognises, simpletuner.read_simpletuner),
    (simpletuner.recognises_backends, simpletuner.read_backends),
    (onetrainer.recognises, onetrainer.read_onetrainer),
    (onetrainer.recognises_concepts, onetrainer.read_concepts),
    (kohya_gui.recognises, kohya_gui.read_kohya_gui),
    (lambda values: isinstance(values, dict) and "datasets" in values, sd_scripts.read_sd_scripts),
)


def read_foreign(path: Path) -> Imported:
    """Read a file of another trainer; raises ValueError in words for one that no program here has written."""
    with open_file(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST // 2**20} MiB")
    told: list[str] = []
    text, kind = decode(content, told), path.suffix.lower()
    if not text.strip():
        raise ValueError("it is empty; choose the file with the settings")
    if kind == ".json":
        found = read_values(OBJECTS, parse_json(text), path.parent)
    elif kind == ".toml":
        found = read_values(TABLES, _with_datasets(read_toml(text), path), path.parent)
    elif kind in (".yaml", ".yml"):
        found = read_values(OBJECTS, read_yaml(text), path.parent)
    else:
        found = sd_scripts.read_file(text, kind, path.parent)
    found.open = told + found.open
    found.drop_without_effect()
    return found


def _with_datasets(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Name the list of datasets that `export` writes beside a TOML of sd-scripts, where that names no pictures."""
    listed = path.with_name(path.stem + sd_scripts.DATASETS)
    named = sd_scripts.flat(values).keys() & {"dataset_config", "train_data_dir", "datasets", "in_json"}
    ours = "pretrained_model_name_or_path" in values and not named and listed.is_file()
    return {**values, "dataset_config": listed.name} if ours else values


def read_values(readers: Readers, values: Any, folder: Path) -> Imported:
    """Read a file's values by the program that they are of; folder: in which relative paths start."""
    for recognises, read in readers:
        if recognises(values):
            return read(values, folder)
    raise ValueError("it is no file of a trainer that can be read here; docs/coming-from.md lists them")
