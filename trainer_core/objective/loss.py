"""The loss of a batch: element errors and masks; every reduction is in float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.axes import like, mean_of_samples


def element_errors(prediction: Tensor, target: Tensor, loss: str = "mse", huber_c: Tensor | None = None) -> Tensor:
    """Compute the error of each element of (B, C, *axes) predictions, float32.

    huber_c: (B,), where the Huber losses turn from squared to absolute. huber and smooth_l1 are sd-scripts' smooth
    forms 2c (sqrt(d^2 + c^2) - c) and that / c, rearranged so that small errors keep digits; huber_true is Huber's.
    """
    difference = prediction.float() - target.float()
    if loss == "mse":
        return difference.square()
    if loss == "l1":
        return difference.abs()
    if loss == "log_cosh":
        return difference + F.softplus(-2 * difference) - math.log(2)
    assert huber_c is not None, loss
    c = like(huber_c, difference)
    if loss == "huber_true":
        size = difference.abs()
        return torch.where(size <= c, size.square() / 2, c * (size - c / 2))
    share = 2 * difference.square() / ((difference.square() + c.square()).sqrt() + c)
    return share * c if loss == "huber" else share


def huber_thresholds(c: float, schedule: str, scale: float, times: Tensor, sigmas: Tensor) -> Tensor:
    """Compute where the Huber losses of samples turn from squared to absolute, (B,).

    times: (B,) levels as shares of all; sigmas: (B,) noise-to-signal ratios. constant: c. exponential: c^time, falling
    from 1 to c. snr: falling from 1 to c by 1 / (1 + sigma)^2. All times scale.
    """
    if schedule == "exponential":
        return scale * c**times
    if schedule == "snr":
        return scale * ((1 - c) / (1 + sigmas).square() + c)
    return torch.full_like(sigmas, scale * c)


def reduction_factor(reduction: str, samples: int, micro_batches: int) -> float:
    """Compute the loss of a step as a multiple of the mean of its samples' losses.

    sum_batch: the sum over a micro-batch, averaged over the step's; sum_accumulate: the mean over a micro-batch, summed
    over them; sum: of all samples (OneTrainer's loss scaler: none, batch, gradient accumulation, both).
    """
    factors = {"mean": 1.0, "sum_batch": samples / micro_batches, "sum_accumulate": micro_batches, "sum": samples}
    return float(factors[reduction])


def sample_losses(
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    normalize: Tensor | None = None,
    loss: str = "mse",
    huber_c: Tensor | None = None,
) -> Tensor:
    """Compute the mean error of each sample, (B,) float32, before weights.

    mask: (B, 1, *axes) weights in 0..1. normalize: (B,) bool, divide by the mean of the mask where true; that mean is
    at least one latent pixel, so an empty mask gives 0 and never NaN. loss, huber_c: as in `element_errors`.
    """
    errors = element_errors(prediction, target, loss, huber_c)
    return mean_of_samples(errors) if mask is None else masked_mean(errors, mask, normalize)


def masked_mean(errors: Tensor, mask: Tensor, normalize: Tensor | None) -> Tensor:
    """Average errors times mask, (B,); where `normalize` is true, divide by the mean of the mask."""
    means = mean_of_samples(errors * mask)
    if normalize is None:
        return means
    area = mean_of_samples(mask).clamp(min=1 / mask[0].numel())
    return means / area.where(normalize, area.new_ones(()))
