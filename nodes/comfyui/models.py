"""Load, check and patch ComfyUI's models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import comfy.diffusers_load
import comfy.lora
import comfy.model_detection
import comfy.model_management
import comfy.model_sampling
import comfy.samplers
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import folder_paths
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from safetensors.torch import load_file
from torch import Tensor

from ...trainer_core.config import BaseModelConfig
from ...trainer_core.lora_files.formats import FileLayer, fits
from ...trainer_core.lora_files.match import TEXT, flat_name
from ...trainer_core.lora_files.read import LoraFile, list_some, load_lora
from ...trainer_core.models.files.safetensors_file import read_header
from ...trainer_core.models.sd.encoder import embedding_shape, read_text
from ...trainer_core.models.sd.family import TEXT_FILES, UNET, VAE_FILE, detect_family, unet_prefix
from ...trainer_core.models.sd.load import given_files
from ...trainer_core.networks.layers.dora import frozen_weight
from ...trainer_core.networks.layers.shape import weight_shape

NOTHING = ExecutionBlocker(None)  # nodes linked to an output of this value are skipped without a message


def load_models(config: BaseModelConfig, prediction: str, zero_terminal_snr: bool) -> tuple[Any, Any, Any]:
    """Load MODEL, CLIP and VAE as ComfyUI does, with clip skip, prediction type and noise schedule applied."""
    embeddings, given = folder_paths.get_folder_paths("embeddings"), given_files(config)
    parts = {"output_vae": VAE_FILE not in given, "output_clip": not given.keys() & set(TEXT_FILES)}
    if Path(config.path).is_dir():
        _check_folder(Path(config.path), given)
        loaded = comfy.diffusers_load.load_diffusers(config.path, embedding_directory=embeddings, **parts)
    else:
        loaded = comfy.sd.load_checkpoint_guess_config(config.path, embedding_directory=embeddings, **parts)
    model, clip, vae = cast("tuple[Any, Any, Any]", loaded[:3])
    if not parts["output_clip"]:
        clip = _load_clip(Path(config.path), given, embeddings)
    if not parts["output_vae"]:
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(config.vae))
        vae.throw_exception_if_invalid()
    if config.clip_skip > 1:
        clip = clip.clone()
        clip.clip_layer(-config.clip_skip)
    return with_sampling(model, prediction, zero_terminal_snr), clip, vae


def _load_clip(path: Path, given: dict[str, Path], embeddings: list[str]) -> Any:
    """Load a CLIP whose text encoders are those of the files given, the others the model's own."""
    named = {
        name: {k if k.startswith("text_proj") else f"text_model.{k}": t for k, t in read_text(given[name]).items()}
        for name in TEXT_FILES
        if name in given
    }
    if path.is_dir():
        folders = [name for name in TEXT_FILES if name in named or (path / name).is_dir()]
        stored = [named.get(name) or comfy.utils.load_torch_file(str(_weights(path / name))) for name in folders]
        return comfy.sd.load_text_encoder_state_dicts(stored, embedding_directory=embeddings)
    # ComfyUI tells the kind of CLIP from the whole checkpoint, so that is what it gets, with other text encoders in it.
    header = read_header(path)
    tensors = cast("dict[str, Tensor]", comfy.utils.load_torch_file(str(path)))
    if unet_prefix(header.shapes) == "":
        tensors = {UNET + name: tensor for name, tensor in tensors.items()}
    for name, part in zip(TEXT_FILES, detect_family(header, (VAE_FILE, *TEXT_FILES)).texts, strict=False):
        if name in named:
            prefix = f"{part.prefix.removesuffix('transformer.')}transformer."
            tensors = {k: t for k, t in tensors.items() if not k.startswith(part.prefix)}
            tensors |= {prefix + k: t for k, t in named[name].items() if part.open_clip or k.startswith("text_model.")}
    options = {"output_vae": False, "output_model": False, "embedding_directory": embeddings}
    return cast("tuple[Any, ...]", comfy.sd.load_state_dict_guess_config(tensors, **options))[1]


def _check_folder(path: Path, given: Collection[str]) -> None:
    """Raise ValueError for a diffusers folder that ComfyUI cannot load, from its headers."""
    for name in (VAE_FILE, *TEXT_FILES):
        if name not in given and (path / name).is_dir():
            _weights(path / name)
    shapes = read_header(_weights(path / "unet")).shapes
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if comfy.model_detection.unet_config_from_diffusers_unet(tensors) is None:
        channels = shapes.get("conv_in.weight", (0, 0))[1]
        raise ValueError(
            f"ComfyUI cannot load the diffusers folder {path.name}, whose UNet has {channels} input channels (it "
            "reads inpainting models of Stable Diffusion 2 as single files only); set checkpoint of Load Base Model "
            "to one .safetensors file."
        )


def _weights(folder: Path) -> Path:
    """Find the weights of one part of a diffusers folder, as ComfyUI chooses them."""
    stem = "model" if folder.name in TEXT_FILES else "diffusion_pytorch_model"
    names = (folder / name for name in (f"{stem}.fp16.safetensors", f"{stem}.safetensors"))
    found = next((path for path in names if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"{folder.parent.name}/{folder.name} holds no {stem}.safetensors, which ComfyUI needs; set checkpoint of "
            "Load Base Model to one .safetensors file."
        )
    return found


def with_sampling(model: Any, prediction: str, zero_terminal_snr: bool) -> Any:
    """Set a MODEL's prediction to v (Salimans & Ho 2022) or noise, on the given schedule."""
    kinds = {"v_prediction": comfy.model_sampling.V_PREDICTION, "epsilon": comfy.model_sampling.EPS}
    sampling = model.get_model_object("model_sampling")
    settings = model.model.model_config.sampling_settings
    is_v = isinstance(sampling, comfy.model_sampling.V_PREDICTION)  # which is a kind of EPS in ComfyUI
    if is_v == (prediction == "v_prediction") and bool(settings.get("zsnr", False)) == zero_terminal_snr:
        return model

    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, kinds[prediction]):
        pass

    model = model.clone()
    model.add_object_patch("model_sampling", Sampling(model.model.model_config, zsnr=zero_terminal_snr))
    return model


def check_models(config: BaseModelConfig, model: Any, clip: Any, *, trains_text: bool) -> None:
    """Raise ValueError when the LoRA of a base model in one file cannot be put on MODEL or CLIP."""
    header, given = read_header(Path(config.path)), given_files(config)
    shapes, prefix = header.shapes, unet_prefix(header.shapes)
    unet = {f"{prefix}{k}": v for k, v in model.model.diffusion_model.state_dict().items()}
    if unequal := [k for k, v in unet.items() if math.prod(shapes.get(k, (0,))) != v.numel()]:
        raise ValueError(
            f"The MODEL linked to Train LoRA is not of the base model's kind (they differ at {unequal[0]}); link "
            "another to model of Train LoRA, or none."
        )
    if not trains_text:
        return
    tensors = clip.cond_stage_model.state_dict()
    texts = detect_family(header, (VAE_FILE, *TEXT_FILES)).texts
    for name, text in zip(TEXT_FILES, texts, strict=False):
        own = embedding_shape(shapes, text.prefix)
        wanted = embedding_shape(read_header(given[name]).shapes) if name in given else own
        found = tensors.get(f"{text.comfy}.transformer.text_model.embeddings.token_embedding.weight")
        if found is None or tuple(found.shape) != wanted:
            raise ValueError(
                "The CLIP linked to Train LoRA is not of the base model's kind; link another to clip of Train LoRA, "
                "or none, or set the text encoders' learning rates of Optimizer to 0."
            )


def check_same_kind(trained: Any, model: Any) -> None:
    """Raise ValueError when a MODEL is not of the architecture and sizes of the one that is trained on."""
    own, other = ({n: tuple(t.shape) for n, t in m.model.state_dict().items()} for m in (trained, model))
    if type(trained.model) is not type(model.model) or own != other:
        raise ValueError(
            "The MODEL linked to Train LoRA is not of the base model's kind; link another to model of Train LoRA, or "
            "none."
        )


def check_lora(path: Path, model: Any, clip: Any) -> None:
    """Raise ValueError unless ComfyUI's own loader takes every layer of a LoRA file, on a weight that it fits.

    clip: None where no text encoder is trained. Weights need not be in memory.
    """
    tensors, layers = load_file(path), load_lora(path).layers
    keys = lora_keys(model, clip)
    taken = comfy.lora.load_lora(tensors, keys, log_missing=False)
    unmatched = sorted(name for name in layers if name not in keys or not _taken(keys[name], taken))
    if unmatched:
        raise ValueError(
            f"ComfyUI finds no weight for {len(unmatched)} of {len(layers)} layers of {path.name}, the first: "
            f"{', '.join(unmatched[:3])}; nothing was saved."
        )
    for name, layer in layers.items():
        weight, _ = _weight_of(keys[name])
        owner = model.model if weight.startswith("diffusion_model.") else clip.cond_stage_model
        if not _has_room(owner, keys[name], layer):
            raise ValueError(f"{name} of {path.name} does not fit ComfyUI's weight {weight}; nothing was saved.")


def _taken(key: Any, taken: Collection[Any]) -> bool:
    """Tell whether ComfyUI changes a weight, or at least its bias."""
    return key in taken or (isinstance(key, str) and f"{key.removesuffix('weight')}bias" in taken)


def check_loads(path: Path) -> None:
    """Raise ValueError unless ComfyUI's loader knows every layer of a LoRA file by its endings, whatever the model."""
    layers = load_lora(path).layers
    keys = {name: f"{name}.weight" for name in layers}
    taken = comfy.lora.load_lora(load_file(path), keys, log_missing=False)
    if unknown := [name for name in layers if not _taken(keys[name], taken)]:
        raise ValueError(
            f"ComfyUI's loader takes nothing from {len(unknown)} of {len(layers)} layers of {path.name}, the first: "
            f"{', '.join(unknown[:3])}; nothing was saved."
        )


def lora_keys(model: Any, clip: Any) -> dict[str, Any]:
    """Map the names of layers in LoRA files to the weights of a MODEL and a CLIP, as ComfyUI's loader does."""
    keys = {} if model is None else comfy.lora.model_lora_keys_unet(model.model, {})
    return keys if clip is None else comfy.lora.model_lora_keys_clip(clip.cond_stage_model, keys)


def misfits(lora: LoraFile, model: Any, clip: Any) -> dict[str, str]:
    """Find the layers of a LoRA that ComfyUI would not load on a MODEL and CLIP: their names, and why."""
    keys = lora_keys(model, clip)
    owners = {True: None if model is None else model.model, False: None if clip is None else clip.cond_stage_model}
    found = {}
    for name, layer in lora.layers.items():
        if name not in keys:
            alone = clip is None and TEXT.match(name)
            found[name] = "no CLIP is linked" if alone else "no weight of the linked model has this name"
        elif not _has_room(owners[_weight_of(keys[name])[0].startswith("diffusion_model.")], keys[name], layer):
            found[name] = "its weight in the linked model has another shape"
    return found


def check_fits(lora: LoraFile, model: Any, clip: Any, node: str) -> None:
    """Raise ValueError for layers of a LoRA that have no weight of their name and shape in a MODEL and CLIP."""
    if missing := misfits(lora, model, clip):
        raise ValueError(
            f"{len(missing)} of {len(lora.layers)} layers have no weight of their name and shape in the MODEL linked "
            f"to {node} ({list_some(list(missing))}). Link the MODEL that the LoRA is for, and its CLIP where the LoRA "
            "changes text encoders."
        )


def _weight_of(key: Any) -> tuple[str, tuple[int, int, int] | None]:
    """Read an entry of ComfyUI's table of keys: the weight, and of a slice its axis, start and length."""
    weight, *part = (key,) if isinstance(key, str) else key
    return weight, part[0] if part and part[0] else None


def _has_room(owner: Any, key: Any, layer: FileLayer) -> bool:
    """Tell whether a layer fits the weight that an entry of ComfyUI's table of keys names."""
    weight, part = _weight_of(key)
    module = owner.get_submodule(weight.removesuffix(".weight"))
    shape, bias = list(weight_shape(module)), getattr(module, "bias", None)
    if part:
        shape[part[0]], bias = part[2], None
    return fits(layer, torch.Size(shape), None if bias is None else bias.shape)


def same_layers(model: Any, clip: Any) -> Callable[[str], str]:
    """Write the names of one layer alike: by the weight that it changes in a MODEL or CLIP, else without their dots."""
    keys = {flat_name(name): str(weight) for name, weight in lora_keys(model, clip).items()}
    return lambda name: keys.get(flat_name(name), flat_name(name))


def weight_reader(model: Any, clip: Any) -> Callable[[str], Tensor]:
    """Read the weights that layers of a LoRA change, float32 on the CPU, by the layer's name in the file."""
    keys = lora_keys(model, clip)

    def read(name: str) -> Tensor:
        key, part = _weight_of(keys[name])
        owner = model.model if key.startswith("diffusion_model.") else clip.cond_stage_model
        weight = frozen_weight(owner.get_submodule(key.removesuffix(".weight")), torch.float32).detach().cpu()
        if part:
            weight = weight.narrow(*part)
        return weight

    return read


def weights_of(model: Any, clip: Any) -> dict[str, Callable[[], Tensor]]:
    """Map kohya's names of layers to readers of a MODEL's and a CLIP's matrices, float32 on the CPU.

    What is patched onto them, such as a LoRA, is in. clip: None where none is linked.
    """
    from .connected.names import names_of  # here, as it reads this module

    names, found = names_of(model, clip), {}
    for key, weight in names.weights.items():
        patcher, path = (clip.patcher, key.partition(".")[2]) if weight.text else (model, key)
        module = patcher.model.get_submodule(path)
        # A projection that a file lacks is memory that ComfyUI never wrote: each load has another one.
        if len(weight_shape(module)) > 1 and not path.endswith("text_projection"):
            (named, *_) = names.written(weight, "kohya")
            found[named.name] = _patched_reader(patcher, path, module)
    return found


def _patched_reader(patcher: Any, path: str, module: torch.nn.Module) -> Callable[[], Tensor]:
    key = f"{path}.weight"

    def read() -> Tensor:
        # While a MODEL is loaded, its weights hold the patches of whichever clone was used last.
        kept = patcher.backup.get(key)
        weight = frozen_weight(module, torch.float32) if kept is None else kept.weight
        weight = weight.detach().to("cpu", torch.float32)
        patches = patcher.patches.get(key, [])
        return comfy.lora.calculate_weight(patches, weight.clone(), key) if patches else weight

    return read


def apply_lora(model: Any, clip: Any, tensors: dict[str, Tensor], strength: float) -> tuple[Any, Any]:
    """Clone MODEL and CLIP and apply a LoRA, as ComfyUI's own loader does."""
    return comfy.sd.load_lora_for_models(model, clip, tensors, strength, strength)


def own(tensor: Tensor) -> Tensor:
    """Clone a tensor out of ComfyUI's inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
