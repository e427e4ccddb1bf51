"""Read the TOML of LoRA_Easy_Training_Scripts: the arguments of sd-scripts, in nested sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .imported import Imported, table, tables
from .sd_scripts import read_sd_scripts

PROGRAM = "LoRA_Easy_Training_Scripts"
SECTION = "_args"
TABLES = ("network_args", "optimizer_args", "lr_scheduler_args")  # of name = value inside the sections


def recognises(values: Mapping[str, Any]) -> bool:
    """Tell whether a TOML has the sections of the program."""
    return any(name.endswith(SECTION) and isinstance(value, Mapping) for name, value in values.items())


def read_easy(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a configuration; folder: in which relative paths start."""
    given: dict[str, Any] = {}
    dataset: dict[str, Any] = {}
    for name, section in values.items():
        if name.endswith(SECTION) and isinstance(section, Mapping):
            given |= table(section.get("args"))
            dataset |= table(section.get("dataset_args"))
    subsets = values.get("subsets")
    if subsets and "dataset_config" not in given:
        own = [{name: value for name, value in each.items() if name != "name"} for each in tables(subsets)]
        given["datasets"] = [{**dataset, "subsets": own}]
    else:
        given |= dataset
    given |= {name: given.get(name) or {} for name in TABLES if name in given}
    if share := given.pop("warmup_ratio", None):  # of a cycle, where there are several
        given["lr_warmup_steps"] = share
    module = "lycoris.kohya" if "algo" in table(given.get("network_args")) else "networks.lora"
    given.setdefault("network_module", module)
    script = "sdxl" if given.get("sdxl") else "flux" if "guidance_scale" in given else ""
    return read_sd_scripts(given, folder, script=script, program=PROGRAM)
