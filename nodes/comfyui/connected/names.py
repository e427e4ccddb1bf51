"""Names of layers in LoRA files, looked up in ComfyUI's own map of them; and the family that a file is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import comfy.lora
import comfy.model_base
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from ....trainer_core.lora_files.diffusers_names import diffusers_paths, why_unnamed
from ....trainer_core.lora_files.match import flat_name
from ....trainer_core.lora_files.names import DIFFUSERS, OWN, Named, Names, Weight, of_diffusers
from ....trainer_core.models.architectures import ARCHITECTURES
from ....trainer_core.models.base import NameForm, Slice
from ....trainer_core.models.sd.identify import made_for as made_for_unet
from ....trainer_core.models.sd.names import PREFIXES, file_forms
from ....trainer_core.networks.layers.shape import weight_shape

WEIGHT = ".weight"
OF_DIFFUSERS = (DIFFUSERS, "diffusion_model.", "lora_transformer_")  # of its paths; ai-toolkit, OneTrainer, too
TEXT_NUMBER = re.compile(r"lora_te(\d?)_")
DENOISER = "diffusion_model."  # start of its modules' names in ComfyUI's models


def aliases(model: Any) -> tuple[dict[str, list[str]], dict[str, dict[str, Slice]]]:
    """Map paths of a denoiser's modules to their names in LoRA files, and to those of their slices.

    model: ComfyUI's BaseModel. Names have underscores for dots. One that ComfyUI gives to several layers is left out.
    """
    paths = _paths(model)
    known = set(paths)
    layers: dict[str, set[tuple[str, Slice | None]]] = {}
    for key, target in comfy.lora.model_lora_keys_unet(model, {}).items():
        layer = _located(model, key, target, known)
        if layer is not None:
            layers.setdefault(flat_name(key), set()).add(layer)
    for prefix in PREFIXES:
        for path in paths:
            layers.setdefault(flat_name(prefix + path), {(path, None)})
    whole: dict[str, list[str]] = {}
    slices: dict[str, dict[str, Slice]] = {}
    for name, found in layers.items():
        path, piece = next(iter(found))
        if len({(path, piece and piece[1:]) for path, piece in found}) > 1:
            continue
        if piece is None:
            whole.setdefault(path, []).append(name)
        else:
            slices.setdefault(path, {})[name] = piece
    return whole, slices


def _paths(model: Any) -> list[str]:
    """List the paths of a denoiser's modules with weights; loaders of GGUF state one more, for the memory it takes."""
    keys = (key for key in model.state_dict() if key.startswith(DENOISER) and key.endswith(WEIGHT))
    known = {path for path, _ in model.diffusion_model.named_modules(remove_duplicate=False)}
    return [path for key in keys if (path := key[len(DENOISER) : -len(WEIGHT)]) in known]


def diffusers_layers(model: Any) -> dict[str, tuple[str, Slice | None]]:
    """Map diffusers' names of a transformer's layers in LoRA files to paths and slices; {} for a UNet.

    model: ComfyUI's BaseModel. Names have underscores for dots.
    """
    if comfy.utils.unet_to_diffusers(model.model_config.unet_config):
        return {}
    found: dict[str, tuple[str, Slice | None]] = {}
    for path, named in _diffusers_paths(model).items():
        for name, piece in of_diffusers(OF_DIFFUSERS, named).items():
            found[name] = path, piece and piece._replace(comfy="")
    return found


def names_of(model: Any, clip: Any) -> Names:
    """Collect the names of all layers of a MODEL and a CLIP in files of several programs; clip: None where unlinked."""
    weights: dict[str, Weight] = {}
    base = model.model
    unet = comfy.utils.unet_to_diffusers(base.model_config.unet_config)
    whole, slices = aliases(base)
    xl = isinstance(base, comfy.model_base.SDXL | comfy.model_base.SDXLRefiner)
    dotted = _unet_paths(unet, xl=xl) if unet else _diffusers_paths(base)
    for path, known in whole.items():
        weights[DENOISER + path] = Weight(
            key=DENOISER + path,
            rows=weight_shape(base.get_submodule(DENOISER + path))[0],
            diffusers=tuple(dotted.get(path, ())),
            # ComfyUI's map has those of old attention processors alone.
            aliases={
                **of_diffusers(("unet.",) if unet else OF_DIFFUSERS, dotted.get(path, ())),
                **dict.fromkeys(known),
                **slices.get(path, {}),
            },
        )
    texts = {} if clip is None else _names_of_texts(clip.cond_stage_model)
    if unet:
        forms = file_forms(original=xl)
    else:
        forms = _forms(base, {name.name for names in dotted.values() for name in names})
    return Names(
        weights=weights | texts,
        forms=forms,
        without_alpha=frozenset({"diffusers"} if unet else {"diffusers", "ai-toolkit"}),
        texts=len({weight.text for weight in texts.values() if weight.text}),
        unnamed="" if unet or all(weight.diffusers for weight in weights.values()) else why_unnamed(_rows(base)),
    )


def _forms(base: Any, dotted: set[str]) -> dict[str, NameForm]:
    """Find how programs name the layers of a transformer; dotted: paths of diffusers.

    ai-toolkit writes diffusers' files for FLUX.1, for others ComfyUI's names, or diffusers' behind the same start.
    OneTrainer's are flat where ComfyUI knows them so.
    """
    known = comfy.lora.model_lora_keys_unet(base, {})
    own = {path[: -len(WEIGHT)] for path in base.state_dict() if path.endswith(WEIGHT)}
    cascade = isinstance(base, comfy.model_base.StableCascade_C)
    behind = any(f"{DENOISER}{name}" in known and f"{DENOISER}{name}" not in own for name in dotted)
    flat = any(f"lora_transformer_{flat_name(name)}" in known for name in dotted)
    return {
        "kohya": NameForm("lora_prior_unet_" if cascade else "lora_unet_", flat=True),
        "comfyui": OWN,
        "diffusers": NameForm(DIFFUSERS, diffusers=True),
        "ai-toolkit": NameForm(DIFFUSERS, diffusers=True)
        if type(base) is comfy.model_base.Flux
        else NameForm(DENOISER, diffusers=behind),
        "onetrainer": NameForm("lora_transformer_", diffusers=True, flat=True)
        if flat
        else NameForm(DIFFUSERS, diffusers=True),
    }


def _unet_paths(unet: Mapping[str, str], *, xl: bool) -> dict[str, list[Named]]:
    """Map paths of a UNet's modules to those of diffusers; unet: ComfyUI's map the other way.

    That map has one name for what Stable Diffusion XL adds to the timestep; diffusers has another for XL.
    """
    found = {}
    for name, path in unet.items():
        if name.endswith(WEIGHT):
            own = name.replace("class_embedding", "add_embedding") if xl else name
            found[path.removesuffix(WEIGHT)] = [Named(own.removesuffix(WEIGHT))]
    return found


def _diffusers_paths(base: Any) -> dict[str, list[Named]]:
    """Map paths of a transformer's modules to those of diffusers: its own names first, then ComfyUI's map of names."""
    known = set(_paths(base))
    found: dict[str, list[Named]] = {}
    hunyuan = isinstance(base, comfy.model_base.HunyuanVideo)  # whose names there are diffusion-pipe's
    for key, target in ({} if hunyuan else comfy.lora.model_lora_keys_unet(base, {})).items():
        if key.startswith(DIFFUSERS) and (layer := _located(base, key, target, known)) is not None:
            found.setdefault(layer[0], []).append(Named(key.removeprefix(DIFFUSERS), layer[1]))
    found |= {path: names for path, names in diffusers_paths(_rows(base)).items() if path in known}
    return {path: _once(names, weight_shape(base.get_submodule(DENOISER + path))[0]) for path, names in found.items()}


def _rows(base: Any) -> dict[str, int]:
    return {name: len(each) for name, each in base.diffusion_model.state_dict().items() if each.ndim}


def _once(names: list[Named], rows: int) -> list[Named]:
    """Choose names that cover a weight of so many outputs once: its slices, or else the first name of the whole."""
    slices = list({name.slice[1:]: name for name in names if name.slice is not None}.values())
    slices.sort(key=lambda name: name.slice.start if name.slice else 0)
    ends = [name.slice.start + name.slice.length for name in slices if name.slice]
    starts = [name.slice.start for name in slices if name.slice]
    if slices and [0, *ends] == [*starts, rows]:
        return slices
    return [name for name in names if name.slice is None][:1]


def _names_of_texts(texts: Any) -> dict[str, Weight]:
    """Collect the names of a CLIP's layers; texts: its model."""
    layers: dict[str, list[str]] = {}
    for key, target in comfy.lora.model_lora_keys_clip(texts, {}).items():
        if isinstance(target, str) and target.endswith(WEIGHT):
            layers.setdefault(target.removesuffix(WEIGHT), []).append(key)
    found = {}
    for path, known in layers.items():
        module = texts.get_submodule(path)
        if not hasattr(module, "weight"):
            continue
        # The last number: where ComfyUI knows a text encoder under two of them, the files of newer programs have it.
        numbers = [int(match[1] or 1) for key in known if (match := TEXT_NUMBER.match(key))]
        key = f"text_encoders.{path}"
        found[key] = Weight(
            key=key,
            rows=weight_shape(module)[0],
            diffusers=(Named(path.partition(".transformer.")[2]),) if numbers else (),
            text=max(numbers, default=0) or 1,
            aliases=dict.fromkeys(flat_name(name) for name in known),
        )
    return found


def _located(model: Any, key: str, target: Any, known: set[str]) -> tuple[str, Slice | None] | None:
    """Read what a key of ComfyUI's map stands for: (path, slice); None for what no layer of a LoRA can change.

    target: a weight's name, or (name, (axis, start, length) or None[, function of the change]).
    """
    weight, *part = (target,) if isinstance(target, str) else target
    path = weight[len(DENOISER) : -len(WEIGHT)]
    if not (weight.startswith(DENOISER) and weight.endswith(WEIGHT) and path in known):
        return None
    if not part:
        return path, None
    function = part[1] if len(part) > 1 else None
    rows = weight_shape(model.get_submodule(DENOISER + path))[0]
    axis, start, length = part[0] or (0, 0, rows)
    if axis != 0 or (function is not None and function(torch.arange(4, device="cpu")).tolist() != [2, 3, 0, 1]):
        return None
    return path, Slice(comfy=key, start=start, length=length, swapped=function is not None)


def put_beneath(patcher: Any, clip: Any, tensors: Mapping[str, Tensor], strength: float) -> tuple[Any, Any]:
    """Clone a MODEL and a CLIP, or None, with a LoRA on them that `comfy_tensors` has read."""
    return comfy.sd.load_lora_for_models(patcher, clip, dict(tensors), strength, strength)


def made_for(widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """Guess the family that a LoRA file was made for; "" if nothing tells.

    widths: inputs of each layer by its name in the file, 0 if unknown.
    """
    found = [flat_name(name) for name in widths]
    marks = (mark for row in ARCHITECTURES for mark in row.in_loras.items())
    marked = (family for mark, family in marks if any(re.search(mark, name) for name in found))
    return next(marked, "") or made_for_unet(widths, metadata)
