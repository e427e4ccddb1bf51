"""The weight of the loss at each noise level, a function of its signal-to-noise ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from ..config import ObjectiveConfig
from ..config.rows import rows_of

SNR_LIMIT = 1000.0  # cleaner timesteps get this one's weight where weights would grow or vanish without end
SETTINGS = {  # numbers of the formulas, and their defaults
    name: row.default
    for name, row in rows_of(ObjectiveConfig).items()
    if row.acts_with and row.acts_with[0] == "weighting"
}


class Ratios(NamedTuple):
    """What a weight is computed of, all of one shape."""

    snr: Tensor
    limited: Tensor  # the same, at most SNR_LIMIT
    noise: bool  # the model predicts noise
    clean_factor: Tensor  # squared error of the prediction per squared error of the clean latents that it implies


def _min_snr(at: Ratios, of: Mapping[str, float]) -> Tensor:
    """Weigh the loss on clean latents by min(snr, gamma) (Hang et al. 2023); gamma 0 is no weight."""
    gamma = of["min_snr_gamma"]
    return at.snr.clamp(max=gamma) / at.clean_factor if gamma else at.snr.new_ones(at.snr.shape)


def _soft_min_snr(at: Ratios, of: Mapping[str, float]) -> Tensor:
    """Weigh the loss on clean latents by snr gamma / (snr + gamma) (Crowson et al. 2024)."""
    gamma = of["min_snr_gamma"]
    return gamma / (at.snr + gamma) * (1 if at.noise else at.snr / at.clean_factor)


def _cos_map(at: Ratios, of: Mapping[str, float]) -> Tensor:
    """Compute 2 / (pi (1 - 2 t + 2 t^2)) at time t of a flow (Esser et al. 2024), as diffusers and sd-scripts do."""
    del of
    time = 1 / (1 + at.snr.sqrt())
    return 2 / (math.pi * (1 - 2 * time + 2 * time.square()))


FORMULAS: dict[str, Callable[[Ratios, Mapping[str, float]], Tensor]] = {
    "min_snr": _min_snr,
    "soft_min_snr": _soft_min_snr,
    # Yu et al. 2024; for v as in sd-scripts
    "debiased": lambda at, of: at.limited.rsqrt() if at.noise else 1 / (at.limited + 1),
    # Choi et al. 2022; for v with 2 instead of 1 as in OneTrainer
    "p2": lambda at, of: (at.snr + (1 if at.noise else 2)) ** -of["p2_gamma"],
    # weighs the v loss like the noise loss
    "v_scaled": lambda at, of: at.limited / (at.limited + 1),
    # the noise loss plus a share of the v loss
    "v_like": lambda at, of: 1 + of["v_like_weight"] * (at.limited + 1) / at.limited,
    "cos_map": _cos_map,
    # 1 / t^2 at time t of a flow, as for cos_map
    "sigma_sqrt": lambda at, of: (1 + at.limited.sqrt()).square(),
}


def snr_weight(
    snr: Tensor,
    prediction: str,
    clean_factor: Tensor,
    weighting: str = "min_snr",
    *,
    floor: float = 0.0,
    **settings: float,
) -> Tensor:
    """Compute the weight of the loss on a prediction at each ratio, shape as snr, at least `floor`.

    clean_factor: as in `Ratios`. settings: those of SETTINGS that differ from their defaults. Weights for v are finite
    where snr is 0.
    """
    ratios = Ratios(snr, snr.clamp(max=SNR_LIMIT), prediction == "epsilon", clean_factor)
    return FORMULAS[weighting](ratios, SETTINGS | settings).clamp(min=floor)
