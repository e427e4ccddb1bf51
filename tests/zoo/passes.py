"""One pass of a tiny model through ComfyUI's own code."""

import comfy.sampler_helpers
import comfy.samplers
import torch
from zoo.zoo import conditioning, latents


@torch.no_grad()
def run_once(model, name, tokens=0):
    """Compute the clean latents that a model predicts for one noised sample; tokens: of its text."""
    noised = latents(name)
    sigma = model.model_sampling.sigmas[len(model.model_sampling.sigmas) // 2].float().view(1)
    captions = comfy.sampler_helpers.convert_cond(conditioning(name, tokens=tokens))
    (made,) = comfy.samplers.encode_model_conds(
        model.extra_conds, captions, noised, noised.device, "positive", latent_shapes=[noised.shape]
    )
    conditions = {key: cond.process_cond(batch_size=1, area=None) for key, cond in made["model_conds"].items()}
    joint = comfy.samplers.cond_cat([conditions])
    options = {"cond_or_uncond": [0], "sigmas": sigma, "uuids": [0]}
    return model.apply_model(noised, sigma, **joint, transformer_options=options)
