"""The loss of a batch: squared error, SNR weight, mask; every reduction in float32."""

from __future__ import annotations

from torch import Tensor


def snr_weight(snr: Tensor, prediction: str, min_snr_gamma: float) -> Tensor:
    """Return (B,) weights: 1, or min-SNR-gamma (Hang et al. 2023): min(snr, g)/snr for epsilon, /(snr+1) for v."""
    if min_snr_gamma == 0:
        return snr.new_ones(snr.shape)
    return snr.clamp(max=min_snr_gamma) / (snr if prediction == "epsilon" else snr + 1)


def sample_losses(
    prediction: Tensor, target: Tensor, mask: Tensor | None = None, normalize: Tensor | None = None
) -> Tensor:
    """Return the mean squared error of each sample, (B,) float32, before weights.

    mask: (B, 1, H, W) weights in 0..1; normalize: (B,) bool, divides by the mean of the mask where true, which
    is limited below by one latent pixel so that an empty mask gives 0 and never NaN.
    """
    errors = (prediction.float() - target.float()).square()
    if mask is None:
        return errors.mean(dim=(1, 2, 3))
    losses = (errors * mask).mean(dim=(1, 2, 3))
    if normalize is None:
        return losses
    area = mask.mean(dim=(1, 2, 3)).clamp(min=1 / mask[0].numel())
    return losses / area.where(normalize, area.new_ones(()))
