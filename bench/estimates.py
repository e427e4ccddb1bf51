"""Estimate the memory of full-size models by settings, in dry runs without weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_atelier.bench.bases import empty_unet
from lora_atelier.bench.cases import BASES, CURVE, GPU, PLAIN, Case, Setting
from lora_atelier.bench.contenders import build_batch, estimated
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.memory import DTYPES

ALONE = (Setting(name="weights in float8", weights="float8"),)  # beside those that are measured: no time is given up


def estimate(case: Case, setting: Setting) -> float:
    """Estimate the peak memory in MB of training a case with some settings."""
    unet = empty_unet(case.base)
    lora = LoraConfig(rank=case.rank, alpha=case.rank, preset=case.preset)  # type: ignore[arg-type]
    batch = build_batch(unet, case.resolution, case.batch, torch.device("meta"), DTYPES[case.dtype])
    return estimated(unet, batch, lora, setting)


def render(cases: Sequence[Case] = GPU, settings: Sequence[Setting] = (*CURVE, *ALONE)) -> str:
    """Write the table of estimates in Markdown, settings by cases."""
    titles = [f"{BASES[case.base].title}, {case.resolution} px, batch {case.batch}" for case in cases]
    lines = [
        "### Memory by settings, as the preflight counts it",
        "",
        "Not measured: counted in dry runs of a training step without data. bfloat16, rank 16, preset attn-mlp, AdamW:",
        "weights, LoRA, gradients, optimizer and activations, without the few hundred MB that CUDA itself takes.",
        "",
        "| settings | " + " | ".join(titles) + " |",
        "|---" * (1 + len(titles)) + "|",
    ]
    for setting in settings:
        name = setting.name if setting.memory != PLAIN or setting.weights != "auto" else "the fastest"
        lines.append(f"| {name} | " + " | ".join(f"{estimate(case, setting):,.0f} MB" for case in cases) + " |")
    return "\n".join(lines)
