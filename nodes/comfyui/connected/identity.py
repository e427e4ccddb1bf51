"""Hashes of connected models: of the files they were loaded from, where ComfyUI tells, else of every weight."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from ....trainer_core.common.cancel import look
from .frozen import own_class
from .gradients import holds_tensors
from .live import ATTENTION

OURS = __name__.rsplit(".", 4)[0]
KNOWN = (
    "torch.",
    "comfy.",
    "comfy_",
    "transformers.",
    OURS,
)  # whose classes the version of ComfyUI and of the pack tells
OF_TORCH = frozenset(vars(torch.nn.Module()))  # what every module holds
LEVELS = 5  # at which a MODEL's own sampling is compared
_known: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # digests of models' weights


def files_of(patcher: Any) -> dict[str, Path]:
    """Map roles to the files that ComfyUI loaded a model from; {} where it does not say."""
    given = getattr(patcher, "cached_patcher_init", None)
    found = [] if given is None else [Path(text) for text in _texts(given[1]) if Path(text).is_file()]
    return {f"file {number}": path for number, path in enumerate(found)}


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def digest_of_model(patcher: Any) -> str:
    """Compute the sha256 of everything but its files that decides what a MODEL or a CLIP computes.

    Without known files all weights count, in their order by name: dtype, shape and bytes. Patches count by strength and
    content, as their ids differ from session to session; its sampling counts by its numbers. Where code of others runs
    in it, that counts as well, and so do tensors that no state dict has.
    """
    parts = [type(patcher.model).__name__, _patches(patcher), _sampling(patcher), _options_of_passes(patcher)]
    parts += filter(None, [code_of(patcher.model)])
    given = getattr(patcher, "cached_patcher_init", None)
    if files_of(patcher):
        parts.append(_options(given))
        parts.append(",".join(sorted({str(p.dtype) for p in patcher.model.parameters()})))
    else:
        parts.append(_weights(patcher))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest_of_clip(clip: Any) -> str:
    """Compute the sha256 of everything but its files that decides what a CLIP makes of a caption."""
    options = json.dumps(getattr(clip, "tokenizer_options", {}), sort_keys=True, default=str)
    parts = [digest_of_model(clip.patcher), str(clip.layer_idx), options]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def stamp_of_files(patcher: Any) -> str:
    """Write what tells a model's files from others without reading them: names, sizes and times."""
    found = ((path.name, path.stat()) for path in files_of(patcher).values())
    return " ".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in found)


def digest_of_vae(vae: Any) -> str:
    """Compute the sha256 of a VAE's weights, and of how it crops and rounds."""
    parts = [type(vae.first_stage_model).__name__, str(vae.vae_dtype), str(getattr(vae, "crop_input", True))]
    return hashlib.sha256("\n".join([*parts, _weights(vae.patcher)]).encode()).hexdigest()


def digest_of_vision(vision: Any) -> str:
    """Compute the sha256 of a CLIP_VISION's weights, and of how it reads a picture."""
    parts = [json.dumps(vision.config, sort_keys=True, default=str), str(vision.dtype), _weights(vision.patcher)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest_of_scale(model: Any) -> str:
    """Compute the sha256 of how a MODEL scales the VAE's latents: of what it makes of a 0 and a 1 in each channel."""
    form = model.latent_format
    ones = torch.ones(1, form.latent_channels, *(1,) * form.latent_dimensions)
    scaled = [model.process_latent_in(value * ones).flatten().tolist() for value in (0.0, 1.0)]
    return hashlib.sha256(repr(scaled).encode()).hexdigest()


def code_of(model: torch.nn.Module) -> str:
    """Digest what else a model computes with: hooks, replaced functions, tensors of no state dict; "" for nothing."""
    whole, found = hashlib.sha256(), False
    for path, module in model.named_modules():
        kind = own_class(module)
        parts = [each for name, each in sorted(vars(module).items()) if callable(each) and hasattr(kind, name)]
        parts = [each for each in parts if not isinstance(each, torch.nn.Module)]
        parts += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        parts = [each for each in parts if not (getattr(each, "__module__", None) or "").startswith(KNOWN)]
        if not kind.__module__.startswith(KNOWN):  # of those the version tells what they hold
            own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            own |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}
            parts += [pair for pair in sorted(own.items()) if holds_tensors(pair[1])]
        if parts:
            found = True
            whole.update(f"{path} {kind.__qualname__}".encode())
            _describe_code(parts, whole)
    return whole.hexdigest() if found else ""


def _describe_code(value: Any, whole: Any, depth: int = 4) -> None:
    """Add code to a digest, with what it holds: its text, defaults, and the values that it closes over."""
    if isinstance(value, torch.nn.Module) or depth == 0:
        return
    if isinstance(value, functools.partial):
        _describe_code([value.func, value.args, value.keywords], whole, depth)
    elif inspect.ismethod(value):
        _describe_code([value.__func__, value.__self__], whole, depth)
    elif inspect.isfunction(value):
        try:
            whole.update(inspect.getsource(value).encode())
        except (OSError, TypeError):  # made without a file
            whole.update(value.__code__.co_code)
            _describe(value.__code__.co_consts, whole)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        _describe_code([value.__defaults__, cells], whole, depth - 1)
    elif isinstance(value, list | tuple):
        whole.update(f"{len(value)}".encode())
        for each in value:
            _describe_code(each, whole, depth)
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            whole.update(str(name).encode())
            _describe_code(value[name], whole, depth - 1)
    elif isinstance(value, Tensor) or value is None or isinstance(value, str | int | float | bool):
        _describe(value, whole)
    else:
        whole.update(_named(value).encode())
        _describe_code(
            vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else None, whole, depth - 1
        )


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _options(given: Any) -> str:
    """Write the plain options that a loader was called with; other values by their kind, and no path of a file."""
    return json.dumps(_without_paths(given[1:]), default=_named)


def _named(value: Any) -> str:
    """Write a value that is no number and no text: by its name where it has one, else by its kind."""
    return str(value) if isinstance(value, torch.dtype | enum.Enum) else type(value).__name__


def _without_paths(value: Any) -> Any:
    """Replace full paths, since the files' content counts: another machine has the same model elsewhere."""
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _without_paths(each) for name, each in value.items()}
    return "a path" if isinstance(value, str) and PurePath(value).is_absolute() else value


def _weights(patcher: Any) -> str:
    """Digest all weights of a model as they are without patches; made once for each model."""
    model = patcher.model
    if model in _known:
        return _known[model]
    backup = getattr(patcher, "backup", {})
    tensors = {name: backup[name].weight if name in backup else tensor for name, tensor in model.state_dict().items()}
    # Loaders of GGUF state sizes alone, and one of a tensor that is none: the numbers are those of the parameters.
    held = dict(model.named_parameters(remove_duplicate=False))
    tensors = {name: held.get(name) if getattr(each, "is_meta", False) else each for name, each in tensors.items()}
    tensors = {name: each for name, each in tensors.items() if each is not None}
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_tensor, (tensors[name] for name in sorted(tensors))))
    whole = hashlib.sha256()
    for name, digest in zip(sorted(tensors), digests, strict=True):
        look()
        whole.update(f"{name} {digest}\n".encode())
    _known[model] = whole.hexdigest()
    return _known[model]


def _tensor(tensor: Any) -> str:
    """Digest a tensor: dtype, shape and bytes; of quantized ones also their scales."""
    if not isinstance(tensor, Tensor):
        return str(type(tensor).__name__)
    plain = tensor.detach()
    if type(plain) not in (Tensor, torch.nn.Parameter) and hasattr(plain, "dequantize"):
        plain = plain.dequantize()
    data = plain.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data.data).hexdigest()}"


def _patches(patcher: Any) -> str:
    """Digest the patches that a model carries, in their order."""
    whole = hashlib.sha256()
    for key in sorted(map(str, getattr(patcher, "patches", {}))):
        look()
        whole.update(key.encode())
        for patch in patcher.patches[key]:
            _describe(patch, whole)
    return whole.hexdigest()


def _describe(value: Any, whole: Any) -> None:
    """Add a patch to a digest: its numbers, its tensors, and of adapters what they hold."""
    if isinstance(value, Tensor):
        whole.update(_tensor(value).encode())
    elif isinstance(value, list | tuple):
        for each in value:
            _describe(each, whole)
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            whole.update(str(name).encode())
            _describe(value[name], whole)
    elif value is None or isinstance(value, str | int | float | bool):
        whole.update(repr(value).encode())
    else:
        whole.update(_named(value).encode())
        _describe(getattr(value, "weights", None), whole)


def _options_of_passes(patcher: Any) -> str:
    """Digest what other nodes set for a model's passes: ComfyUI's transformer_options, and values of its attributes."""
    whole = hashlib.sha256()
    options = patcher.model_options.get("transformer_options", {})
    # Training computes attention by torch, whatever draws the samples.
    _describe({name: value for name, value in options.items() if name != ATTENTION}, whole)
    objects = getattr(patcher, "object_patches", {})
    _describe({name: value for name, value in objects.items() if name != "model_sampling"}, whole)
    return whole.hexdigest()


def _sampling(patcher: Any) -> str:
    """Describe a MODEL's sampling by its numbers: (a, b, skip, out) at a few levels, and its times; "" without one."""
    try:
        sampling = patcher.get_model_object("model_sampling")
    except AttributeError:  # a text encoder
        return ""
    sigmas = sampling.sigmas.double().flatten()
    indices = torch.linspace(0, len(sigmas) - 1, LEVELS).long()
    numbers = []
    for sigma in sigmas[indices].tolist():
        at = torch.tensor([sigma], dtype=torch.float64)
        for one, other in ((0.0, 1.0), (1.0, 0.0)):
            pair = [torch.full((1, 1), value, dtype=torch.float64) for value in (one, other)]
            numbers += [float(sampling.noise_scaling(at, *(p.clone() for p in pair)))]
            numbers += [float(sampling.calculate_denoised(at, *(p.clone() for p in pair)))]
        numbers.append(float(sampling.timestep(at)))
    return " ".join(f"{number:.6g}" for number in numbers)
