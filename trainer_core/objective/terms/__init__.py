"""What guides a run beside its pictures: a list of terms, made of its settings; everybody asks the list.

prior: the frozen model's prediction as a target · slider: two prompts, or pairs of pictures · guidance: a prediction
without a caption · differential: past the target · preservation: other captions keep their predictions · uncertainty:
a learned weight of each level
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...common.wording import names
from ...config import RunConfig
from ...data.plan import MicroBatch, Plan
from . import differential, guidance, preservation, prior, slider, uncertainty
from .term import Strengths, Term

KINDS = (slider, guidance, prior, differential, preservation, uncertainty)  # in the order in which they move a target


def terms_of(config: RunConfig) -> list[Term]:
    """List the terms of a run's loss; raises ValueError for settings with which one has no meaning."""
    return [term for kind in KINDS for term in kind.terms_of(config)]


def texts_beside(terms: Sequence[Term], caption: str) -> set[str]:
    """List the captions that passes on a caption read beside it."""
    return set[str]().union(*(term.beside(caption) for term in terms))


def prompts(terms: Sequence[Term], micro_batch: int | None = None) -> set[str]:
    """List what passes on a micro-batch read whatever its captions; None: on any of the run."""
    return set[str]().union(*(term.prompts(micro_batch) for term in terms))


def other_captions(terms: Sequence[Term], plan: Plan) -> set[str]:
    """List the captions that a run reads beside its own."""
    captions = plan.captions(trained_only=True) if terms else ()
    return prompts(terms).union(*(texts_beside(terms, caption) for caption in captions))


def check_captions(terms: Sequence[Term], captions: Collection[str]) -> None:
    """Raise ValueError for a term that does nothing for the captions that are trained."""
    for term in terms:
        term.check(captions)


def check_roles(terms: Sequence[Term], plan: Plan) -> None:
    """Raise ValueError for roles of single pictures where no picture is learned."""
    found = [picture.name for picture in plan.manifest.pictures if picture.own.role not in ("", "train")]
    if found and not all(term.learns_pictures for term in terms):
        raise ValueError(
            f"A slider does not learn pictures, so that roles of single ones have no meaning; remove that of "
            f"{names(found)}."
        )


def strengths(terms: Sequence[Term], micro_batch: MicroBatch) -> Strengths:
    """List the strengths of the network that a micro-batch is trained at, with its samples at each."""
    found = (term.strengths(micro_batch) for term in terms)
    return next((each for each in found if each is not None), ((1, micro_batch),))


__all__ = [
    "Term",
    "check_captions",
    "check_roles",
    "other_captions",
    "prompts",
    "strengths",
    "terms_of",
    "texts_beside",
]
