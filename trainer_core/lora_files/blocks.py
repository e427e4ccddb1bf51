"""Keep, scale or drop parts of a LoRA: by blocks, layers or patterns of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ..config import node, setting
from .formats import BIAS, FileLayer
from .match import TEXT, flat_name
from .read import LoraFile

MOST_RULES, LONGEST_RULE, MOST_FACTOR = 500, 200, 1000.0
OTHER = "other"  # layers outside of all blocks
# A repeated block in the flat name of a layer: its list, and its number there.
_BLOCK = re.compile(
    r"(?:middle|mid)_block|((?:input|output|down|up|double|single|joint|transformer|single_transformer)_blocks|blocks|"
    r"layers)_(\d+)"
)

BlockRule = tuple[str, float]  # pattern, factor


def block_of(source: str) -> str:
    """Name the block of a layer by its name in a LoRA file: down_blocks.1, double_blocks.3, te1.layers.4, other."""
    name = flat_name(source)
    text = TEXT.match(source) or TEXT.match(name) or name.startswith("text_encoders_")
    found = _BLOCK.search(name)
    block = OTHER if not found else f"{found[1]}.{found[2]}" if found[1] else "middle_block"
    if not text:
        return block
    number = re.match(r"lora_te(\d?)|text_encoder(?:_(\d))?", name)
    return f"te{(number and (number[1] or number[2])) or ''}.{block}"


def blocks_of(lora: LoraFile) -> list[str]:
    """List the blocks of a LoRA, text encoders first, each list in order of its numbers."""

    def order(block: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        return not block.startswith("te"), [
            (p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in block.split(".")
        ]

    return sorted({block_of(layer.source) for layer in lora.layers.values()}, key=order)


def parse_rules(text: str) -> list[BlockRule]:
    """Read rules such as `te*=0, double_blocks.3=0.5, *attn*=1`, by commas or lines; # begins a comment.

    Raises ValueError for what is no rule.
    """
    rules = []
    for piece in re.split(r"[,\n]", re.sub(r"#[^\n]*", "", text)):
        if not (rule := piece.strip()):
            continue
        pattern, equals, number = (part.strip() for part in rule.rpartition("="))
        try:
            factor = float(number)
        except ValueError:
            factor = float("nan")
        if not equals or not pattern or not abs(factor) <= MOST_FACTOR:
            raise ValueError(
                f"{rule[:80]!r} in {setting('blocks.rules')} is no rule; write pattern=factor, such as "
                "double_blocks.3=0.5 or te*=0."
            )
        if len(pattern) > LONGEST_RULE or len(rules) == MOST_RULES:
            raise ValueError(
                f"{setting('blocks.rules')} is too long; at most {MOST_RULES} rules of {LONGEST_RULE} characters are "
                "read."
            )
        rules.append((pattern, factor))
    return rules


def scale_blocks(lora: LoraFile, rules: Sequence[BlockRule], *, rest: float = 1.0) -> tuple[LoraFile, dict[str, float]]:
    """Scale the layers of a LoRA; also return the factor of each layer by its name.

    The last rule whose pattern is a layer's block, or its name with dots or underscores, decides; other layers get
    `rest`. A factor of 0 drops a layer. Raises ValueError for a pattern that matches nothing, for a factor other than
    0 and 1 on a layer that is not linear in its strength, and where nothing is left.
    """
    factors = {}
    names = {source: (block_of(source), source, flat_name(source)) for source in lora.layers}
    for pattern, factor in rules:
        matched = [source for source, own in names.items() if any(fnmatchcase(name, pattern) for name in own)]
        if not matched:
            raise ValueError(
                f"The pattern {pattern} of {node('blocks')} matches no layer of {lora.name}; its blocks are "
                f"{', '.join(blocks_of(lora))[:400]}. * stands for any letters."
            )
        factors |= dict.fromkeys(matched, factor)
    factors = {source: factors.get(source, rest) for source in lora.layers}
    layers = {source: _scaled(layer, factors[source]) for source, layer in lora.layers.items() if factors[source]}
    if not layers:
        raise ValueError(f"Nothing of {lora.name} is left; set a {setting('blocks.factor')} to another number than 0.")
    return replace(lora, layers=layers), factors


def _scaled(layer: FileLayer, factor: float) -> FileLayer:
    """Multiply the change of a layer by a factor other than 0; exact where the factor is a power of two."""
    if factor == 1:
        return layer
    if layer.of_weight:
        raise ValueError(
            f"{layer.source} is a layer of {layer.kind}, which can be kept or dropped, not scaled. Use the factors 0 "
            f"and 1, or make it a plain LoRA first, by {node('resize')} with the model."
        )
    tensors = dict(layer.tensors)
    for part in {*layer.form.multiplied, BIAS} & tensors.keys():
        tensors[part] = (tensors[part].float() * factor).to(tensors[part].dtype)
    return replace(layer, tensors=tensors)
