"""The nodes of the network, the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..algorithms import ALGORITHMS
from ..embedding import EmbeddingConfig
from ..network import BeneathConfig, LoraConfig
from ..optimizer import RATES, OptimizerConfig
from ..optimizer_table import OPTIMIZERS, Optimizer
from ..rows import Row, rows_of
from ..scheduler import SchedulerConfig
from .form import Form, form, linked

NONE = "none"  # the choice of no file
USUAL = "Not linked = as suits the model."


def _lora() -> Iterable[Row]:
    """Show algorithms that rarely need options without them, and the base model that the node looks at."""
    for each in rows_of(LoraConfig).values():
        if each.name == "names":
            yield linked(
                "base_model",
                "ATELIER_BASE_MODEL",
                "Optional, from Load Base Model or Use Connected Model: shows layers, parameters, file size and blocks "
                "on this node. Training does not depend on it.",
                optional=True,
            )
        shown = tuple(name for name in each.acts_with[1] if not ALGORITHMS[name].bare) if each.acts_with else ()
        yield replace(each, acts_with=("algorithm", shown)) if shown else each


def _existing() -> Iterable[Row]:
    yield linked(
        "lora_config", "ATELIER_LORA_CONFIG", f"From LoRA Config, or another Existing LoRA. {USUAL}", optional=True
    )
    yield Row(
        name="lora_name",
        default=NONE,
        words="A .safetensors file of models/loras: of kohya, musubi, ai-toolkit, diffusers, OneTrainer, LyCORIS or "
        "this pack. none: this node changes nothing. Ignored if lora is linked.",
        listed=True,
        socketless=True,
    )
    yield Row(
        name="use",
        choices=("continue", "beneath"),
        default="continue",
        words="continue: train this LoRA further; its layers, ranks and alphas replace those of LoRA Config. beneath: "
        "add it to the base model while a new LoRA is trained, which does not repeat what this one does.",
    )
    yield rows_of(BeneathConfig)["strength"]
    yield linked(
        "lora",
        "LORA_MODEL",
        "Optional: a LoRA of the graph, from Train LoRA, Resize LoRA or a loader. Replaces lora_name.",
        optional=True,
    )
    yield rows_of(BeneathConfig)["training_only"]


def _embedding() -> Iterable[Row]:
    yield linked(
        "lora_config",
        "ATELIER_LORA_CONFIG",
        f"From LoRA Config, Existing LoRA, or another Embedding. {USUAL}",
        optional=True,
    )
    yield from rows_of(EmbeddingConfig).values()


def _optimizer() -> Iterable[Row]:
    """Put two learning rates and the optimizer's own parameters inside of each name, in words that suit it."""
    rows = rows_of(OptimizerConfig)
    unet, text = (rows[name] for name in RATES[:2])

    def inside(kind: Optimizer) -> tuple[Row, ...]:
        if kind.estimates:
            on_unet = (
                "A factor on the step size that the optimizer finds. -1: 1, which suits every model. 0 = the UNet "
            )
            on_unet += "is not trained. Range 0 to 100."
            on_text = "1 trains the text encoder as well; 0 does not, which is faster and safer."
        else:
            on_unet = (
                f"Learning rate of the UNet. -1: as suits the model, {kind.learning_rate:g} for Stable Diffusion. "
            )
            on_unet += "0 = the UNet is not trained. Range 0 to 100."
            on_text = "Learning rate of the text encoder. 0 = the text encoder is not trained, which is faster and "
            on_text += f"safer; {kind.learning_rate / 2:g} is usual otherwise. Range 0 to 100."
        return replace(unet, words=on_unet), replace(text, words=on_text), *kind.settings

    yield replace(rows["name"], options={name: inside(kind) for name, kind in OPTIMIZERS.items()})
    yield from (each for each in rows.values() if each.name not in ("name", *RATES[:2]))


FORMS: dict[str, Form] = {
    "AtelierLoraConfig": form("LoRA Config", _lora(), "LORA_CONFIG"),
    "AtelierExistingLora": form("Existing LoRA", _existing(), "LORA_CONFIG"),
    "AtelierEmbedding": form("Embedding", _embedding(), "LORA_CONFIG"),
    "AtelierOptimizer": form("Optimizer", _optimizer(), "OPTIMIZER"),
    "AtelierScheduler": form("Scheduler", rows_of(SchedulerConfig).values(), "SCHEDULER"),
}
