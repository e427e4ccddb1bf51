"""Read a micro-batch from the cache: latents, masks, and the conditions for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..common.axes import spread
from ..common.rng import generator
from ..config import RunConfig
from ..data.masks import loss_mask
from ..data.plan import MicroBatch, Plan, Sample
from ..models import BaseModel, Conditioning
from ..objective import Batch, DrawIndex, Term
from .encoded import Encoded

ReadConditioning = Callable[
    ..., Conditioning
]  # turns a caption, and what the text encoders see with it, into its conditioning


def read_batch(
    encoded: Encoded, micro_batch: MicroBatch, plan: Plan, config: RunConfig, terms: Sequence[Term]
) -> Batch:
    """Read the latents and masks of a micro-batch, and the shares of terms in it.

    Random numbers depend on seed and indices only.
    """
    samples, seed, index = micro_batch.samples, config.train.seed, micro_batch.index
    means, stds = zip(*(encoded.latents(sample) for sample in samples), strict=True)
    latents = torch.stack(means)
    if config.objective.latent_sampling == "sample":
        # The cache holds mean and deviation, so that each visit draws anew without the autoencoder.
        for i, std in enumerate(stds):
            if std is not None:
                latents[i] += std * torch.randn(std.shape, generator=generator(seed, "latent", index, i))
    masks = [encoded.mask(sample) for sample in samples]
    mask, normalize = _weigh(masks, micro_batch, plan, latents.shape[2:])
    return Batch(
        index=DrawIndex(
            micro_batch=index,
            step=index // config.train.accumulate,
            first=micro_batch.first,
            step_samples=micro_batch.step_samples,
        ),
        latents=latents,
        weights=torch.tensor([sample.weight for sample in samples]),
        mask=mask,
        normalize=normalize,
        shares=_shares(terms, masks, samples, plan),
    )


def _shares(
    terms: Sequence[Term], masks: Sequence[Tensor | None], samples: Sequence[Sample], plan: Plan
) -> dict[type, Tensor]:
    """Ask each term how much it acts on each sample, (B,); those that act on none are left out."""
    concepts = [plan.concepts[sample.picture] for sample in samples]
    masked = [sample.use_mask and mask is not None for sample, mask in zip(samples, masks, strict=True)]
    shares = {type(term): torch.tensor(list(map(term.share, concepts, masked))) for term in terms}
    return {kind: share for kind, share in shares.items() if share.any()}


def _weigh(
    found: Sequence[Tensor | None], micro_batch: MicroBatch, plan: Plan, axes: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Build loss masks and normalize flags of a micro-batch, as in `Batch`; None without masks.

    found: the mask of each sample, if any. axes: of the latents, behind the channels.
    """
    masks = [None if mask is None else spread(mask, axes) for mask in found]
    kept = [plan.keeps(sample) for sample in micro_batch.samples]
    if all(mask is None for mask in masks) and not any(kept):
        return None, None
    weights, normalize = [], []
    for sample, mask, keeps in zip(micro_batch.samples, masks, kept, strict=True):
        settings = plan.concepts[sample.picture].masks
        if mask is None or settings is None:
            weights.append(torch.ones(1, *axes))
            normalize.append(keeps)
        else:
            weights.append(loss_mask(mask[None], torch.tensor([sample.use_mask]), settings.unmasked_weight)[0])
            normalize.append(settings.normalize_masked_area)
        if keeps:  # of the frame that it sees without noise, the prediction is not used
            weights[-1] = weights[-1].index_fill(1, torch.tensor([0]), 0.0)
    return torch.stack(weights), torch.tensor(normalize)


def build_conditions(
    base: BaseModel,
    encoded: Encoded,
    read: ReadConditioning,
    plan: Plan,
    samples: Sequence[Sample],
    device: torch.device,
) -> object:
    """Batch the conditions of samples: captions, framings, inpainting latents, control pictures."""
    files = [plan.file(sample) for sample in samples]
    crops = [sample.crop for sample in samples]
    framings = [crop.framing(file.size) for crop, file in zip(crops, files, strict=True)]
    painted = [each for sample in samples if (each := encoded.painted(sample)) is not None]
    seen = [plan.shown(sample) for sample in samples]
    # The text encoders of some edit models see the control pictures, too.
    captions = [
        read(sample.caption, each) if each and base.text.seen_as else read(sample.caption)
        for sample, each in zip(samples, seen, strict=True)
    ]
    references = [encoded.references(each) for each in seen] if any(seen) else ()
    return base.conditions.batch(captions, framings, device, torch.stack(painted) if painted else None, references)
