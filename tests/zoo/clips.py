"""Tiny random CLIPs in ComfyUI's own classes, each with a tiny model that takes what they give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from zoo.linked import PooledVae, keep
from zoo.zoo import SD3, ZOO, build, fill

import zoo.comfy_here  # noqa: F401  # isort: skip
import comfy.sd
import comfy.supported_models_base
from comfy.text_encoders import anima, flux, sd3_clip

from lora_atelier.nodes.comfyui.connected.live import LinkedModels
from lora_atelier.trainer_core.config import BaseModelConfig, ConnectedConfig

CLIP = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
T5 = {"num_layers": 2, "d_model": 48, "d_ff": 64, "d_kv": 24, "num_heads": 2}
QWEN = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2}
SIZES = {
    "clip_l_model_config": CLIP,
    "clip_g_model_config": CLIP | {"num_attention_heads": 4},
    "t5xxl_model_config": T5,
    "qwen3_06b_model_config": QWEN | {"num_key_value_heads": 1},
}
KINDS: dict[str, tuple[str, Any, Any]] = {  # the row of the model, its CLIP and its tokenizer
    "flux": ("flux_dev", flux.flux_clip(), flux.FluxTokenizer),
    "sd3": ("sd3", sd3_clip.sd3_clip(t5=False), sd3_clip.SD3Tokenizer),
    "sd3 with T5": ("sd3", sd3_clip.sd3_clip(), sd3_clip.SD3Tokenizer),
    "sd3 of T5": ("sd3", sd3_clip.sd3_clip(clip_l=False, clip_g=False), sd3_clip.SD3Tokenizer),
    "anima": ("anima", anima.te(), anima.AnimaTokenizer),
}
MIXED = {"mixed_ops": True}  # what ComfyUI makes of a file with a scale for each layer
# Stable Diffusion 3's text encoders pad all that they give to this width.
WIDE = {"context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}}
SD3_OF_CLIPS = replace(ZOO["sd3"], config=SD3 | WIDE | {"adm_in_channels": 64})


NARROW = {"context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128}}}
SD3_OF_T5 = replace(ZOO["sd3"], config=SD3 | NARROW | {"adm_in_channels": 768 + 1280})  # zeros of CLIP-L and -G


def clip_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Any:
    """Build a CLIP with random weights on the CPU."""
    clip = _clip(target_of(kind, KINDS[kind][1]), dtype)
    fill(clip.cond_stage_model, seed)
    return clip


def target_of(kind: str, model: Any) -> Any:
    """Pair a model with the tokenizer of a kind."""
    return comfy.supported_models_base.ClipTarget(lambda **_: tokenizer_of(kind), model)


@cache
def tokenizer_of(kind: str) -> Any:
    """Build the tokenizer of a kind once: it is read from large files, and nothing changes it."""
    return KINDS[kind][2]()


def _clip(target: Any, dtype: torch.dtype = torch.float32, files: Sequence[Any] = ()) -> Any:
    cpu = torch.device("cpu")
    devices = {"load_device": cpu, "offload_device": cpu, "initial_device": cpu}
    return comfy.sd.CLIP(target, state_dict=list(files), model_options=SIZES | devices | {"dtype": dtype})


def scaled_clip() -> Any:
    """Build FLUX's CLIP with a T5 in scaled float8, as ComfyUI loads such files."""
    plain = clip_of("flux").cond_stage_model
    state = dict(plain.t5xxl.transformer.state_dict())
    for path, module in plain.t5xxl.transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = state[f"{path}.weight"]
            state[f"{path}.weight_scale"] = scale = (weight.abs().max() / 448).float()
            state[f"{path}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            quant = json.dumps({"format": "float8_e4m3fn"}).encode()
            state[f"{path}.comfy_quant"] = torch.tensor(list(quant), dtype=torch.uint8)
    target = target_of("flux", flux.flux_clip(t5_quantization_metadata=MIXED))
    return _clip(target, files=[dict(plain.clip_l.transformer.state_dict()), state])


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a MODEL that takes what a CLIP gives."""
    with patch.dict(ZOO, {"sd3": SD3_OF_T5 if kind == "sd3 of T5" else SD3_OF_CLIPS}):
        return build(KINDS[kind][0], dtype=dtype)[1]


def linked_with(
    kind: str, clip: Any = None, sampled: Any = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> BaseModelConfig:
    """Link a tiny model and a CLIP of its kind, as Use Connected Model does."""
    row = KINDS[kind][0]
    live = LinkedModels(model_of(kind, dtype), clip or clip_of(kind, dtype), PooledVae(row), sampled)
    return keep(BaseModelConfig(path=row, connected=ConnectedConfig(**settings)), live)
