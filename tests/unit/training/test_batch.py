"""A batch of encoded samples of any number of axes, on its way from the cache's files to the loss."""

from types import SimpleNamespace

import pytest
import torch

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    ObjectiveConfig,
    RunConfig,
)
from lora_atelier.trainer_core.data.cache import Cache
from lora_atelier.trainer_core.data.crops import fit
from lora_atelier.trainer_core.data.plan import MicroBatch, Sample
from lora_atelier.trainer_core.objective import terms_of
from lora_atelier.trainer_core.objective.loss import sample_losses
from lora_atelier.trainer_core.training.batch import read_batch
from lora_atelier.trainer_core.training.encoded import Encoded

KINDS = {  # axes of latents, and of the mask
    "sound": ((24,), (24,)),
    "picture": ((4, 6), (4, 6)),
    "clip": ((3, 4, 6), (4, 6)),
    "clip with its own mask": ((3, 4, 6), (3, 4, 6)),
}
DRAWS = torch.Generator().manual_seed(0)


def batch_of(folder, axes, mask, normalize):
    """Write three samples to a cache, the first two with a mask, of which the second leaves it out; read them again."""
    latents = [torch.randn(5, *axes, generator=DRAWS) for _ in range(3)]
    samples = tuple(
        Sample(picture=i, visit=0, crop=fit((64, 64), (64, 64)), caption="", use_mask=i == 0, weight=1.0)
        for i in range(3)
    )
    with Cache(folder) as cache:
        for i, each in enumerate(latents):
            cache.put(f"latents {i}", {"mean": each, "std": torch.full_like(each, 0.5)})
        cache.put("mask", {"mask": mask})
    masks = MaskConfig(unmasked_weight=0.25, normalize_masked_area=normalize)
    concepts = (ConceptConfig(folder="masked", masks=masks), ConceptConfig(folder="plain"))
    config = RunConfig(
        base_model=BaseModelConfig(path=""),
        dataset=DatasetConfig(concepts=concepts),
        objective=ObjectiveConfig(latent_sampling="mean"),
    )
    manifest = SimpleNamespace(pictures=[SimpleNamespace(concept=concept) for concept in (0, 0, 1)])
    of_each = [concepts[concept] for concept in (0, 0, 1)]
    plan = SimpleNamespace(manifest=manifest, concepts=of_each, keeps=lambda sample: False)
    encoded = Encoded(
        cache=Cache(folder),
        latent_keys={sample.view: f"latents {i}" for i, sample in enumerate(samples)},
        mask_keys={sample.view: "mask" for sample in samples[:2]},
    )
    read = read_batch(encoded, MicroBatch(index=0, samples=samples, bucket=(64, 64)), plan, config, terms_of(config))
    return torch.stack(latents), read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_masked_loss_is_the_mean_of_its_frames(tmp_path, kind, normalize):
    """Worked out by frames, whether the mask is of all of them or of each."""
    axes, own = KINDS[kind]
    mask = (torch.rand(1, *own, generator=DRAWS) - 0.5).clamp(min=0)
    clean, batch = batch_of(tmp_path, axes, mask, normalize)
    assert torch.equal(batch.latents, clean) and batch.mask.shape == (3, 1, *axes)
    prediction = torch.randn(3, 5, *axes, generator=DRAWS)
    found = sample_losses(prediction, batch.latents, batch.mask, batch.normalize)

    frames = axes[0] if len(axes) == 3 else 1
    errors = (prediction - clean).square().view(3, 5, frames, -1)
    weights = mask.clamp(min=0.25).view(-1, errors.shape[-1]).expand(frames, -1)
    masked = torch.stack([(errors[0, :, t] * weights[t]).mean() for t in range(frames)]).mean()
    area = weights.mean() if normalize else 1.0
    torch.testing.assert_close(found, torch.stack([masked / area, errors[1].mean(), errors[2].mean()]))
