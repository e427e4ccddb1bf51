"""Measure what a finished run has changed: the size of its changes, and by how much a fixed prediction moves."""

from __future__ import annotations

from typing import Any

import torch

from ..common.rng import generator
from ..config import node, setting
from ..data.plan import Sample
from ..lora_files.write import delta_norms
from ..models import mentions, word_ids
from ..objective import draws_at
from .state import Run

NOTHING = 1e-6  # a norm, or a relative change of a prediction, up to which nothing was learned
Effect = dict[str, Any]  # prediction: relative change, None where unknown; norms: of each part's changes by its title


@torch.no_grad()
def measure_effect(run: Run) -> Effect:
    """Compare the model with and without the attached network on one picture of the run, with fixed noise.

    The level is the middle one. norms: Frobenius norms of all changes of a part together; parts whose layers have no
    product of factors are left out. words: whether only words were trained.
    """
    sample, path = _one_sample(run), run.objective.path
    run.encode([sample])
    latents = run.encoded.latents(sample)[0][None].to(run.device)
    noise = torch.randn(latents.shape[1:], generator=generator(run.config.train.seed, "effect"))[None].to(run.device)
    level = torch.tensor([run.objective.levels.at(0.5, len(path))])
    seen = run.passing([sample], draws_at(latents, noise, level, path.at(level, run.device)), run.reader(training=True))
    trained, frozen = seen.without_gradients().float(), seen.frozen().float()
    whole = float(frozen.norm())
    moved = float((trained - frozen).norm()) / whole if whole else None
    return {"prediction": moved, "norms": _norms(run), "words": not run.network.layers}


def _one_sample(run: Run) -> Sample:
    """Find the first sample of the run; where only words are trained, the first whose caption has one."""
    plan, words = run.plan, word_ids(run.config.lora.embeddings)
    samples = (sample for step in range(plan.steps) for each in plan.step(step) for sample in each.samples)
    return next(sample for sample in samples if run.network.layers or mentions(sample.caption, words))


def _norms(run: Run) -> dict[str, float]:
    """Add up the norms of the changes of each part."""
    layers, squares = set(run.network.layers), dict[str, float]()
    norms = delta_norms({name: tensor.detach() for name, tensor in run.network.tensors().items()})
    for name, norm in norms.items():
        part = next((part for part in run.base.parts if name.startswith(f"{part.prefix}_")), None)
        if part is not None and name in layers:
            squares[part.title] = squares.get(part.title, 0.0) + norm**2
    return {title: total**0.5 for title, total in squares.items()}


def describe_effect(effect: Any) -> str:
    """Say what a run has changed; "" for what no run of ours has written."""
    if not isinstance(effect, dict) or not isinstance(effect.get("norms"), dict):
        return ""
    moved, norms = effect.get("prediction"), effect["norms"]
    what, rate = ("LoRA", "optimizer.learning_rate")
    if effect.get("words") is True:
        what, rate = ("embedding", "embeddings.learning_rate")
    if isinstance(moved, float) and moved <= NOTHING:
        return f"The {what} has no effect: a prediction is the same without it. Set {setting(rate)} higher."
    parts = [f"{title} {norm:.3g}" for title, norm in norms.items() if isinstance(norm, float) and norm > NOTHING]
    still = [title for title, norm in norms.items() if isinstance(norm, float) and norm <= NOTHING]
    sentences = [f"The {what} changes a prediction by {moved:.1%}." if isinstance(moved, float) else ""]
    sentences += [f"Norm of its changes: {', '.join(parts)}."] if parts else []
    sentences += (
        [f"Nothing was learned by {', '.join(still)}; set its learning rate in {node('optimizer')} higher."]
        if still
        else []
    )
    return " ".join(filter(None, sentences))
