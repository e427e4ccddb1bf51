"""Estimates of the memory of a step on the tiny UNet."""

from __future__ import annotations

import torch
from tiny_models import model_of, tiny_unet

from lora_atelier.trainer_core.config import BaseModelConfig, DatasetConfig, LoraConfig, RunConfig
from lora_atelier.trainer_core.memory import recompute as recompute_blocks
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.networks import Network, choose_layers
from lora_atelier.trainer_core.objective import Objective, terms_of
from lora_atelier.trainer_core.preflight.estimate import LargestBatch, estimate_step

PLAIN = RunConfig(base_model=BaseModelConfig(path=""), dataset=DatasetConfig())


def meta_base(checkpointing=False, dtype=torch.float32):
    with torch.device("meta"):
        unet = torch.nn.Module.to(tiny_unet().eval(), dtype)
    if checkpointing:
        recompute_blocks(units(unet), "full")
    base = model_of(unet)
    base.dtype = dtype
    return base


def estimate(base=None, rank=4, init="default", **options):
    """Estimate a step at 128 px, counted to the byte; run: whose terms it has."""
    base, trained, run = base or meta_base(), options.pop("trained", ("lora_unet",)), options.pop("run", PLAIN)
    config = LoraConfig(rank=rank, alpha=4, preset="full", init=init)
    with torch.device("meta"):
        network = Network(choose_layers(base, config, trained), config, seed=0)
    objective = Objective(run.objective, base.noise, 0, base.levels, terms_of(run))
    for term in objective.terms:
        term.begin(objective.path, 0, torch.device("meta"))
    shape = LargestBatch(**{"samples": 1, "latents": (16, 16), "tokens": 77, **options.pop("shape", {})})
    return estimate_step(base, network, objective, shape, **{"block": 1, **options})
