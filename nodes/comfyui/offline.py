"""ComfyUI's check of LoRA files without a server: its models are built from a file's header, without weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import comfy.model_detection
import comfy.utils
import torch
from safetensors import safe_open
from torch import Tensor

from ...trainer_core.lora_files.loader import Loader
from ...trainer_core.models.files.safetensors_file import read_header
from . import models
from .tiny import register_tiny_model

SMALL = 1024  # numbers: up to here tensors are read, as ComfyUI tells some models apart by values
NOWHERE = torch.device("meta")


def loader(file: Path | None) -> Loader:
    """Build the check of LoRA files for a model's file; without one only endings of names are checked."""
    outline = None if file is None else outline_models(file)
    if outline is None:
        report = "ComfyUI's loader reads every layer. Whether a model has them was not checked"
        report += "." if file is None else f": ComfyUI knows no model like {file.name}."
        return Loader(models.check_loads, lambda _: True, report)
    keys = models.lora_keys(*outline)
    report = f"ComfyUI's loader finds the weight of every layer in {file and file.name}."
    return Loader(lambda path: models.check_lora(path, *outline), keys.__contains__, report)


def outline_models(file: Path) -> tuple[Any, Any] | None:
    """Build MODEL and CLIP of a model's file without weights, as far as checks of names and shapes need them.

    CLIP is None where the file has no text encoders. None for a file that ComfyUI does not know.
    """
    register_tiny_model()
    tensors, metadata = _tensors(file)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    own = comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=True) or dict(tensors)
    config = cast("Any", comfy.model_detection.model_config_from_unet(own, "", metadata=metadata))
    if config is None:
        return None
    config.set_inference_dtype(torch.float16, None)
    model = SimpleNamespace(model=config.get_model(own, "", device=NOWHERE))
    target = config.clip_target(state_dict=tensors)
    if target is None or not config.process_clip_state_dict(dict(tensors)):
        return model, None
    text = target.clip(device=NOWHERE, dtype=torch.float16, model_options={})
    return model, SimpleNamespace(cond_stage_model=text)


def _tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Read a file's header, and its small tensors; the others have no data."""
    shapes = read_header(file).shapes
    with safe_open(file, "pt") as opened:
        tensors = {
            name: opened.get_tensor(name)
            if torch.Size(shape).numel() <= SMALL
            else torch.empty(shape, dtype=torch.float16, device=NOWHERE)
            for name, shape in shapes.items()
        }
        return tensors, opened.metadata()
