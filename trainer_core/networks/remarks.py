"""Warnings about an algorithm, shown before the run."""

from __future__ import annotations

from ..config import LoraConfig, setting

MAX_LOHA_RANK = 32  # above it, products of normal draws grow so large that runs end in NaN


def remarks_on_algorithm(config: LoraConfig) -> list[str]:
    """List warnings about an algorithm whose training or file may surprise."""
    found = []
    if config.algorithm == "loha" and max(config.rank, config.conv_rank) > MAX_LOHA_RANK:
        found.append(
            f"LoHa of rank {max(config.rank, config.conv_rank)} gives matrices of that rank squared, which easily "
            f"overflow to NaN; set rank and {setting('lora.conv_rank')} to {MAX_LOHA_RANK} or less."
        )
    if config.algorithm in ("oft", "boft") and not config.bake:
        power = "with the square of the strength" if config.algorithm == "oft" else "more than in proportion"
        found.append(
            f"At strengths other than 1, ComfyUI applies {config.algorithm.upper()} {power}. Set "
            f"{setting('lora.bake')} to save a plain LoRA, whose strength acts as usual."
        )
    if config.algorithm == "lokr" and config.tucker:
        found.append("LoKr with tucker is saved with a whole second factor, since ComfyUI cannot load its core.")
    if config.dora and not config.bake:
        found.append(
            "DoRA is trained as ComfyUI merges it on a GPU, in float16. Where it merges in float32, as on a CPU, "
            "pictures differ slightly."
        )
    if config.algorithm == "ia3" and not config.bake:
        found.append("(IA)^3 is saved as an equal DoRA that only changes magnitudes, since ComfyUI cannot load (IA)^3.")
    return found
