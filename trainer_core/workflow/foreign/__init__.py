"""Read the settings of other trainers as they mean them: a module per program, which gives an `Imported`."""

from __future__ import annotations

from pathlib import Path

from ...common.json_files import parse_json
from ..toml_text import read_toml
from .imported import Imported
from .onetrainer import read_onetrainer
from .sd_scripts import flat, read_arguments, read_sd_scripts

__all__ = ["Imported", "read_foreign"]
LARGEST = 2**20  # bytes of a file


def read_foreign(path: Path) -> Imported:
    """Read a file of another trainer; raises ValueError for one that cannot be read, or names no base model."""
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST // 2**20} MiB")
    text, kind = content.decode("utf-8", "replace"), path.suffix.lower()
    if kind == ".json":
        values = parse_json(text)
        if not isinstance(values, dict) or not {"base_model_name", "training_method"} & values.keys():
            raise ValueError("it is no configuration of OneTrainer: it names neither base_model_name nor a method")
        found = read_onetrainer(values, path.parent)
    else:
        found = read_sd_scripts(flat(read_toml(text)) if kind == ".toml" else read_arguments(text), path.parent)
    if "path" not in found.values.get("base_model", {}):
        raise ValueError("it names no base model, so it is no file of sd-scripts or OneTrainer")
    found.drop_without_effect()
    return found
