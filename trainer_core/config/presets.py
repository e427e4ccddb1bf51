"""The table of presets: what a character, a style or a thing takes on each family of models and size of memory.

A preset is three rows: the recipe of its family, what its goal changes of it, and what fits into the memory. Each row
names its source. Folder, trigger word and names are never among the settings. All recipes train with AdamW: its 8-bit
forms need a package, and save little beside a base model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TOY = "toy"  # the kind of the tiny models that come with the pack; others are kinds of architectures
UNETS = ("sd1", "sdxl", TOY)  # kinds whose convolutions can be trained
ROUND = 50  # steps


class FamilyRow(NamedTuple):
    """How a family is trained."""

    kind: str  # of architecture
    rank: int
    alpha: float
    learning_rate: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalRow:
    """What a goal changes of a recipe."""

    goal: str
    times: float  # the rank and the alpha
    visits: int  # of pictures in all: steps times batch
    unet_layers: str  # the preset of LoRA Config, for UNets
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """What fits into a GPU's memory."""

    kind: str
    gigabytes: int  # at least
    resolution: int
    batch_size: int
    most_rank: int = 0  # 0: any
    more: Mapping[str, Any] = field(default_factory=dict)  # by section and field
    eight_bits: bool = False  # the linked model has to be loaded in 8 bits
    source: str


class NetworkRow(NamedTuple):
    """What is trained, in place of a LoRA with the recipe's rank."""

    network: str
    title: str
    settings: Mapping[str, Any]  # in place of rank and alpha
    like_rank: int  # of a LoRA that has about as many weights, where a layer is 1280 wide
    source: str


class ChosenPreset(NamedTuple):
    """The settings of a preset by section and field, in the order in which they are set, and their sources."""

    settings: Mapping[str, Any]
    eight_bits: bool  # the linked model has to be loaded in 8 bits
    sources: tuple[str, ...]


AI_TOOLKIT = "ai-toolkit, config/examples"
MUSUBI = "musubi-tuner, docs"
SD_SCRIPTS = "sd-scripts, docs"
ONETRAINER = "OneTrainer, training_presets"

RECIPES = {
    each.kind: each
    for each in (
        FamilyRow(TOY, 16, 16.0, 3e-3, "LoRA Atelier, README: the first LoRA"),
        FamilyRow("sd1", 16, 16.0, 1e-4, f"{SD_SCRIPTS}/train_network.md: dim 16, alpha up to the dim, 1e-4"),
        FamilyRow("sdxl", 32, 16.0, 1e-4, f"{SD_SCRIPTS}/sdxl_train_network.md: dim 32, alpha 16, 1e-4"),
        FamilyRow("flux", 16, 16.0, 1e-4, f"{AI_TOOLKIT}/train_lora_flux_24gb.yaml"),
        FamilyRow("flux2_klein", 16, 16.0, 1e-4, f"as FLUX.1: {AI_TOOLKIT}/train_lora_flux_24gb.yaml"),
        FamilyRow("chroma", 16, 16.0, 1e-4, f"{AI_TOOLKIT}/train_lora_chroma_24gb.yaml"),
        FamilyRow("z_image", 32, 32.0, 1e-4, f"{MUSUBI}/zimage.md: dim 32, 1e-4"),
        FamilyRow("qwen_image", 16, 16.0, 1e-4, f"{AI_TOOLKIT}/train_lora_qwen_image_24gb.yaml"),
        FamilyRow("wan", 32, 32.0, 1e-4, f"{AI_TOOLKIT}/train_lora_wan21_14b_24gb.yaml"),
    )
}

STEPS = "ai-toolkit, config/examples: 2000 steps, 500 to 4000"
GOALS: dict[str, GoalRow] = {
    each.goal: each
    for each in (
        GoalRow(goal="character", times=1, visits=2000, unet_layers="attn-mlp", source=STEPS),
        GoalRow(
            goal="style",
            times=2,
            visits=3000,
            unet_layers="full",
            source=f"{STEPS}; sd-scripts, docs/train_network.md: convolutions (LoRA-C3Lier)",
        ),
        GoalRow(
            goal="thing",
            times=0.5,
            visits=1500,
            unet_layers="attn-mlp",
            source=f"{STEPS}; Hugging Face, lora-finetuning-guide: low ranks for a simple object",
        ),
    )
}

LORA = "lora"
WHOLE = "ai-toolkit, toolkit/kohya_lora.py: lokr_full_rank, lokr_factor"
NETWORKS: dict[str, NetworkRow] = {
    each.network: each
    for each in (
        NetworkRow(LORA, "LoRA", {}, 0, ""),
        *(
            # Whole factors of a square weight of side n: factor^2 + (n / factor)^2 numbers; a LoRA has 2 n rank.
            NetworkRow(
                f"lokr-{factor}",
                f"LoKr, whole, factor {factor}",
                {"lora.algorithm": "lokr", "lora.full_matrix": True, "lora.factor": factor},
                round(1280 / (2 * factor**2)),
                WHOLE,
            )
            for factor in (4, 8, 16)
        ),
    )
}

FULL = {"memory.checkpointing": "full"}
HALF, ALL = ({**FULL, "memory.offload_weights": part} for part in ("half", "all"))
FLUX_TABLE = f"{SD_SCRIPTS}/flux_train_network.md: fp8, blocks to swap by memory"
QWEN_TABLE = f"{MUSUBI}/qwen_image.md: memory at 1024 by blocks to swap"

FITS = (
    MemoryRow(kind=TOY, gigabytes=1, resolution=128, batch_size=4, source="LoRA Atelier, README: the first LoRA"),
    MemoryRow(
        kind="sd1", gigabytes=8, resolution=512, batch_size=2, source=f"{ONETRAINER}/#sd 1.5 LoRA, half its batch"
    ),
    MemoryRow(kind="sd1", gigabytes=12, resolution=512, batch_size=4, source=f"{ONETRAINER}/#sd 1.5 LoRA"),
    MemoryRow(
        kind="sdxl",
        gigabytes=8,
        resolution=1024,
        batch_size=1,
        most_rank=8,
        more={**FULL, "base_model.weights": "float8"},
        source=f"{SD_SCRIPTS}/train_SDXL-en.md: checkpointing, the UNet alone, dim 4 to 8 for 8 GB",
    ),
    MemoryRow(
        kind="sdxl",
        gigabytes=12,
        resolution=1024,
        batch_size=1,
        more=FULL,
        source=f"{SD_SCRIPTS}/sdxl_train_network.md: checkpointing",
    ),
    MemoryRow(
        kind="sdxl", gigabytes=16, resolution=1024, batch_size=2, source=f"{ONETRAINER}/#sdxl 1.0 LoRA, half its batch"
    ),
    MemoryRow(kind="sdxl", gigabytes=24, resolution=1024, batch_size=4, source=f"{ONETRAINER}/#sdxl 1.0 LoRA"),
    MemoryRow(kind="flux", gigabytes=8, resolution=512, batch_size=1, more=ALL, eight_bits=True, source=FLUX_TABLE),
    MemoryRow(kind="flux", gigabytes=12, resolution=512, batch_size=1, more=HALF, eight_bits=True, source=FLUX_TABLE),
    MemoryRow(kind="flux", gigabytes=16, resolution=768, batch_size=1, more=HALF, eight_bits=True, source=FLUX_TABLE),
    MemoryRow(
        kind="flux",
        gigabytes=24,
        resolution=1024,
        batch_size=1,
        more=FULL,
        eight_bits=True,
        source=f"{AI_TOOLKIT}/train_lora_flux_24gb.yaml: quantized, up to 1024",
    ),
    MemoryRow(
        kind="flux2_klein",
        gigabytes=8,
        resolution=512,
        batch_size=2,
        more=ALL,
        eight_bits=True,
        source=f"{ONETRAINER}/#flux2 LoRA 8GB",
    ),
    MemoryRow(
        kind="flux2_klein",
        gigabytes=16,
        resolution=512,
        batch_size=2,
        more=FULL,
        eight_bits=True,
        source=f"{ONETRAINER}/#flux2 LoRA 16GB",
    ),
    MemoryRow(
        kind="chroma",
        gigabytes=8,
        resolution=512,
        batch_size=2,
        more=ALL,
        eight_bits=True,
        source=f"{ONETRAINER}/#chroma LoRA 8GB",
    ),
    MemoryRow(
        kind="chroma",
        gigabytes=16,
        resolution=512,
        batch_size=2,
        more=FULL,
        eight_bits=True,
        source=f"{ONETRAINER}/#chroma LoRA 16GB",
    ),
    MemoryRow(
        kind="chroma",
        gigabytes=24,
        resolution=512,
        batch_size=2,
        more=FULL,
        source=f"{ONETRAINER}/#chroma LoRA 24GB",
    ),
    MemoryRow(
        kind="z_image",
        gigabytes=8,
        resolution=512,
        batch_size=2,
        more=ALL,
        eight_bits=True,
        source=f"{ONETRAINER}/#z-image LoRA 8GB",
    ),
    MemoryRow(
        kind="z_image",
        gigabytes=16,
        resolution=512,
        batch_size=2,
        more=FULL,
        eight_bits=True,
        source=f"{ONETRAINER}/#z-image LoRA 16GB",
    ),
    MemoryRow(
        kind="qwen_image", gigabytes=12, resolution=1024, batch_size=1, more=ALL, eight_bits=True, source=QWEN_TABLE
    ),
    MemoryRow(
        kind="qwen_image",
        gigabytes=16,
        resolution=512,
        batch_size=2,
        more=HALF,
        eight_bits=True,
        source=f"{ONETRAINER}/#qwen LoRA 16GB",
    ),
    MemoryRow(
        kind="qwen_image", gigabytes=24, resolution=1024, batch_size=1, more=HALF, eight_bits=True, source=QWEN_TABLE
    ),
    MemoryRow(
        kind="wan",
        gigabytes=12,
        resolution=512,
        batch_size=1,
        more=ALL,
        eight_bits=True,
        source="musubi-tuner, README: 12 GB or more for training with pictures",
    ),
    MemoryRow(
        kind="wan",
        gigabytes=24,
        resolution=632,
        batch_size=1,
        more=FULL,
        eight_bits=True,
        source=f"{AI_TOOLKIT}/train_lora_wan21_14b_24gb.yaml: quantized, 632",
    ),
)


def memory_of(kind: str) -> list[int]:
    """List the sizes of memory that a family has presets for, in gigabytes."""
    return [each.gigabytes for each in FITS if each.kind == kind]


def preset(kind: str, goal: str, gigabytes: int, network: str = LORA) -> ChosenPreset:
    """Build a preset; raises ValueError for what the tables do not have, and for a network too large for the memory."""
    recipe, chosen, other = RECIPES.get(kind), GOALS.get(goal), NETWORKS.get(network)
    fit = next((each for each in FITS if (each.kind, each.gigabytes) == (kind, gigabytes)), None)
    if recipe is None or chosen is None or fit is None or other is None:
        raise ValueError(f"There is no preset for {goal!r:.40}, {kind!r:.40}, {gigabytes!r:.40} GB, {network!r:.40}.")
    if 0 < fit.most_rank < other.like_rank:
        raise ValueError(
            f"{other.title} has as many weights as a LoRA of rank {other.like_rank}, and {gigabytes} GB hold rank "
            f"{fit.most_rank}; choose a larger factor."
        )
    rank = max(1, int(recipe.rank * chosen.times))
    if fit.most_rank:
        rank = min(rank, fit.most_rank)
    settings = {
        "train.steps": math.ceil(chosen.visits / fit.batch_size / ROUND) * ROUND,
        "train.epochs": 0,  # steps count then
        "train.batch_size": fit.batch_size,
        "train.resolution": fit.resolution,
        **(other.settings or {"lora.rank": rank, "lora.alpha": recipe.alpha * rank / recipe.rank}),
        "lora.preset": layers_of(kind, chosen),
        "optimizer.name": "adamw",
        "optimizer.learning_rate": recipe.learning_rate,
        "memory.checkpointing": "auto",
        "memory.offload_weights": "auto",
        "base_model.weights": "auto",
        **fit.more,
    }
    sources = dict.fromkeys(filter(None, (recipe.source, chosen.source, other.source, fit.source)))
    return ChosenPreset(settings, fit.eight_bits, tuple(sources))


def layers_of(kind: str, goal: GoalRow) -> str:
    """Choose the layers to train; the toy's are all, and only UNets have convolutions."""
    if kind == TOY:
        return "full"
    return goal.unet_layers if kind in UNETS else "attn-mlp"
