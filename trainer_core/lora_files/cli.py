"""The command line for LoRA files: inspect, convert, resize, extract, merge, blocks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.command_line import PROGRAM, comfyui_around, run_command
from ..common.wording import count
from ..models.weights_of_file import open_weights
from .blocks import parse_rules, scale_blocks
from .combine import METHODS, Summand, merge_loras
from .convert import convert
from .extract import extract
from .formats import FileLayer
from .inspect import describe_lora, inspect_lora
from .loader import Start, loader_of
from .lora import Lora, read_lora, remade
from .model_names import names_of_file, open_reader
from .names import PROGRAMS
from .recipes import parse_recipes
from .resize import RANK_MODES, RankRule, describe_ranks, resize, resize_by_recipes
from .write import save_lora

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run a tool and return its exit status: 2 for an error, which is printed. start: ComfyUI's loader, if any."""
    options = build_parser().parse_args(arguments, argparse.Namespace(start=start))
    return run_command(options.command, options)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} lora", description="Tools for LoRA files.")
    commands = parser.add_subparsers(required=True, metavar="tool")

    def command(name: str, call: Any, text: str, *, several: bool = False) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("lora", type=Path, nargs="+" if several else None, help="a LoRA file, .safetensors")  # type: ignore[arg-type]
        added.set_defaults(command=call)
        return added

    def rule(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rank", type=int, default=0, help="the new rank, or with --mode the highest one")
        parser.add_argument("--conv-rank", type=int, default=0, help="the same for convolutions; by default as --rank")
        parser.add_argument("--mode", choices=RANK_MODES, default="rank", help="how each layer's rank is chosen")
        parser.add_argument("--value", type=float, default=0.0, help="number of the mode, such as 10 for sv_ratio")

    def output(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--to", type=Path, required=True, help="the new file; a file of this name is not replaced")
        parser.add_argument("--dtype", choices=DTYPES, default="", help="number format; by default as it is")
        text = "ComfyUI, whose loader checks the file; by default the one around"
        parser.add_argument("--comfyui", type=Path, default=comfyui_around(), metavar="FOLDER", help=text)

    def model(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
        parser.add_argument("--model", type=Path, required=required, metavar="FILE", help=f"a model file {text}")

    command("inspect", inspect, "tell what a LoRA is")
    resizing = command("resize", resize_file, "make a LoRA smaller")
    output(resizing)
    rule(resizing)
    model(resizing, "of its kind, which some recipes compare with; also to check the new file by")
    resizing.add_argument("--recipe", help="instead: a recipe of resize_lora, such as spn_lora=1,thr=-1")
    converting = command("convert", convert_file, "write a LoRA as another program does")
    output(converting)
    converting.add_argument("--for", dest="program", choices=PROGRAMS, required=True, help="the program that reads it")
    model(converting, "of its kind, .safetensors", required=True)
    converting.add_argument("--plain-rank", type=int, default=0, help="plain LoRA of this rank for other kinds")
    extracting = commands.add_parser("extract", help="the difference of two models as a LoRA")
    extracting.add_argument("tuned", type=Path, help="the tuned model's file, .safetensors")
    extracting.add_argument("--base", type=Path, required=True, help="the file of the model that it was made from")
    extracting.set_defaults(command=extract_file)
    output(extracting)
    rule(extracting)
    merging = command("merge", merge_files, "merge LoRAs into one", several=True)
    output(merging)
    model(merging, "of their kind, to check the new file by")
    merging.add_argument("--strength", type=float, nargs="+", default=[], help="of each LoRA; by default 1")
    merging.add_argument("--method", choices=METHODS, default="sum", help="by default sum, which is exact")
    merging.add_argument("--rank", type=int, default=0, help="of the result, for all methods but sum and orthogonal")
    merging.add_argument("--density", type=float, default=0.5, help="for ties and dare: the share that is kept")
    merging.add_argument("--seed", type=int, default=0, help="of dare's draws")
    filtering = command("blocks", filter_file, "keep, scale or drop parts of a LoRA")
    output(filtering)
    model(filtering, "of its kind, to check the new file by")
    filtering.add_argument("--rules", required=True, help="such as te*=0,double_blocks.3=0.5; * stands for any letters")
    filtering.add_argument("--rest", type=float, default=1.0, help="factor of all other layers")
    return parser


def inspect(options: argparse.Namespace) -> int:
    """Print what a LoRA is."""
    _, file = read_lora(options.lora)
    print(describe_lora(inspect_lora(file), file.name))
    return 0


def resize_file(options: argparse.Namespace) -> int:
    """Write a smaller LoRA, and print each layer's ranks."""
    lora, file = read_lora(options.lora)
    recipes = parse_recipes(options.recipe) if options.recipe else []
    if len(recipes) > 1:
        raise ValueError("--recipe holds several recipes, which give several files; call once for each.")
    if options.model is None and any(recipe.needs_model for recipe in recipes):
        raise ValueError(f"The recipe {options.recipe} compares with the model; name the model's file by --model.")
    rule = None if recipes else _rule(options, "resize")
    settings = {"mode": "recipe", "recipe": options.recipe.strip()} if rule is None else rule.settings()
    with nullcontext() if options.model is None else open_reader(options.model) as weight:
        made = resize_by_recipes(file, recipes, weight)[0] if rule is None else resize(file, rule, weight)
    return _write(options, lora, made.layers, "resize", settings, describe_ranks(made), model=options.model)


def convert_file(options: argparse.Namespace) -> int:
    """Write a LoRA as another program does."""
    lora, file = read_lora(options.lora)
    names = names_of_file(options.model)
    if options.program not in names.forms:
        raise ValueError(
            f"The form of {options.program} depends on what ComfyUI knows of the model; convert it in the page, or use "
            f"one of {', '.join(names.forms)} after --for."
        )
    known = loader_of(options.start, options.comfyui, options.model).knows
    with open_reader(options.model) as weight:
        made = convert(file, names, options.program, rank=options.plain_rank, weight=weight, known=known)
    settings = {"program": options.program, "plain_rank": options.plain_rank}
    said, model = made.describe(options.program), None if made.unread else options.model  # such names are not refused
    return _write(options, lora, made.layers, "convert", settings, said, model=model, tensors=made.tensors)


def extract_file(options: argparse.Namespace) -> int:
    """Write the difference of two models as a LoRA."""
    rule = _rule(options, "extract")
    with open_weights(options.tuned) as tuned, open_weights(options.base) as base:
        made = extract(tuned, base, rule, titles=(options.tuned.name, options.base.name))
    settings = {**rule.settings(), "tuned": options.tuned.name, "base": options.base.name}
    return _write(options, Lora({}, {}), made.layers, "extract", settings, made.describe(), model=options.base)


def _rule(options: argparse.Namespace, tool: str) -> RankRule:
    return RankRule(mode=options.mode, value=options.value, rank=options.rank, conv_rank=options.conv_rank, tool=tool)


def merge_files(options: argparse.Namespace) -> int:
    """Write the merged LoRA."""
    strengths = options.strength or [1.0] * len(options.lora)
    if len(strengths) != len(options.lora):
        raise ValueError(
            f"After --strength {count(strengths, 'number stands', 'numbers stand')}, for "
            f"{count(options.lora, 'LoRA')}; write one for each."
        )
    read = [read_lora(path) for path in options.lora]
    summands = [Summand(file, strength) for (_, file), strength in zip(read, strengths, strict=True)]
    made = merge_loras(summands, options.method, rank=options.rank, density=options.density, seed=options.seed)
    settings = {"method": options.method, "loras": [file.name for _, file in read], "strengths": strengths}
    said = (
        f"{count(made.layers, 'layer')}, {made.shared} of them in several LoRAs; {made.kept:.2%} of the change is kept."
    )
    return _write(options, read[0][0], made.layers, "merge", settings, said, model=options.model)


def filter_file(options: argparse.Namespace) -> int:
    """Write what the rules leave of a LoRA."""
    lora, file = read_lora(options.lora)
    kept, factors = scale_blocks(file, parse_rules(options.rules), rest=options.rest)
    settings = {"rules": options.rules, "rest": options.rest}
    said = f"{len(kept.layers)} of {count(factors, 'layer')} kept."
    return _write(options, lora, kept.layers.values(), "blocks", settings, said, model=options.model)


def _write(
    options: argparse.Namespace,
    lora: Lora,
    layers: Iterable[FileLayer],
    tool: str,
    settings: Mapping[str, Any],
    said: str,
    *,
    model: Path | None,
    tensors: Mapping[str, Tensor] | None = None,
) -> int:
    """Write the result to the file of --to, checked by ComfyUI's loader if there is one, and print what was done.

    model: the file of a model that must have every layer, if one is named. tensors: by default those of the layers.
    """
    path: Path = (
        options.to if options.to.suffix == ".safetensors" else options.to.with_name(f"{options.to.name}.safetensors")
    )
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name for --to.")
    made = remade(lora, layers, tool, settings, tensors)
    loader = loader_of(options.start, options.comfyui, model)
    save_lora(path, made, made.metadata, options.dtype, loader.check)
    print(f"{said}\nSaved as {path}. {loader.report}")
    return 0
