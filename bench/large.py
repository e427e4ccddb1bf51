"""Large linked models of random weights on one card: their sizes, how their weights lie, and what others claim.

Needs no torch. `large_sides.py` measures the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from lora_atelier.bench.cases import Part

RANK = 32  # of the claims at 1024 px that name one
STEPS = 6  # on a card, after those of the warm-up


@dataclass(frozen=True, kw_only=True)
class Large:
    """A model of ComfyUI's at the size of its released weights, for one picture of 1024 px; or its toy."""

    name: str
    row: str  # of the tiny models, which a toy is
    title: str
    config: tuple[tuple[str, Any], ...] = ()  # what differs from the row's
    latents: tuple[int, ...] = ()
    text: tuple[int, int] = (0, 0)  # tokens and width of a caption
    device: str = "cuda"
    dtype: str = "bfloat16"  # of the activations


@dataclass(frozen=True)
class Side:
    """How a model's weights lie and are multiplied."""

    title: str
    stored: str = "bfloat16"  # float8: plain; int8 and "float8, scaled": the blocks, as ComfyUI's files of 8 bits
    compute: str = ""  # the format in which blocks multiply; "" for the activations'
    trains: bool = True


SIDES = {
    "frozen": Side("frozen pass in bfloat16 (no network)", trains=False),
    "bfloat16": Side("bfloat16"),
    "float8": Side("weights in float8", "float8"),
    "int8": Side("weights in int8, multiplied in int8", "int8", "int8"),
    "float8, computed": Side("weights in float8, multiplied in float8", "float8, scaled", "float8"),
}
Z_IMAGE = {"dim": 3840, "cap_feat_dim": 2560, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30}
KREA2 = {
    "features": 6144,
    "tdim": 256,
    "txtdim": 2560,
    "heads": 48,
    "kvheads": 12,
    "multiplier": 4,
    "layers": 28,
    "txtlayers": 12,
    "txtheads": 20,
    "txtkvheads": 20,
}
QWEN_IMAGE = {
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
STILL = (16, 128, 128)  # latents of 1024 px
TOKENS = 512  # of a caption, a long one


def _large(row: str, title: str, config: dict[str, Any], latents: tuple[int, ...], width: int) -> Large:
    name = f"linked-{row.replace('_', '-')}-1024-1-gpu"
    text = (TOKENS, width)
    return Large(name=name, row=row, title=title, config=tuple(config.items()), latents=latents, text=text)


LARGE = (
    _large("z_image", "Z-Image", Z_IMAGE, STILL, 2560),
    _large("krea2", "Krea 2", KREA2, STILL, 12 * 2560),
    _large("qwen_image", "Qwen-Image", QWEN_IMAGE, (16, 1, 128, 128), 3584),
)
LARGE_DRY = tuple(
    Large(name=model.name.replace("1024-1-gpu", "dry"), row=model.row, title=f"a toy of {model.title}", device="cpu")
    for model in LARGE
)
MODELS = {model.name: model for model in (*LARGE, *LARGE_DRY)}


@dataclass(frozen=True)
class Claim:
    """What others say that a step takes on their card, in seconds."""

    row: str
    what: str
    card: str  # part of torch's name of it
    side: str  # ours, to compare
    seconds: float
    source: str


MUSUBI, SIMPLE = "musubi-tuner, PR 1008", "SimpleTuner, its guide of {}"
CLAIMS = (
    Claim("krea2", "1024 px, float8", "RTX 3090", "float8", 7.1, MUSUBI),
    Claim("krea2", "1024 px, ConvRot int8", "RTX 3090", "int8", 5.3, MUSUBI),
    Claim("krea2", "1024 px, bfloat16", "RTX PRO 6000", "bfloat16", 2.0, MUSUBI),
    Claim("krea2", "1024 px, float8", "RTX PRO 6000", "float8", 2.3, MUSUBI),
    Claim("krea2", "1024 px, int8", "RTX PRO 6000", "int8", 1.9, MUSUBI),
    Claim("krea2", "1024 px, bfloat16, checkpointing", "H100", "bfloat16", 0.99, SIMPLE.format("Krea 2")),
    Claim("z_image", "SDNQ int8, Hadamard", "H100", "int8", 1.107, SIMPLE.format("Z-Image")),
    Claim("z_image", "SDNQ int8, Hadamard", "L40S", "int8", 1.026, SIMPLE.format("Z-Image")),
)


def part(model: Large, side: str) -> Part:
    """The part that measures a side of a model."""
    return {"what": "large", "case": model.name, "side": side}


def render(measured: dict[str, dict[str, dict[str, Any]]], device: str) -> list[str]:
    """Write the tables of the models, and of what others claim; measured: model -> side -> result, `left_out` or both.

    device: torch's name of the card.
    """
    lines: list[str] = []
    for name, sides in measured.items():
        lines += ["", *_table(MODELS[name], sides)]
    lines += [
        "",
        "What others claim of a LoRA of these models, batch 1. Claims that name no rank stand beside rank "
        f"{RANK} here. Only the same card can meet one:",
        "",
        "| model | claim | card | s / step | source | here | |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*lines, *(_claim(claim, measured, device) for claim in CLAIMS)]


def _table(model: Large, sides: dict[str, dict[str, Any]]) -> list[str]:
    about = next((row for row in sides.values() if "parameters" in row), None)
    size = "" if about is None else f", {about['parameters'] / 1e9:.2f} B random weights"
    settings = f"rank {RANK} on every layer of the blocks and around them, checkpointing full"
    lines = [
        f"**{model.title}{size}, {'1024 px' if model.text[0] else 'toy size'}, batch 1**: {settings}.",
        "",
        "| | s / step | of bfloat16's time | of the frozen pass's | tensors | reserved | on the card |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, row in sides.items():
        if "left_out" in row:
            lines.append(f"| {SIDES[side].title} | not measured: {row['left_out']} | | | | | |")
            continue
        cells = [f"{median(row['seconds']):.3f}", *(_share(row, sides[other]) for other in ("bfloat16", "frozen"))]
        held = None if row["reserved"] is None else row["reserved"] + row["overhead"]
        cells += ["" if size is None else f"{size:,.0f} MB" for size in (row["peak"], row["reserved"], held)]
        lines.append(f"| {SIDES[side].title} | {' | '.join(cells)} |")
    return lines


def _share(row: dict[str, Any], other: dict[str, Any]) -> str:
    return "" if "left_out" in other else f"{median(row['seconds']) / median(other['seconds']):.2f}x"


def _claim(claim: Claim, measured: dict[str, dict[str, dict[str, Any]]], device: str) -> str:
    """Write a claim's row: met or missed on the same card, else the figure of another one."""
    model = next(model for model in LARGE if model.row == claim.row)
    row = measured.get(model.name, {}).get(claim.side, {"left_out": ""})
    text, verdict = "not measured", ""
    if "left_out" not in row:
        middle = median(row["seconds"])
        text = f"{middle:.3f}, {SIDES[claim.side].title}"
        verdict = ("met" if middle <= claim.seconds else "**missed**") if claim.card in device else f"on {device}"
    return f"| {model.title} | {claim.what} | {claim.card} | {claim.seconds:g} | {claim.source} | {text} | {verdict} |"
