"""The objective that a run minimises: noise levels, noise, targets, weights, the loss and its terms.

No formula counts axes: which there are, `common/axes.py` says. The tables of poolings in `noise.py` name each count.
"""

from .draws import Batch, DrawIndex, Draws, draws_at
from .objective import Objective
from .passes import Pass
from .path import AffinePath
from .settings import check_objective, describe_levels, objective_remarks
from .terms import Term, check_captions, check_roles, other_captions, prompts, strengths, terms_of, texts_beside
from .timesteps import level_shares

__all__ = [
    "AffinePath",
    "Batch",
    "DrawIndex",
    "Draws",
    "Objective",
    "Pass",
    "Term",
    "check_captions",
    "check_objective",
    "check_roles",
    "describe_levels",
    "draws_at",
    "level_shares",
    "objective_remarks",
    "other_captions",
    "prompts",
    "strengths",
    "terms_of",
    "texts_beside",
]
