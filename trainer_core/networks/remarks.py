"""What to know of an algorithm before a run with it, beyond what its settings say."""

from __future__ import annotations

from ..config import LoraConfig

MOST_LOHA = 32  # the rank above which products of normal draws become so large that runs end in NaN


def remarks_on_algorithm(config: LoraConfig) -> list[str]:
    """Return sentences about an algorithm whose training or file may surprise."""
    found = []
    if config.algorithm == "loha" and max(config.rank, config.conv_rank) > MOST_LOHA:
        found.append(
            f"LoHa of rank {max(config.rank, config.conv_rank)} reaches matrices of that rank squared and easily runs "
            f"into values that are not finite; {MOST_LOHA} or less is enough."
        )
    if config.algorithm in ("oft", "boft") and not config.bake:
        power = "its square" if config.algorithm == "oft" else "more than in proportion"
        found.append(
            f"At another strength than 1, ComfyUI applies {config.algorithm.upper()} by {power}; with bake the file is "
            "a plain LoRA, whose strength acts as usual."
        )
    if config.algorithm == "lokr" and config.tucker:
        found.append("LoKr in Tucker's form is saved with its second factor whole, since ComfyUI cannot load the core.")
    if config.algorithm == "ia3" and not config.bake:
        found.append("(IA)^3 is saved as a DoRA that changes magnitudes alone, which is the same and loads in ComfyUI.")
    return found
