"""Teach ComfyUI's own loader the embedded tiny base model, and no other file."""

from typing import Any

import comfy.sd1_clip
import comfy.supported_models
import comfy.supported_models_base

WIDTH = 64  # of the UNet's first level, and of the text encoder


class TinyClipModel(comfy.sd1_clip.SDClipModel):
    """CLIP's text encoder with three layers of width 64 and one head."""

    def __init__(self, device="cpu", dtype=None, model_options=None):
        config = {
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": 3,
            "num_attention_heads": 1,
            "hidden_act": "quick_gelu",
            "max_position_embeddings": 77,
            "vocab_size": 49408,
            "eos_token_id": 49407,
        }
        super().__init__(
            device=device,
            dtype=dtype,
            textmodel_json_config=config,
            return_projected_pooled=False,
            model_options=model_options or {},
        )


class TinyTextEncoder(comfy.sd1_clip.SD1ClipModel):
    """Stable Diffusion 1's wrapper around the tiny text encoder."""

    def __init__(self, device="cpu", dtype=None, model_options=None):
        options: dict[str, Any] = {"model_options": model_options or {}, "clip_model": TinyClipModel}
        super().__init__(device=device, dtype=dtype, **options)


class TinyBase(comfy.supported_models.SD15):
    """Stable Diffusion 1 in miniature; these widths belong to no published model."""

    unet_config = {  # noqa: RUF012 - the base class reads a plain dict
        **comfy.supported_models.SD15.unet_config,
        "context_dim": WIDTH,
        "model_channels": WIDTH,
    }

    def clip_target(self, state_dict=None):
        """Give tokenizer and text encoder to ComfyUI's loader."""
        return comfy.supported_models_base.ClipTarget(comfy.sd1_clip.SD1Tokenizer, TinyTextEncoder)


def register_tiny_model() -> None:
    """Append the tiny model to ComfyUI's list: last, so that any other class that matches is taken first."""
    if not any(model.__name__ == TinyBase.__name__ for model in comfy.supported_models.models):
        comfy.supported_models.models.append(TinyBase)
