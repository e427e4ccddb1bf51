"""Write the command that trains the run of a workflow in a shell, as the page would train it."""

from __future__ import annotations

import hashlib
import json
import ntpath
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch.distributed as dist

import nodes as comfyui_nodes

from ...trainer_core.common.command_line import comfyui_around
from ...trainer_core.common.devices import kind_of, module_of
from ...trainer_core.common.files import written_whole
from ...trainer_core.common.json_files import LARGEST
from ...trainer_core.config import BaseModelConfig, ConnectedConfig, RunConfig
from ...trainer_core.config.forms import FORMS
from ...trainer_core.models import Chosen
from ...trainer_core.workflow.canvas import prompt_of
from ...trainer_core.workflow.places import TOKENIZER, Folders, is_tokenizer
from ...trainer_core.workflow.read import read_workflow, trains_of
from . import folders

PACK = Path(__file__).absolute().parents[2]
DRAWN = ("pos", "size", "order", "flags")  # parts of a node by which it only looks different
MOST_FILES = 100  # that are kept, the newest
OWN = ("nodes", "comfy_extras.")  # modules of the nodes that run without a page
WINDOWS_RUNS = frozenset('"%!`$\u201c\u201d\u201e')  # what its two shells read as their own, also between quotes
PLAIN = re.compile(r"[\w.:/\\+-]+")  # what both of them take as it stands
LINKED = Chosen(BaseModelConfig(path="", connected=ConnectedConfig()))  # for models that are not loaded here


def command_of(document: Mapping[str, Any], node: str) -> str:
    """Save a workflow, and write the line that trains the run of its Train LoRA of an id; raises ValueError, OSError.

    Each file that the shell would look for elsewhere than the server is named in the line.
    """
    comfyui, output = Path(folder_paths.base_path), Path(folder_paths.get_output_directory())
    tokenizer = None if is_tokenizer(comfyui / TOKENIZER) else folders.tokenizer_path()
    name, here, _ = read_workflow(document, folders, node, _check_linked)
    there = read_workflow(document, Folders(comfyui, tokenizer), node, _check_linked).config
    options: dict[str, object] = {}
    if comfyui_around() != comfyui:
        options["--comfyui"] = comfyui
    if tokenizer and here.base_model.connected is None:
        options["--tokenizer"] = tokenizer
    if output.resolve() != (comfyui / "output").resolve():
        options["--output"] = output
    if len(trains_of(document)) > 1:
        options["--node"] = node
    if comfy.model_management.get_torch_device().type == "cpu":
        options["--device"] = "cpu"
    changes = [part for change in _differing(here, there) for part in ("--set", change)]
    named = [part for option in options.items() for part in option]
    return line(list(map(str, [*_program(), PACK, "train", _saved(document, name), *named, *changes])))


def line(parts: Sequence[str]) -> str:
    """Join the parts of a command as the system's shells read them; raises ValueError for what they would run.

    On Windows that is cmd and PowerShell alike. PowerShell starts no program whose name stands in quotes, so that one
    in a folder with a space is started from there, by a line of its own.
    """
    if os.name != "nt":
        return shlex.join(parts)
    for part in parts:
        if not part.isprintable() or set(part) & WINDOWS_RUNS:
            raise ValueError(f'a shell of Windows would not take {part!r:.80} as it is; rename it without any of "%!`$')
    program, *rest = parts
    folder, name = ntpath.split(program)
    there = _quoted(program) != program
    start = [f"pushd {_quoted(folder)}\n.\\{name}" if there else program]
    return " ".join([*start, *map(_quoted, rest)])


def _quoted(part: str) -> str:
    """Put a part that one of Windows' shells would take apart between quotes; what reads it there ends at none."""
    if PLAIN.fullmatch(part):
        return part
    return f'"{part}"' if not part.endswith("\\") else f'"{part}\\"'


def _program() -> list[str]:
    """Choose this ComfyUI's Python, or torchrun with as many processes as torch sees GPUs.

    Where torch cannot send between GPUs (on Windows), one process trains on one.
    """
    device = comfy.model_management.get_torch_device()
    kind = kind_of(device)
    gpus = module_of(device).device_count() if kind.sends and dist.is_backend_available(kind.sends) else 1
    if gpus < 2:
        isolated = ["-s"] if sys.flags.no_user_site else []  # ComfyUI's portable build starts so
        return [sys.executable, *isolated]
    script = shutil.which("torchrun", path=sysconfig.get_path("scripts"))
    start = [script] if script else [sys.executable, "-m", "torch.distributed.run"]
    return [*start, "--nproc-per-node", str(gpus)]


def _saved(document: Mapping[str, Any], name: str) -> Path:
    """Save a workflow under a name that its content decides, so that a command always trains the same."""
    text = json.dumps(document)
    if len(text) > LARGEST:
        raise ValueError(f"the workflow is larger than {LARGEST // 2**20} MiB; remove pictures that it holds")
    folder = Path(folder_paths.get_system_user_directory("atelier")) / "commands"
    nodes = [{part: value for part, value in node.items() if part not in DRAWN} for node in document["nodes"]]
    nodes.sort(key=lambda node: str(node["id"]))  # a click moves a node to the end
    content = json.dumps({**document, "nodes": nodes, "extra": None})
    path = folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
        with suppress(PermissionError):  # open elsewhere on Windows: the next command tries again
            old.unlink(missing_ok=True)
    return path


def _check_linked(document: Any, key: str) -> Chosen:
    """Stand in for linked models; raises ValueError where a shell could not load them."""
    if not (Path(folder_paths.base_path) / "comfy" / "sd.py").is_file():
        raise ValueError(
            "it trains a linked model, which a shell loads only where ComfyUI and its models share a folder; this "
            "ComfyUI was started with --base-directory"
        )
    prompt = prompt_of(document, FORMS)
    found, left = set[str](), [key]
    while left:
        if (each := left.pop()) not in found and each in prompt:
            found.add(each)
            inputs = prompt[each]["inputs"].values()
            left += [str(value[0]) for value in inputs if isinstance(value, list) and len(value) == 2]
    for kind in sorted({prompt[each]["class_type"] for each in found - {key}}):
        module = getattr(comfyui_nodes.NODE_CLASS_MAPPINGS.get(kind), "RELATIVE_PYTHON_MODULE", "nodes")
        if not module.startswith(OWN):
            raise ValueError(
                f"without a page only ComfyUI's own nodes run, and {kind} is of another pack, or of a newer ComfyUI; "
                "load the model by those"
            )
    return LINKED


def _differing(here: RunConfig, there: RunConfig) -> Iterator[str]:
    """List the settings by which the page's run differs from the shell's, as --set takes them."""
    own, others = dict(_leaves(here.to_dict(), "")), dict(_leaves(there.to_dict(), ""))
    for name, value in own.items():
        other = others.get(name)
        if isinstance(value, str) and isinstance(other, str):
            differ = os.path.realpath(value) != os.path.realpath(other)
        else:
            differ = value != other
        if differ:
            yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value, 1) if isinstance(value, list) else ()
    if not inner:
        yield name[1:], value
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}")
