"""The loss of a batch: squared error, SNR weight, mask; every reduction in float32."""

from __future__ import annotations

from torch import Tensor


def snr_weight(snr: Tensor, prediction: str, min_snr_gamma: float) -> Tensor:
    """Return (B,) weights: 1, or min-SNR-gamma (Hang et al. 2023): min(snr, g)/snr for epsilon, /(snr+1) for v."""
    if min_snr_gamma == 0:
        return snr.new_ones(snr.shape)
    return snr.clamp(max=min_snr_gamma) / (snr if prediction == "epsilon" else snr + 1)


def sample_losses(
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    normalize: Tensor | None = None,
    prior: Tensor | None = None,
    prior_weight: Tensor | None = None,
) -> Tensor:
    """Return the mean squared error of each sample, (B,) float32, before weights.

    mask: (B, 1, H, W) weights in 0..1; normalize: (B,) bool, divides by the mean of the mask where true, which
    is limited below by one latent pixel so that an empty mask gives 0 and never NaN. prior: what the frozen model
    predicts for the same input, (B, C, H, W); prior_weight (B,) times the error against it is added where the mask
    is not 1 (masked prior preservation).
    """
    errors = (prediction.float() - target.float()).square()
    if mask is None:
        return errors.mean(dim=(1, 2, 3))
    losses = _masked_mean(errors, mask, normalize)
    if prior is not None and prior_weight is not None:
        drift = (prediction.float() - prior.float()).square()
        losses = losses + prior_weight * _masked_mean(drift, 1 - mask, normalize)
    return losses


def _masked_mean(errors: Tensor, mask: Tensor, normalize: Tensor | None) -> Tensor:
    """Return the mean of errors times mask, (B,); divided by the mean of the mask where `normalize` says so."""
    means = (errors * mask).mean(dim=(1, 2, 3))
    if normalize is None:
        return means
    area = mask.mean(dim=(1, 2, 3)).clamp(min=1 / mask[0].numel())
    return means / area.where(normalize, area.new_ones(()))
