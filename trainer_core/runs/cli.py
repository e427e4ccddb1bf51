"""The command line for runs: list, show, verify, export, average, publish and clean."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..common.command_line import PROGRAM, comfyui_around, run_command
from ..common.wording import bytes_of, count
from ..outward import Outward, read_outward, usual_file
from .card import publish_at_hub
from .catalogue import describe, list_runs, published_files, run_paths
from .choose import finished_checkpoint
from .clean import Clearable, clear, clearable, delete_run, old_leftovers
from .export import export_save, lora_of_each_save, loras_of_seeds, save_to_export
from .folder import SAMPLES, RunFolder, find_runs, is_elsewhere, open_run

USUAL = "output/atelier/runs"  # in ComfyUI's folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 1 for damaged runs, 2 for an error, which is printed."""
    return run_command(run_in_folder, build_parser().parse_args(arguments))


def run_in_folder(options: argparse.Namespace) -> int:
    """Run a command in the folder of runs; raises ValueError where there is none."""
    options.folder = options.folder or usual_folder()
    if not options.folder.is_dir():
        raise ValueError(f"There is no folder {options.folder}; train a run first, or name another folder by --folder.")
    return options.command(options)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} runs", description="List, check, export and delete runs.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--folder", type=Path, help=f"the folder of runs; by default {USUAL} in ComfyUI's folder")
    commands = parser.add_subparsers(required=True, metavar="command")
    name = "the name of a run's folder, or its unambiguous beginning"

    def command(title: str, call: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(title, parents=[common], help=text, description=text)
        added.set_defaults(command=call)
        return added

    command("list", list_all, "a table of all runs")
    command("show", show, "everything about one run").add_argument("run", metavar="RUN", help=name)
    verify_parser = command("verify", verify, "check the files of all saves for damage")
    verify_parser.add_argument("run", metavar="RUN", nargs="?", help=f"{name}; by default all")
    export_parser = command("export", export, "copy the LoRA of a save, and its embeddings, under another name")
    export_parser.add_argument("run", metavar="RUN", help=name)
    export_parser.add_argument("--step", type=int, help="the save's step; by default the last one")
    export_parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the new .safetensors file")
    export_parser.add_argument(
        "--overwrite", action="store_true", help="replace files of that name if they are of the same run"
    )
    average_parser = command("average", average, "average the LoRAs of a run's saves into one")
    average_parser.add_argument("run", metavar="RUN", help=name)
    average_parser.add_argument("--width", type=float, default=0.1, help="how far back, as a share of the run; 0.1")
    average_parser.add_argument(
        "--seeds", action="store_true", help="instead: the mean of all finished runs that differ from it by seed alone"
    )
    average_parser.add_argument(
        "--rank", type=int, default=0, help="with --seeds: of the result; 0: exact, ranks add up"
    )
    average_parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the new .safetensors file")
    publish_parser = command("publish", publish, "publish the LoRA of a save, with a card made from its run")
    publish_parser.add_argument("run", metavar="RUN", help=name)
    publish_parser.add_argument("--to", choices=["hub"], required=True, help="hub: the Hugging Face Hub")
    publish_parser.add_argument("--repo", required=True, metavar="YOU/NAME", help="the repository, made if needed")
    publish_parser.add_argument("--licence", required=True, help="as the hub names it: cc-by-4.0, openrail, other, …")
    publish_parser.add_argument("--step", type=int, help="the save's step; by default the last one")
    publish_parser.add_argument("--public", action="store_true", help="for all to see; by default for you alone")
    publish_parser.add_argument("--no-samples", action="store_true", help="without pictures")
    publish_parser.add_argument(
        "--services", type=Path, metavar="FILE", help="the settings that hold your token; by default ComfyUI's"
    )
    clean_parser = command("clean", clean, "list the parts of runs that are not needed, and delete them with --yes")
    clean_parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{name}; by default all finished runs")
    more = clean_parser.add_mutually_exclusive_group()
    more.add_argument("--states", action="store_true", help="also the optimizer states of finished runs")
    more.add_argument("--whole", action="store_true", help="the whole folders of the named runs")
    clean_parser.add_argument("--yes", action="store_true", help="delete; without it the list is only printed")
    return parser


def usual_folder() -> Path:
    """Find ComfyUI's folder of runs; raises ValueError unless the pack is in its custom_nodes."""
    comfyui = comfyui_around()
    if comfyui is None:
        raise ValueError(
            f"The pack is not in ComfyUI's custom_nodes; name the folder of runs by --folder, usually {USUAL}."
        )
    return comfyui / USUAL


def find_run(runs: Path, name: str) -> Path:
    """Find the folder of a run by its name or the name's beginning; raises ValueError unless exactly one fits."""
    names = {path.name: path for path in run_paths(runs)}
    found = [name] if name in names else [each for each in names if name and each.startswith(name)]
    if len(found) == 1:
        return names[found[0]]
    if found:
        raise ValueError(f"{name} may be {' or '.join(found[:5])}; write more of the name.")
    raise ValueError(f"There is no run {name} in {runs}; `list` shows the runs there.")


def list_all(options: argparse.Namespace) -> int:
    """Print a table of all runs, and their total size."""
    runs = list_runs(options.folder)
    rows = [("run", "status", "steps", "mean loss", "size", "changed")]
    for run in runs:
        steps = "" if run["steps"] is None else f"{run['step']}/{run['steps']}"
        loss = "" if run["loss"] is None else f"{run['loss']:.4f}"
        rows.append((run["run"], run["status"], steps, loss, bytes_of(run["size"]), day(run["changed"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if runs else ():
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = "  ".join(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        tell(f"{left}  {right}")
    for run in runs:
        if run["status"] == "unreadable":
            tell(f"{run['run']}: {run['sentence']}")
    total, less = (bytes_of(sum(run[name] for run in runs)) for name in ("size", "clearable"))
    tell(f"{count(runs, 'run')}, {total}; clean would free {less}.")
    return 0


def show(options: argparse.Namespace) -> int:
    """Print everything about one run."""
    path = find_run(options.folder, options.run)
    run = describe(path)
    tell(run["run"])
    for title, text in _facts(path, run):
        tell(f"  {title:<12} {text}")
    return 0


def _facts(path: Path, run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "status", run["sentence"]
    yield "folder", str(path)
    yield "size", f"{bytes_of(run['size'])}; clean would free {bytes_of(run['clearable'])}"
    if run["status"] == "unreadable":
        return
    owner = RunFolder(path=path, about={}).owner()
    if owner and run["status"] == "running":
        yield "trained by", owner
    yield "name", run["name"]
    yield "key", run["key"]
    yield "steps", f"{run['step']} of {run['steps']}"
    if run["loss"] is not None:
        yield "loss", run["loss_words"]
    if run["validation"] is not None:
        yield "validation", f"{run['validation']['loss']:.4f} after step {run['validation']['step']}"
    for title in ("created", "saved", "finished"):
        if run[title] is not None:
            yield title, day(run[title])
    if begun := run["begun_with"]:
        yield "started from", f"step {begun.get('step')} of {begun.get('run')}"
    yield "base model", str(run["base_model"])
    yield "pictures", str(run["pictures"])
    for save in run["saves"]:
        notes = [bytes_of(save["size"]), *(["kept"] if save["stays"] else []), *filter(None, [save.get("problem")])]
        yield "save", f"step {save['step']}: {', '.join(notes)}"
    for name in run["samples"]:
        yield "sample", str(path / SAMPLES / name)
    for file in published_files(open_run(path)):
        yield "published", file + ("" if Path(file).is_file() else " (deleted)")


def verify(options: argparse.Namespace) -> int:
    """Check the files of all saves and print the damaged ones; return 1 if there are any."""
    paths = [find_run(options.folder, options.run)] if options.run else run_paths(options.folder)
    damaged = 0
    for path in paths:
        run = describe(path, verify=True)
        lacking = run["status"] == "finished" and run["step"] not in {save["step"] for save in run["saves"]}
        wrong = run["status"] == "unreadable" or lacking
        tell(f"{path.name}: {run['sentence'] if wrong else run['status']}")
        for save in run["saves"]:
            tell(f"  step {save['step']}: {save['problem'] or 'sound'}")
        damaged += wrong + sum(bool(save["problem"]) for save in run["saves"])
    tell(f"{damaged} damaged." if damaged else "All sound.")
    return 1 if damaged else 0


def export(options: argparse.Namespace) -> int:
    """Copy the LoRA files of a save with their embeddings, and compare the copies."""
    if options.to.suffix != ".safetensors":
        raise ValueError(f"{options.to} is no LoRA file; end its name in .safetensors.")
    run = open_run(find_run(options.folder, options.run))
    checkpoint = save_to_export(run, options.step)
    for path in export_save(run, checkpoint, options.to, options.to.parent, overwrite=options.overwrite):
        tell(f"{path}  {bytes_of(path.stat().st_size)}, step {checkpoint.step} of {run.path.name}")
    return 0


def publish(options: argparse.Namespace) -> int:
    """Publish the LoRA of a save at the hub, and print its address."""
    run = open_run(find_run(options.folder, options.run))
    file = options.services or (usual_file(around) if (around := comfyui_around()) else None)
    outward = read_outward(file) if file else Outward()
    address = publish_at_hub(
        run,
        save_to_export(run, options.step),
        outward,
        repository=options.repo,
        licence=options.licence,
        public=options.public,
        samples=not options.no_samples,
    )
    tell(f"Published {'for all' if options.public else 'privately'}: {address}")
    return 0


def average(options: argparse.Namespace) -> int:
    """Write the average of a run's saves, or of runs of several seeds, and print what it takes."""
    from ..lora_files.average import (
        averaged_lora,
        mean_of_seeds,
    )  # imported here, so that other commands need not wait for torch
    from ..lora_files.write import save_lora

    if options.to.suffix != ".safetensors" or options.to.exists():
        raise ValueError(f"{options.to} exists already, or does not end in .safetensors; choose another name for --to.")
    run = open_run(find_run(options.folder, options.run))
    if options.seeds:
        made, report = mean_of_seeds(loras_of_seeds(run, find_runs(options.folder)), options.rank)
    else:
        made, report = averaged_lora(lora_of_each_save(run), options.width)
    save_lora(options.to, made, made.metadata, "")
    tell(f"{report}\nSaved as {options.to}.")
    return 0


def clean(options: argparse.Namespace) -> int:
    """Print the parts of runs that are not needed, and delete them with --yes."""
    if options.whole and not options.runs:
        raise ValueError("--whole needs the names of the runs to delete.")
    named = [find_run(options.folder, name) for name in options.runs]
    plan: list[tuple[Path, list[Clearable]]] = []
    for path in dict.fromkeys(named or run_paths(options.folder)):
        try:
            plan.append((path, _planned(path, options)))
        except ValueError as error:
            if named:
                raise
            tell(f"{path.name} is skipped: {error}")
    if not named:
        plan += [(each.path, [each]) for each in old_leftovers(options.folder)]
    plan = [(path, found) for path, found in plan if found]
    for path, found in plan:
        for each in found:
            tell(f"{path.name}: {each.what}, {bytes_of(each.size)}")
    total = bytes_of(sum(each.size for _, found in plan for each in found))
    if plan and options.states:
        tell("Without its optimizer state, a run that is resumed or forked starts with a fresh optimizer.")
    if not plan:
        tell("There is nothing to delete.")
    elif not options.yes:
        tell(f"{total} would be freed. Nothing is deleted yet; add --yes to delete it.")
    else:
        for path, _ in plan:
            if options.whole or path.name.startswith("."):
                delete_run(path)
            else:
                clear(open_run(path), states=options.states)
        tell(f"Deleted {total}.")
    return 0


def _planned(path: Path, options: argparse.Namespace) -> list[Clearable]:
    """List what `clean` deletes of a run; raises ValueError with the reason if nothing may be deleted."""
    if is_elsewhere(path, options.folder):
        raise ValueError(f"{path.name} is a link to another folder; delete the run there.")
    run = RunFolder(path=path, about={}) if options.whole else open_run(path)
    if run.busy():
        raise ValueError(f"{path.name} is in training; wait until it ends.")
    if options.whole:
        return [Clearable(path, run.size(), "the whole run")]
    end = finished_checkpoint(run)
    if end is None and run.result() is not None:
        raise ValueError(f"The last save of {path.name} is damaged or missing, so its other saves may be needed.")
    return clearable(run, end, run.checkpoints(), states=options.states)


def tell(line: str) -> None:
    """Print a line; control characters become ?, so that names cannot steer the terminal."""
    print("".join(character if character.isprintable() else "?" for character in line))


def day(seconds: float) -> str:
    """Format a time, in seconds since 1970, for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
