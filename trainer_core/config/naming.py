"""The names that messages use: of settings, of nodes and tools, and of what people press."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import NamedTuple

from .base import Config
from .optimizer import named_option
from .rows import for_reader
from .run import RunConfig


def _within(config: type[Config]) -> Iterator[type[Config]]:
    """Yield a configuration and all that its fields hold."""
    yield config
    for hint in typing.get_type_hints(config).values():
        for each in typing.get_args(hint) or (hint,):
            if typing.get_origin(each) is None and isinstance(each, type) and issubclass(each, Config):
                yield from _within(each)


# By the last part of their name, which no two share.
SECTIONS = {each.SECTION.rpartition(".")[2]: each for each in _within(RunConfig) if each.SECTION}


class Other(NamedTuple):
    """A node, and those of its inputs that messages name and that are no settings of a run."""

    title: str
    shell: str  # what stands for the node in a shell
    inputs: dict[str, str]  # what stands for each in a shell


OTHERS: dict[str, Other] = {
    "average": Other(
        "Average Saves", "runs average", {"run": "RUN", "width": "--width", "over": "--seeds", "rank": "--rank"}
    ),
    "blocks": Other("LoRA Blocks", "lora blocks", {"rules": "--rules", "factor": "--rules"}),
    "convert": Other("Convert LoRA", "lora convert", {"program": "--for", "plain_rank": "--plain-rank"}),
    "existing_lora": Other("Existing LoRA", "lora.start", {"lora_name": "lora.start"}),
    "extract": Other(
        "Extract LoRA",
        "lora extract",
        {"rank": "--rank", "sv_ratio": "--value", "sv_cumulative": "--value", "sv_fro": "--value"},
    ),
    "merge": Other("Merge LoRAs", "lora merge", {"rank": "--rank", "density": "--density", "strength": "--strength"}),
    "resize": Other(
        "Resize LoRA",
        "lora resize",
        {
            "rank": "--rank",
            "sv_ratio": "--value",
            "sv_cumulative": "--value",
            "sv_fro": "--value",
            "recipe": "--recipe",
        },
    ),
    "run": Other("Train LoRA", "the run", {"name": "name"}),
}


def setting(name: str) -> str:
    """Name a setting for who reads: "lora.rank" is "rank of LoRA Config" in the page, "lora.rank" in a shell."""
    section, _, name = name.partition(".")
    if section in OTHERS:
        other = OTHERS[section]
        return for_reader(f"{name} of {other.title}", other.inputs[name])
    return named_option(name) if section == "options" else SECTIONS[section].named(name)


def node(name: str) -> str:
    """Name a node for who reads: "lora" is "LoRA Config" in the page, "lora" in a shell; "resize" is "lora resize"."""
    if name in OTHERS:
        return for_reader(OTHERS[name].title, OTHERS[name].shell)
    return for_reader(SECTIONS[name].NODE, SECTIONS[name].SECTION)


def run_again() -> str:
    """Say how to go on with a run, as the end of a sentence."""
    return for_reader("press Run again", "run the command again")


def put_beneath() -> str:
    """Say how to train on top of a LoRA that cannot be continued, as the end of a sentence."""
    return for_reader(
        f"set use of {OTHERS['existing_lora'].title} to beneath", "name the file in lora.beneath, not in lora.start"
    )
