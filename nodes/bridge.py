"""ComfyUI as a house: its files, its models and its sampler. A run at work in it: session.py, progress.py."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

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
from aiohttp import web
from comfy_execution.graph_utils import ExecutionBlocker
from safetensors.torch import load_file
from server import PromptServer
from torch import Tensor

import nodes as comfy_nodes

from ..trainer_core.callbacks import Callbacks
from ..trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig
from ..trainer_core.existing import load_lora
from ..trainer_core.models.encoder import embedding_shape, read_text
from ..trainer_core.models.family import TEXT_FILES, UNET, VAE_FILE, detect_family, unet_prefix
from ..trainer_core.models.header import read_header
from ..trainer_core.models.sd import given_files
from ..trainer_core.networks.files import fits

ASSETS = Path(__file__).resolve().parents[1] / "assets"
EXAMPLE = "atelier:concept_example"  # what a shared workflow writes for the pictures that come with the pack
DIFFUSERS = "diffusers/"  # in front of diffusers folders in the list of checkpoints
UPSCALE_METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "bislerp"]

NOTHING = ExecutionBlocker(None)  # nodes linked to an output of this value are skipped without a message


# --- files -------------------------------------------------------------------------------------------------


def register_assets() -> None:
    """List the tiny base model that lies in the pack among the checkpoints."""
    folder_paths.add_model_folder_path("checkpoints", str(ASSETS))


def checkpoint_names() -> list[str]:
    """Return checkpoint files, then diffusers folders."""
    folders = []
    for root in folder_paths.get_folder_paths("diffusers"):
        if os.path.isdir(root):
            found = [e.name for e in os.scandir(root) if os.path.isfile(os.path.join(e.path, "model_index.json"))]
            folders += [DIFFUSERS + name for name in sorted(found)]
    return folder_paths.get_filename_list("checkpoints") + folders


def checkpoint_path(name: str) -> Path:
    """Return the file or folder of a name in the list of checkpoints."""
    kinds = ["checkpoints"]
    if name.startswith(DIFFUSERS):
        kinds.append("diffusers")
    for kind in kinds:
        for root in folder_paths.get_folder_paths(kind):
            path = Path(root) / (name if kind == "checkpoints" else name.removeprefix(DIFFUSERS))
            if path.exists():
                return path
    raise ValueError(f"There is no checkpoint {name!r}; choose one from the list (press R to refresh it).")


def vae_names() -> list[str]:
    """Return the files of autoencoders that can be used instead of a checkpoint's own."""
    return [name for name in folder_paths.get_filename_list("vae") if name.endswith(".safetensors")]


def vae_path(name: str) -> Path:
    """Return the file of a name in the list of autoencoders."""
    found = folder_paths.get_full_path("vae", name)
    if found is None:
        raise ValueError(f"There is no VAE {name!r}; choose one from the list (press R to refresh it).")
    return Path(found)


def lora_names() -> list[str]:
    """Return the LoRA files that can be continued or merged."""
    return [name for name in folder_paths.get_filename_list("loras") if name.endswith(".safetensors")]


def lora_path(name: str) -> Path:
    """Return the file of a name in the list of LoRAs."""
    found = folder_paths.get_full_path("loras", name)
    if found is None:
        raise ValueError(f"There is no LoRA {name!r}; choose one from the list (press R to refresh it).")
    return Path(found)


def text_encoder_names() -> list[str]:
    """Return the files of text encoders that can be used instead of a checkpoint's own."""
    return [name for name in folder_paths.get_filename_list("text_encoders") if name.endswith(".safetensors")]


def text_encoder_path(name: str) -> Path:
    """Return the file of a name in the list of text encoders."""
    found = folder_paths.get_full_path("text_encoders", name)
    if found is None:
        raise ValueError(f"There is no text encoder {name!r}; choose one from the list (press R to refresh it).")
    return Path(found)


def tokenizer_path() -> Path:
    """Return the folder of ComfyUI's own CLIP tokenizer."""
    return Path(comfy.sd1_clip.__file__).parent / "sd1_tokenizer"


def find_folder(folder: str) -> Path:
    """Return the folder that a person means: an absolute one, one of input/ or datasets/, or the example.

    Raises ValueError that names the places where it was looked for.
    """
    text = folder.strip().strip("\"'").strip()
    if not text:
        raise ValueError(f"The folder is empty; give the one that holds your pictures, or {EXAMPLE}.")
    if text == EXAMPLE:
        return ASSETS / "concept_example"
    path = Path(text).expanduser()
    if path.is_absolute():
        places = [path]
    else:
        if ".." in path.parts:
            raise ValueError(f"The folder {text!r} contains '..'; give the full path instead.")
        places = [root / path for root in _dataset_roots()]
    for place in places:
        if place.is_dir():
            return place.resolve()
    if places[0].is_file():
        raise ValueError(f"{places[0]} is a file; give the folder that holds your pictures.")
    looked = " and ".join(map(str, places))
    raise ValueError(f"There is no folder {text!r}, looked for {looked}; check its spelling and where it lies.")


def _dataset_roots() -> list[Path]:
    """Return where relative dataset folders start: ComfyUI's input folder, then its datasets folders."""
    roots = [folder_paths.get_input_directory()]
    if "datasets" in folder_paths.folder_names_and_paths:
        roots += folder_paths.get_folder_paths("datasets")
    else:  # before 0.30
        roots.append(os.path.join(folder_paths.base_path, "datasets"))
    return [Path(root) for root in roots]


def lora_file(name: str, folder: str) -> Path:
    """Return the file of a new LoRA in a folder below ComfyUI's first LoRA folder; it is made and can be written.

    Raises ValueError for a folder that leads out of there or cannot be used.
    """
    root = Path(folder_paths.get_folder_paths("loras")[0]).resolve()
    place = root / folder
    if not place.resolve().is_relative_to(root):
        raise ValueError(f"{place} leads to {place.resolve()}, outside the LoRA folder; choose another folder.")
    return _writable(place, "the LoRA is saved there") / f"{name}.safetensors"


def embeddings_folder() -> Path:
    """Return where learned words are saved in ComfyUI's first folder of embeddings; it is made and can be written."""
    return _writable(Path(folder_paths.get_folder_paths("embeddings")[0]) / "atelier", "learned words are saved there")


def _writable(folder: Path, use: str) -> Path:
    """Return a folder that is made and can be written; raises ValueError if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); change what is there, {use}.") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; change its permissions, {use}.")
    return folder


def cache_folder() -> Path:
    """Return where encoded pictures and captions are kept; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "cache"


def index_file() -> Path:
    """Return the file in which scans remember what they have read."""
    return cache_folder() / "index.sqlite"


def cache_limit() -> int:
    """Return the most bytes that encoded pictures and captions may take; ATELIER_CACHE_GB says otherwise."""
    text = os.environ.get("ATELIER_CACHE_GB", "20")
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"ATELIER_CACHE_GB is {text!r}; give a number of gigabytes, 0 for no limit.") from error


def fingerprint(folder: Path, **concept: Any) -> str:
    """Return a hash over names and contents of the pictures, masks and captions in a folder."""
    from ..trainer_core.scan import Index, fingerprint  # here, so that ComfyUI starts fast

    with Index(index_file()) as index:
        return fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **concept),)), index)


def logs_folder() -> Path:
    """Return where each run's log gets a folder of its own."""
    return Path(folder_paths.get_output_directory()) / "atelier" / "logs"


def check_pictures(dataset: DatasetConfig, callbacks: Callbacks) -> None:
    """Raise ValueError that names every picture, caption and mask that cannot be used as the dataset is set."""
    from ..trainer_core.scan import Index, scan  # here, so that ComfyUI starts fast

    with Index(index_file()) as index:
        scan(dataset, index, callbacks)


def runs_folder() -> Path:
    """Return where each run gets a folder of its own."""
    return Path(folder_paths.get_output_directory()) / "atelier" / "runs"


def shelves() -> list[Path]:
    """Return the folders of LoRAs and of learned words, below which their files have their names."""
    return [Path(folder) for kind in ("loras", "embeddings") for folder in folder_paths.get_folder_paths(kind)]


def pictures_folder() -> Path:
    """Return where pictures that the graph made are kept; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "pictures"


def loras_folder() -> Path:
    """Return where LoRAs that the graph made are kept; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "loras"


# --- models ------------------------------------------------------------------------------------------------


def load_models(config: BaseModelConfig, prediction: str, zero_terminal_snr: bool) -> tuple[Any, Any, Any]:
    """Load MODEL, CLIP and VAE as ComfyUI does, with clip skip, prediction type and noise schedule applied."""
    embeddings, given = folder_paths.get_folder_paths("embeddings"), given_files(config)
    parts = {"output_vae": VAE_FILE not in given, "output_clip": not given.keys() & set(TEXT_FILES)}
    if Path(config.path).is_dir():
        _check_folder(Path(config.path), given)
        model, clip, vae = comfy.diffusers_load.load_diffusers(config.path, embedding_directory=embeddings, **parts)
    else:
        loaded = comfy.sd.load_checkpoint_guess_config(config.path, embedding_directory=embeddings, **parts)
        model, clip, vae = loaded[:3]
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
    tensors = comfy.utils.load_torch_file(str(path))
    if unet_prefix(header.shapes) == "":
        tensors = {UNET + name: tensor for name, tensor in tensors.items()}
    for name, part in zip(TEXT_FILES, detect_family(header, (VAE_FILE, *TEXT_FILES)).texts, strict=False):
        if name in named:
            place = f"{part.prefix.removesuffix('transformer.')}transformer."
            tensors = {k: t for k, t in tensors.items() if not k.startswith(part.prefix)}
            tensors |= {place + k: t for k, t in named[name].items() if part.open_clip or k.startswith("text_model.")}
    options = {"output_vae": False, "output_model": False, "embedding_directory": embeddings}
    return comfy.sd.load_state_dict_guess_config(tensors, **options)[1]


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
            f"ComfyUI knows no UNet as the one in the diffusers folder {path.name}, of {channels} input channels (it "
            "reads inpainting models of Stable Diffusion 2 as single files alone); choose the model as one "
            ".safetensors file."
        )


def _weights(folder: Path) -> Path:
    """Return the weights in a part of a diffusers folder, those that ComfyUI takes."""
    stem = "model" if folder.name in TEXT_FILES else "diffusion_pytorch_model"
    names = (folder / name for name in (f"{stem}.fp16.safetensors", f"{stem}.safetensors"))
    found = next((path for path in names if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"{folder.parent.name} holds no {stem}.safetensors in {folder.name}/, where ComfyUI looks for it; choose "
            "the model as one .safetensors file."
        )
    return found


def with_sampling(model: Any, prediction: str, zero_terminal_snr: bool) -> Any:
    """Return a MODEL that reads the network's output as v (Salimans & Ho 2022) or as noise, on the schedule given."""
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
            f"The MODEL linked to Train LoRA is built otherwise than the base model (at {unequal[0]}); link one of "
            "the same kind, or none."
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
                "The CLIP linked to Train LoRA is built otherwise than the base model's; link one of the same kind, or "
                "none, or set the text encoders' learning rates to 0."
            )


def check_lora(path: Path, model: Any, clip: Any) -> None:
    """Raise ValueError unless ComfyUI's own loader takes every layer of a LoRA file, on a weight that it fits."""
    tensors, layers = load_file(path), load_lora(path).layers
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, keys)
    taken = comfy.lora.load_lora(tensors, keys, log_missing=False)
    unmatched = sorted(name for name in layers if name not in keys or not _taken(keys[name], taken))
    if unmatched:
        raise ValueError(
            f"ComfyUI finds no weight for {len(unmatched)} of {len(layers)} layers of {path.name}, the first: "
            f"{', '.join(unmatched[:3])}; nothing was saved."
        )
    weights = {**model.model.state_dict(), **clip.cond_stage_model.state_dict()}
    for name, layer in layers.items():
        weight, bias = weights[keys[name]], weights.get(_bias_of(keys[name]))
        if not fits(layer, weight.shape, None if bias is None else bias.shape):
            raise ValueError(
                f"{name} of {path.name} does not fit ComfyUI's weight {tuple(weight.shape)}; nothing was saved."
            )


def _bias_of(key: str) -> str:
    return f"{key.removesuffix('weight')}bias"


def _taken(key: str, taken: Collection[str]) -> bool:
    """Tell whether ComfyUI changes a weight, or at least its bias."""
    return key in taken or _bias_of(key) in taken


def apply_lora(model: Any, clip: Any, tensors: dict[str, Tensor], strength: float) -> tuple[Any, Any]:
    """Return clones of MODEL and CLIP that carry a LoRA, as ComfyUI's own loader makes them."""
    return comfy.sd.load_lora_for_models(model, clip, tensors, strength, strength)


def own(tensor: Tensor) -> Tensor:
    """Return a tensor that does not belong to ComfyUI's inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


# --- sampling ----------------------------------------------------------------------------------------------


def sampler_names() -> list[str]:
    """Return the samplers of this ComfyUI."""
    return comfy.samplers.KSampler.SAMPLERS


def scheduler_names() -> list[str]:
    """Return the schedulers of this ComfyUI."""
    return comfy.samplers.KSampler.SCHEDULERS


def encode_prompt(clip: Any, text: str) -> Any:
    """Return the CONDITIONING of a prompt."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def empty_latents(width: int, height: int, count: int) -> Tensor:
    """Return empty latents (count, 4, height/8, width/8) to start from."""
    device = comfy.model_management.intermediate_device()
    return torch.zeros(count, 4, height // 8, width // 8, device=device)


def sample_latents(model: Any, positive: Any, negative: Any, latents: Tensor, **settings: Any) -> Tensor:
    """Sample with ComfyUI's own sampler: seed, steps, cfg, sampler_name, scheduler, denoise."""
    latent = {"samples": latents}
    (result,) = comfy_nodes.common_ksampler(model, positive=positive, negative=negative, latent=latent, **settings)
    return result["samples"]


def upscale_latents(latents: Tensor, factor: float, method: str) -> Tensor:
    """Enlarge latents; the sides are rounded to whole latent pixels."""
    width, height = (round(side * factor) for side in (latents.shape[3], latents.shape[2]))
    return comfy.utils.common_upscale(latents, width, height, method, "disabled")


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Return pictures (B, H, W, 3) in 0..1."""
    # ComfyUI's tiled decoding, which it falls back to when memory is short, gives inference tensors.
    return own(vae.decode(latents))


# --- server ------------------------------------------------------------------------------------------------


def add_route(path: str, answer: Callable[[web.Request], Awaitable[web.Response]], method: str = "POST") -> None:
    """Let the server answer requests to a path; only while ComfyUI starts."""
    PromptServer.instance.routes.route(method, path)(answer)
