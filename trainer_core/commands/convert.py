"""export FROM TO: a TOML of a workflow or a run, and the other way; import FILE: both of another trainer's file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.command_line import PROGRAM, run_command
from ..common.files import file_digest, written_whole
from ..common.wording import printable
from ..config import MODEL_FILES, BaseModelConfig, ConnectedConfig
from ..config.forms import FORMS
from ..models import Chosen
from ..workflow.canvas import prompt_of
from ..workflow.foreign.exporting import PROGRAMS, write_for
from ..workflow.importing import bring
from ..workflow.run_file import RunFile, read_open, write_run
from ..workflow.write import workflow_of
from .train import add_source, read_source


def main(arguments: Sequence[str]) -> int:
    """Write the other form; return the exit status: 2 for an error."""
    text = "Write a TOML of a workflow or a run, or a workflow for the canvas of a TOML or a run."
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} export", description=text)
    add_source(parser, "FROM", "a saved workflow, a TOML, a run's folder or its run.json")
    parser.add_argument("to", metavar="TO", type=Path, help="the new file: .toml, or .json for a workflow")
    parser.add_argument("--for", dest="program", choices=PROGRAMS, help="write a file of another trainer instead")
    return run_command(export, parser.parse_args(arguments))


def export(options: argparse.Namespace) -> int:
    """Read the one file and write the other; an existing file is not replaced."""
    if options.program:
        return export_for(options)
    kind = options.to.suffix.lower()
    if kind not in (".toml", ".json") or options.to.exists():
        raise ValueError(f"{options.to} exists already, or ends in neither .toml nor .json; choose another name.")
    run = with_digests(read_source(options, linked))
    same = None if run.changed else run.workflow
    text = write_run(run) if kind == ".toml" else json.dumps(same or workflow_of(run), indent=1)
    with written_whole(options.to) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"Saved as {options.to}.", file=sys.stdout)
    return 0


def linked(document: Any, key: str) -> Chosen:
    """Read the settings of Use Connected Model, whose models are not loaded here; key: the node's id in the prompt."""
    inputs = prompt_of(document, FORMS)[key]["inputs"]
    given = {name: value for name, value in inputs.items() if not isinstance(value, list)}  # these are links
    own = {each.name: given[each.name] for each in dataclasses.fields(ConnectedConfig) if each.name in given}
    base = BaseModelConfig(path="", connected=ConnectedConfig.from_dict(own))
    return Chosen(base.replace(prompt_weights=given.get("prompt_weights", base.prompt_weights)))


def export_for(options: argparse.Namespace) -> int:
    """Write a file of another trainer, and list what it cannot say; existing files are not replaced."""
    ending = PROGRAMS[options.program][0]
    if options.to.suffix.lower() != ending:
        raise ValueError(f"{options.to} is to be a file of {options.program}; let its name end in {ending}.")
    run = read_source(options, linked)
    found = write_for(options.program, run.name, run.config, read_open({"base_model": {"path": ""}}), options.to.stem)
    files = {options.to.with_name(options.to.stem + (more or ending)): text for more, text in found.files.items()}
    if taken := next((file for file in files if file.exists()), None):
        raise ValueError(f"{taken} exists already; choose another name.")
    for file, text in files.items():
        with written_whole(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    print(f"Saved as {' and '.join(str(file) for file in files)}.")
    if found.left:
        print(f"{options.program} cannot say:")
    for line in found.left:
        print(f"  {printable(line)}")
    return 0


def with_digests(run: RunFile) -> RunFile:
    """Add the sha256 of the model files that are here, so that another machine can tell which ones are wanted."""
    base = run.config.base_model
    named = {role: Path(getattr(base, role)) for role in MODEL_FILES if getattr(base, role)}
    found = {role: file_digest(path) for role, path in named.items() if path.is_file() and role not in run.models}
    return dataclasses.replace(run, models={**run.models, **found})


def main_import(arguments: Sequence[str]) -> int:
    """Write a TOML and a workflow of another trainer's settings; return the exit status: 2 for an error."""
    text = (
        "Read settings of another trainer: writes NAME.toml and the workflow NAME.json, and a report of each setting."
    )
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} import", description=text)
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="of sd-scripts, kohya_ss, musubi-tuner, OneTrainer, ai-toolkit, diffusion-pipe or SimpleTuner",
    )
    parser.add_argument("--to", type=Path, metavar="NAME", help="without an ending; by default that of FILE, here")
    return run_command(import_file, parser.parse_args(arguments))


def import_file(options: argparse.Namespace) -> int:
    """Read another trainer's file, write both of ours, and list what has no counterpart."""
    name = options.to or Path(f"{options.file.stem}-atelier")
    files = [name.with_name(f"{name.name}{ending}") for ending in (".toml", ".json")]
    if taken := next((file for file in files if file.exists()), None):
        raise ValueError(f"{taken} exists already; choose another name by --to.")
    try:
        brought = bring(options.file)
    except ValueError as error:
        raise ValueError(f"{options.file.name} cannot be imported: {error}") from error
    texts = [brought.text, json.dumps(brought.workflow, indent=1)]
    written = [(file, text) for file, text in zip(files, texts, strict=True) if text]
    for file, text in written:
        with written_whole(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    print(f"Saved as {' and '.join(str(file) for file, _ in written)}.")
    print(brought.report.replace("**", ""))
    return 0
