"""The captions for which a run keeps what the base model predicts."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import ObjectiveConfig
from ..data.captions import replace_word
from ..data.plan import Plan
from .slider import all_prompts

BLANK = ""  # the caption of a prediction without one


def preserved_caption(caption: str, config: ObjectiveConfig) -> str | None:
    """Find the caption whose prediction is kept beside this one's; None: none.

    blank: no words. class: the trigger word, in any case and as whole words, gives way to its class. Both are
    ai-toolkit's (differential output preservation). Nothing is kept for a caption that stays the same: it is trained.
    """
    other = caption
    if config.preservation == "blank":
        other = BLANK
    elif config.preservation == "class":
        other = replace_word(caption, config.preservation_trigger, config.preservation_class)
    return None if other == caption else other


def texts_beside(caption: str, config: ObjectiveConfig) -> set[str]:
    """List the texts that passes on a caption read beside it; without a slider's prompts."""
    other = preserved_caption(caption, config)
    return ({other} if other is not None else set()) | ({BLANK} if config.guidance_loss else set())


def other_captions(plan: Plan, config: ObjectiveConfig) -> set[str]:
    """List the captions that a run needs beside its own."""
    captions = plan.captions(trained_only=True) if config.preservation != "off" else set()
    found = {other for caption in captions if (other := preserved_caption(caption, config)) is not None}
    return found | ({BLANK} if config.guidance_loss else set()) | all_prompts(config)


def check_preservation(captions: Iterable[str], config: ObjectiveConfig) -> None:
    """Raise ValueError if preservation changes no trained caption."""
    if any(preserved_caption(caption, config) is not None for caption in captions):
        return
    if config.preservation == "class":
        raise ValueError(
            f"No caption that is trained contains {config.preservation_trigger!r:.80}; set preservation_trigger of "
            "Noise & Loss to a word of the captions."
        )
    raise ValueError("No picture that is trained has a caption; set preservation of Noise & Loss to off.")
