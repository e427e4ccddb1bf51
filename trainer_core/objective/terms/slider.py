"""Concept sliders (Gandikota et al. 2023, arXiv 2311.12092): the directions of a micro-batch, its prompts, its target.

Of two prompts: the network at strength +1 should predict what the base model predicts for the caption, moved from a
negative towards a positive prompt, and at -1 moved as far the other way. Of the pictures only the noised latents count.

Of pairs of pictures: the network at +1 learns the one picture and at -1 the other, with the same noise, level, crop and
caption. The loss of a pair is the sum of both, as in the paper's section on pairs of images.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ...config import ALGORITHMS, STAYING, ObjectiveConfig, RunConfig, node, put_beneath, setting
from ...data.plan import MicroBatch
from ..passes import Pass
from .term import Strengths, Term


def slider_sign(micro_batch: int) -> int:
    """The strength of the network in a micro-batch, counted over the run: +1 and -1 in turn."""
    return -1 if micro_batch % 2 else 1


class PromptSlider(Term):
    """The direction is the difference of two prompts, one attribute after the other."""

    learns_pictures = False

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def pair(self, micro_batch: int) -> tuple[str, str]:
        """The positive and the negative prompt of a micro-batch, with what both keep.

        Both directions of the slider have each attribute equally often.
        """
        config = self.config
        pair = (config.slider_positive.strip(), config.slider_negative.strip())
        if not config.slider_keep:
            return pair
        # Two micro-batches, one of each sign, share an attribute.
        kept = config.slider_keep[micro_batch // 2 % len(config.slider_keep)]
        positive, negative = (f"{prompt}, {kept}" if prompt else kept for prompt in pair)
        return positive, negative

    def prompts(self, micro_batch: int | None = None) -> set[str]:
        """Both prompts of a micro-batch, or of any."""
        turns = range(2 * max(1, len(self.config.slider_keep))) if micro_batch is None else (micro_batch,)
        return {prompt for turn in turns for prompt in self.pair(turn)}

    def strengths(self, micro_batch: MicroBatch) -> Strengths:
        """The strength alternates from micro-batch to micro-batch."""
        return ((slider_sign(micro_batch.index), micro_batch),)

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Move the frozen model's prediction from the negative towards the positive prompt, or the other way."""
        # The network runs at the sign's strength, so the target moves to the same side.
        own, prompts = seen.frozen(), self.pair(seen.index)
        positive, negative = (seen.frozen([prompt] * len(seen.captions)) for prompt in prompts)
        return slider_target(own, positive, negative, slider_sign(seen.index) * self.config.slider_strength)


class PairSlider(Term):
    """The network at +1 learns the one picture of a pair, and at -1 the other."""

    def strengths(self, micro_batch: MicroBatch) -> Strengths:
        """Both ends of each pair; a sample without another end is trained as it is at both."""
        return (1, micro_batch), (-1, micro_batch.other_end())


def slider_target(own: Tensor, positive: Tensor, negative: Tensor, strength: float) -> Tensor:
    """Compute own + strength (positive - negative), float32, equation 8 of the paper with one attribute.

    All are the frozen model's predictions of the same noised latents, (B, C, *axes). strength: below 0 at -1. The
    difference is the same for every kind of prediction that is affine in the clean picture.
    """
    return own.float() + strength * (positive.float() - negative.float())


def terms_of(config: RunConfig) -> list[Term]:
    """List the term of a run's settings or of its concepts, if any; raises ValueError as `check_slider` does."""
    check_slider(config)
    if config.dataset.paired:
        return [PairSlider()]
    return [PromptSlider(config.objective)] if config.objective.slider != "off" else []


def check_slider(config: RunConfig) -> None:
    """Raise ValueError for settings with which a slider has no second direction, or that measure something else."""
    if config.objective.slider == "off" and not config.dataset.paired:
        return
    lora = config.lora
    if lora.dora or not ALGORITHMS[lora.algorithm].opposite:
        kind = "DoRA" if lora.dora else lora.algorithm
        *most, last = (name for name, algorithm in ALGORITHMS.items() if algorithm.opposite)
        others = f"{', '.join(most)} or {last}"
        remedy = f"{setting('lora.dora')} to off" if lora.dora else f"{setting('lora.algorithm')} to {others}"
        raise ValueError(
            f"A slider needs a LoRA that does the opposite at strength -1, and {kind} does not; set {remedy}."
        )
    if lora.embeddings:
        raise ValueError(
            f"A trained word has no opposite at strength -1; remove {node('embeddings')}, or set slider to off."
        )
    if lora.start:
        raise ValueError(
            f"A slider cannot continue another LoRA, as it would use that backwards, too; {put_beneath()}."
        )
    if config.dataset.paired:
        _check_pairs(config)
    else:
        _check_pictures(config)


def _check_pairs(config: RunConfig) -> None:
    """Raise ValueError for a second slider, and for concepts that have not the end that their role asks for."""
    if config.objective.nearest_noise > 1:
        raise ValueError(
            "Both pictures of a pair share one noise, which cannot be the nearest to each; set "
            f"{setting('objective.nearest_noise')} to 1."
        )
    if config.objective.slider != "off":
        raise ValueError(
            f"Two prompts and pairs of pictures would be two sliders; set {setting('objective.slider')} to off, or "
            f"{setting('controls.use')} to edit."
        )
    for concept in config.dataset.concepts:
        folder, stays = Path(concept.folder).name, concept.role in STAYING
        if concept.paired and stays:
            raise ValueError(
                f"The pictures of {folder} should stay as they are at both ends of the slider, as their role is "
                f"{concept.role}; set its role to train, or link it in after {node('controls')}."
            )
        if not concept.paired and not stays:
            raise ValueError(
                f"The pictures of {folder} have no other end of the slider; link it into "
                f"{node('controls')} with use slider, or set its role to regularisation."
            )


def _check_pictures(config: RunConfig) -> None:
    """Raise ValueError for concepts of which a slider of two prompts makes nothing."""
    if any(concept.role == "regularisation" for concept in config.dataset.concepts):
        raise ValueError(
            "A slider does not learn pictures, so that regularisation has no meaning; set "
            f"{setting('concepts.role')} to train, or to prior_prediction for captions that should stay as they are."
        )
    if config.train.validation_share or any(concept.role == "validation" for concept in config.dataset.concepts):
        raise ValueError(
            "A slider does not learn pictures, so that a validation loss says nothing of it; set "
            f"{setting('train.validation_share')} to 0, and remove concepts with the role validation."
        )
