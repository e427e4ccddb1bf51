"""Fill in what a person has left open: settings that suit the base model's family."""

from __future__ import annotations

from ..config import AUTO_RATE, OPTIMIZERS, LoraConfig, OptimizerConfig, RunConfig, SampleConfig
from ..models import Source, Usual

SIDES = 64  # sides of samples are multiples of it, in pixels
FITS = (0.6, 1.7)  # resolutions that a model still draws well at, as multiples of its own


def with_defaults(config: RunConfig, source: Source) -> tuple[RunConfig, list[str]]:
    """Set rank, learning rate, resolution and the size of samples where they are open; say what was taken.

    source: of the base model, whose headers are read. Also remarks on a resolution that the model was not made for.
    """
    usual = source.usual()
    lora, optimizer, train = filled_lora(config.lora, usual), _optimizer(config.optimizer, usual), config.train
    taken = []
    if not config.lora.rank:
        taken.append(f"rank {lora.rank}")
    if optimizer is not config.optimizer:
        taken.append(f"learning rate {optimizer.learning_rate:g}")
    if not train.resolution:
        train = train.replace(resolution=usual.resolution)
        taken.append(f"resolution {train.resolution}")
    said = [f"Taken as suits {usual.title}: {', '.join(taken)} ({usual.source})."] if taken else []
    if config.train.resolution and not FITS[0] <= train.resolution / usual.resolution <= FITS[1]:
        said.append(
            f"{usual.title} was made for about {usual.resolution} pixels, and resolution is {train.resolution}. Unless "
            "that is meant, set resolution of Train LoRA to 0."
        )
    sample = _sample(config.sample, train.resolution)
    return config.replace(lora=lora, optimizer=optimizer, train=train, sample=sample), said


def filled_lora(config: LoraConfig, usual: Usual) -> LoraConfig:
    """Set the rank where it is open, and with it an alpha that is the rank."""
    if config.rank:
        return config
    return config.replace(rank=usual.rank, alpha=config.alpha or usual.rank)


def _optimizer(config: OptimizerConfig, usual: Usual) -> OptimizerConfig:
    """Set the learning rate where it is open: the family's, in the proportion that the optimizer has to AdamW."""
    if config.learning_rate != AUTO_RATE:
        return config
    kind = OPTIMIZERS[config.name]
    share = 1.0 if kind.estimates else usual.learning_rate / OPTIMIZERS["adamw"].learning_rate
    return config.replace(learning_rate=float(f"{kind.learning_rate * share:.6g}"))


def _sample(config: SampleConfig, resolution: int) -> SampleConfig:
    side = max(SIDES, resolution // SIDES * SIDES)
    return config.replace(width=config.width or side, height=config.height or side)
