"""The weight of the loss at each noise level, a function of its signal-to-noise ratio."""

from __future__ import annotations

import math

from torch import Tensor

SNR_LIMIT = 1000.0  # of debiased, v_scaled, v_like and sigma_sqrt: cleaner timesteps get this one's weight


def snr_weight(
    snr: Tensor,
    prediction: str,
    clean_factor: Tensor,
    weighting: str = "min_snr",
    *,
    min_snr_gamma: float = 0.0,
    p2_gamma: float = 1.0,
    v_like_weight: float = 0.1,
    floor: float = 0.0,
) -> Tensor:
    """Compute the weight of the loss on a prediction at each ratio, shape as snr, at least `floor`.

    clean_factor: squared error of the prediction per squared error of the clean latents that it implies, as snr.
    min_snr, soft_min_snr: the loss on clean latents times min(snr, gamma) (Hang et al. 2023), or times its smooth
    form snr gamma / (snr + gamma) (Crowson et al. 2024), over clean_factor; gamma 0 is no weight. debiased: Yu et al.
    2024, for v as in sd-scripts. p2: Choi et al. 2022, for v with 2 instead of 1 as in OneTrainer. v_scaled: weighs the
    v loss like the noise loss. v_like: the noise loss plus a share of the v loss. For flow, at time t: cos_map,
    2 / (pi (1 - 2 t + 2 t^2)), and sigma_sqrt, 1 / t^2, as in diffusers' and sd-scripts' training of Stable Diffusion 3
    (Esser et al. 2024). Weights for v are finite where snr is 0.
    """
    noise = prediction == "epsilon"
    limited = snr.clamp(max=SNR_LIMIT)
    if weighting == "min_snr" and min_snr_gamma == 0:
        weights = snr.new_ones(snr.shape)
    elif weighting == "min_snr":
        weights = snr.clamp(max=min_snr_gamma) / clean_factor
    elif weighting == "soft_min_snr":
        weights = min_snr_gamma / (snr + min_snr_gamma) * (1 if noise else snr / clean_factor)
    elif weighting == "debiased":
        weights = limited.rsqrt() if noise else 1 / (limited + 1)
    elif weighting == "p2":
        weights = (snr + (1 if noise else 2)) ** -p2_gamma
    elif weighting == "v_scaled":
        weights = limited / (limited + 1)
    elif weighting == "v_like":
        weights = 1 + v_like_weight * (limited + 1) / limited
    elif weighting == "cos_map":
        time = 1 / (1 + snr.sqrt())
        weights = 2 / (math.pi * (1 - 2 * time + 2 * time.square()))
    elif weighting == "sigma_sqrt":
        weights = (1 + limited.sqrt()).square()
    else:
        raise ValueError(f"There is no weighting {weighting!r}.")
    return weights.clamp(min=floor)
