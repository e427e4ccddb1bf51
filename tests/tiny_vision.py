"""A small CLIP vision model of ComfyUI with random weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch


def tiny_vision(width: int = 32) -> Any:
    """Build one; width: of what it says of each part of a picture."""
    import comfy.clip_vision

    config = {
        "model_type": "clip_vision_model",
        "hidden_size": width,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "layer_norm_eps": 1e-5,
        "image_size": 28,
        "patch_size": 14,
        "num_channels": 3,
        "projection_dim": 8,
        "hidden_act": "gelu",
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"  # older ComfyUIs take a file alone
        file.write_text(json.dumps(config))
        vision = comfy.clip_vision.ClipVisionModel(str(file))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in vision.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.2)
    return vision
