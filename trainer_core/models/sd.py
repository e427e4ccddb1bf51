"""Stable Diffusion 1 shaped models: architecture read from the tensors, weights from one file or a folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..config import BaseModelConfig
from .family import FileHeader, Shapes, check_sd1, detect_prediction, read_header
from .names import tiny_vae_names, unet_ldm_names, vae_ldm_names
from .text import find_tokenizer, load_tokenizer

LATENT_SCALE = 0.18215  # of the Stable Diffusion 1 autoencoder
HEADS = 8  # every attention layer of an SD1 UNet, whatever its width
CLIP_HEAD = 64  # width of a CLIP attention head
UNET, TEXT, VAE = "model.diffusion_model.", "cond_stage_model.transformer.", "first_stage_model."


@dataclass(kw_only=True)
class BaseModel:
    """A base model in memory. Parts that are not needed any more may be set to None and freed."""

    family: str
    name: str  # file or folder name, for people and metadata
    prediction: str  # "epsilon" or "v_prediction"
    clip_skip: int
    dtype: torch.dtype  # of frozen weights and activations
    unet: Any
    text_encoder: Any
    vae: Any
    tokenizer: Any
    identity: dict[str, str] = field(default_factory=dict)  # sha256 of the stored tensors of unet, text, vae

    def parts(self) -> list[nn.Module]:
        """Return the modules that are loaded."""
        return [part for part in (self.unet, self.text_encoder, self.vae) if part is not None]


def load_base_model(config: BaseModelConfig, dtype: torch.dtype = torch.float32) -> BaseModel:
    """Load a base model to the CPU, frozen, offline. Raises ValueError that names file and reason."""
    path = Path(config.path)
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, path))
    if path.is_dir():
        unet, text_encoder, vae, detected = _load_folder(path)
        identity = {part: _hash_folder(path / part) for part in ("unet", "text_encoder", "vae")}
    else:
        unet, text_encoder, vae, detected, identity = _load_file(path)
    for part, part_dtype in ((unet, dtype), (text_encoder, dtype), (vae, torch.float32)):
        nn.Module.to(part.requires_grad_(False).eval(), part_dtype)  # the VAE stays exact: its results are kept
    layers = text_encoder.config.num_hidden_layers
    if config.clip_skip > layers:
        raise ValueError(f"clip_skip is {config.clip_skip}, but the text encoder of {path.name} has {layers} layers.")
    return BaseModel(
        family="sd1",
        name=path.name,
        prediction=detected if config.prediction == "auto" else config.prediction,
        clip_skip=config.clip_skip,
        dtype=dtype,
        unet=unet,
        text_encoder=text_encoder,
        vae=vae,
        tokenizer=tokenizer,
        identity=identity,
    )


def check_base_model(config: BaseModelConfig) -> None:
    """Raise ValueError for a model that cannot be trained, from its header alone."""
    path = Path(config.path)
    if path.is_dir():
        _check_folder(path)
    else:
        check_sd1(read_header(path))
    find_tokenizer(config.tokenizer, path)


def _load_file(path: Path) -> tuple[Any, Any, Any, str, dict[str, str]]:
    """Load UNet, text encoder and VAE of a single-file checkpoint, with prediction type and hashes."""
    header = read_header(path)
    check_sd1(header)
    with safe_open(path, framework="pt") as file:
        unet, text_encoder, vae = (read_part(file, header.shapes, prefix) for prefix in (UNET, TEXT, VAE))
    identity = {"unet": _hash(unet), "text_encoder": _hash(text_encoder), "vae": _hash(vae)}
    return (
        build_unet(unet, path.name),
        build_text_encoder(text_encoder, path.name),
        build_vae(vae, path.name),
        detect_prediction(header),
        identity,
    )


def read_part(file: Any, names: Iterable[str], prefix: str) -> dict[str, Tensor]:
    """Read the tensors under a prefix, named without it."""
    return {name[len(prefix) :]: file.get_tensor(name) for name in names if name.startswith(prefix)}


def build_unet(tensors: dict[str, Tensor], source: str) -> nn.Module:
    """Build a diffusers UNet from LDM tensors; every size is read from them."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    shape = unet_shape({k: tuple(v.shape) for k, v in tensors.items()})
    with torch.device("meta"):
        unet = UNet2DConditionModel(**shape)
    names = unet_ldm_names(unet.state_dict(), shape["layers_per_block"])
    return _fill(unet, names, tensors, f"the UNet of {source}")


def unet_shape(shapes: Shapes) -> dict[str, Any]:
    """Read a UNet2DConditionModel configuration from LDM tensor shapes (without prefix)."""
    levels: list[list[int]] = [[]]  # input block numbers of each level
    last = max(int(m[1]) for k in shapes if (m := re.match(r"input_blocks\.(\d+)\.", k)))
    for i in range(1, last + 1):
        if f"input_blocks.{i}.0.op.weight" in shapes:
            levels.append([])
        else:
            levels[-1].append(i)
    attended = [f"input_blocks.{level[0]}.1.norm.weight" in shapes for level in levels]
    contexts = {v[1] for k, v in shapes.items() if k.endswith("attn2.to_k.weight")}
    if len({len(level) for level in levels}) != 1 or len(contexts) != 1:
        raise ValueError("The UNet has levels of different depth or several text widths; it is not an SD1 UNet.")
    projection = next(v for k, v in shapes.items() if k.endswith("1.proj_in.weight"))
    return {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": tuple(shapes[f"input_blocks.{level[0]}.0.out_layers.3.weight"][0] for level in levels),
        "layers_per_block": len(levels[0]),
        "down_block_types": tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attended),
        "up_block_types": tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attended)),
        "cross_attention_dim": contexts.pop(),
        "attention_head_dim": HEADS,  # diffusers' name for the number of heads of this family
        "use_linear_projection": len(projection) == 2,
    }


def build_text_encoder(tensors: dict[str, Tensor], source: str) -> nn.Module:
    """Build a CLIP text encoder from its tensors (names with or without `text_model.`)."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tensors = {k.removeprefix("text_model."): v for k, v in tensors.items()}
    vocabulary, width = tensors["embeddings.token_embedding.weight"].shape
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=tensors["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=1 + max(int(k.split(".")[2]) for k in tensors if k.startswith("encoder.layers.")),
        num_attention_heads=max(1, width // CLIP_HEAD),
        max_position_embeddings=tensors["embeddings.position_embedding.weight"].shape[0],
        hidden_act="quick_gelu",
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
    with torch.device("meta"):
        encoder = CLIPTextModel(config)
    encoder = _fill(encoder, {k: k.removeprefix("text_model.") for k in encoder.state_dict()}, tensors, source)
    for module in encoder.modules():
        if "position_ids" in module._buffers:  # not stored in files
            module._buffers["position_ids"] = torch.arange(config.max_position_embeddings)[None]
    return encoder


def build_vae(tensors: dict[str, Tensor], source: str) -> nn.Module:
    """Build the autoencoder: TAESD-shaped or the original KL one, as the tensors say."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    what = f"the VAE of {source}"
    if "taesd_decoder.1.weight" in tensors:
        with torch.device("meta"):
            tiny = AutoencoderTiny(latent_channels=tensors["taesd_decoder.1.weight"].shape[1])
        return _fill(tiny, tiny_vae_names(tiny.state_dict()), tensors, what)
    levels = 1 + max(int(m[1]) for k in tensors if (m := re.match(r"encoder\.down\.(\d)\.", k)))
    shape: dict[str, Any] = {
        "block_out_channels": tuple(tensors[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels)),
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "layers_per_block": sum(k.startswith("encoder.down.0.block.") and "conv1.w" in k for k in tensors),
        "latent_channels": tensors["quant_conv.weight"].shape[0] // 2,
    }
    with torch.device("meta"):
        vae = AutoencoderKL(**shape)
    names = vae_ldm_names(vae.state_dict(), levels)
    return _fill(vae, names, tensors, what)


def _fill(module: nn.Module, names: dict[str, str], tensors: dict[str, Tensor], what: str) -> nn.Module:
    """Give a meta-device module its tensors by mapped names; a missing or misshapen one raises ValueError."""
    wanted = module.state_dict()
    state = {}
    for name, source in names.items():
        if source not in tensors:
            raise ValueError(f"{what} lacks the tensor {source}; the file is incomplete.")
        tensor, shape = tensors[source], wanted[name].shape
        if tensor.numel() != shape.numel():  # same count, other shape: a 1x1 conv stored for a linear layer
            raise ValueError(f"{what}: {source} has shape {tuple(tensor.shape)}, expected {tuple(shape)}.")
        state[name] = tensor.reshape(shape)
    module.load_state_dict(state, assign=True)
    return module


def _check_folder(path: Path) -> None:
    for part in ("unet", "text_encoder", "vae", "scheduler"):
        if not any((path / part).glob("*.json")):
            raise ValueError(f"{path} is not a diffusers model folder: {part}/ with its config .json is missing.")


def _load_folder(path: Path) -> tuple[Any, Any, Any, str]:
    """Load a diffusers folder, safetensors only, never from a hub."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextModel

    _check_folder(path)
    if (path / "text_encoder_2").is_dir():
        raise ValueError(f"{path.name} has two text encoders (SDXL); choose a Stable Diffusion 1 model.")
    config = json.loads((path / "vae" / "config.json").read_text(encoding="utf-8"))
    tiny = config.get("_class_name") == "AutoencoderTiny"
    try:
        unet = UNet2DConditionModel.from_pretrained(path / "unet", local_files_only=True, use_safetensors=True)
        text = CLIPTextModel.from_pretrained(path / "text_encoder", local_files_only=True, use_safetensors=True)
        vae = (AutoencoderTiny if tiny else AutoencoderKL).from_pretrained(
            path / "vae", local_files_only=True, use_safetensors=True
        )
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read as a diffusers folder: {error}") from error
    scheduler = json.loads((path / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    return unet, text, vae, scheduler.get("prediction_type", "epsilon")


def _hash(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def describe(header: FileHeader) -> dict[str, Any]:
    """Return what the header of an SD1 checkpoint tells: sizes of UNet and text encoder, prediction."""
    check_sd1(header)
    shape = unet_shape({k[len(UNET) :]: v for k, v in header.shapes.items() if k.startswith(UNET)})
    return {"family": "sd1", "prediction": detect_prediction(header), **shape}
