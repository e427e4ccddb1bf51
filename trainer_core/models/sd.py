"""Stable Diffusion models: architecture read from the tensors, weights from one file or a folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..config import BaseModelConfig
from .family import (
    FAMILIES,
    UNET,
    VAE,
    Family,
    Shapes,
    TextPart,
    check_vae,
    detect_family,
    detect_prediction,
    detect_zero_terminal_snr,
    read_header,
)
from .names import from_open_clip, tiny_vae_names, unet_ldm_names, vae_ldm_names
from .text import TextEncoder, find_tokenizer, load_tokenizer

HEAD = 64  # channels of an attention head, in CLIP always and in the UNets of most families
TIME_ID = 256  # channels of each of the six size and crop numbers that Stable Diffusion XL is told


@dataclass(kw_only=True)
class BaseModel:
    """A base model in memory. Parts that are not needed any more may be emptied and freed."""

    family: Family
    name: str  # file or folder name, for people and metadata
    unet: Any
    texts: tuple[TextEncoder, ...]
    vae: Any
    tokenizer: Any
    identity: dict[str, str] = field(default_factory=dict)  # sha256 of the stored tensors of unet, text encoders, vae
    dtype: torch.dtype = torch.float32  # of frozen weights and activations
    prediction: str = "epsilon"  # or "v_prediction"
    zero_terminal_snr: bool = False  # the noise schedule ends in pure noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What the UNet is told about a batch."""

    context: Tensor  # (B, L, D)
    pooled: Tensor | None = None  # (B, P), of families that use one
    sizes: Tensor | None = None  # (B, 6): original height and width, crop top and left, trained height and width


def predict(base: BaseModel, noised: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
    """Return the UNet's prediction for (B, C, H, W) noised latents at (B,) timesteps."""
    more: dict[str, Any] = {}
    if conditions.pooled is not None:
        more = {"added_cond_kwargs": {"text_embeds": conditions.pooled, "time_ids": conditions.sizes}}
    return base.unet(noised.to(base.dtype), timesteps, encoder_hidden_states=conditions.context, **more).sample


def unet_layer_names(base: BaseModel) -> Callable[[str], str]:
    """Return what turns the diffusers name of a UNet layer into the one that LoRA files of this family use."""
    if not base.family.ldm_names:
        return str
    table = unet_ldm_names(base.unet.state_dict(), base.unet.config.layers_per_block)
    return lambda name: table[f"{name}.weight"].removesuffix(".weight")


def load_base_model(
    config: BaseModelConfig,
    dtype: torch.dtype = torch.float32,
    amend: Callable[[BaseModel], None] | None = None,
) -> BaseModel:
    """Load a base model to the CPU, frozen, offline. Raises ValueError that names file and reason.

    amend: changes the weights while they are as in the file, before they are cast to dtype.
    """
    path = Path(config.path)
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, path))
    base = _load_folder(path, tokenizer) if path.is_dir() else _load_file(path, tokenizer, own_vae=not config.vae)
    if config.vae:
        tensors = read_vae(Path(config.vae), base.family)
        base.vae = build_vae(tensors, Path(config.vae).name)
        base.identity["vae"] = _hash(tensors)
    base.dtype = dtype
    if amend is not None:
        amend(base)
    for part, part_dtype in (
        (base.unet, dtype),
        *((text.model, dtype) for text in base.texts),
        (base.vae, torch.float32),
    ):
        nn.Module.to(part.requires_grad_(False).eval(), part_dtype)  # the VAE stays exact: its results are kept
    layers = min(text.model.config.num_hidden_layers + text.absent for text in base.texts)
    if config.clip_skip > layers:
        raise ValueError(f"clip_skip is {config.clip_skip}, but a text encoder of {path.name} has {layers} layers.")
    for text in base.texts:
        text.layer = max(text.layer, config.clip_skip)
    base.prediction, base.zero_terminal_snr = noise_model(config)
    return base


def noise_model(config: BaseModelConfig) -> tuple[str, bool]:
    """Return (prediction, zero terminal SNR): what the person says, else what the model's file or folder does.

    Raises ValueError for zero terminal SNR with a model that predicts noise: at pure noise it could learn nothing.
    """
    path = Path(config.path)
    if path.is_dir():
        scheduler = json.loads((path / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        prediction = scheduler.get("prediction_type", "epsilon")
        zero = bool(scheduler.get("rescale_betas_zero_snr", False))
    else:
        header = read_header(path)
        prediction = detect_prediction(header, detect_family(header, vae=False))
        zero = detect_zero_terminal_snr(header)
    if config.prediction != "auto":
        prediction = config.prediction
    if config.zero_terminal_snr == "auto":
        return prediction, zero and prediction == "v_prediction"
    zero = config.zero_terminal_snr == "on"
    if zero and prediction != "v_prediction":
        raise ValueError("zero_terminal_snr is on, but the model predicts epsilon; turn it off, or set v_prediction.")
    return prediction, zero


def check_base_model(config: BaseModelConfig) -> None:
    """Raise ValueError for a model that cannot be trained, from its header alone."""
    path = Path(config.path)
    family = _check_folder(path) if path.is_dir() else detect_family(read_header(path), vae=not config.vae)
    if config.vae:
        check_vae(read_header(Path(config.vae)), family)
    noise_model(config)
    find_tokenizer(config.tokenizer, path)


def outline_base_model(config: BaseModelConfig, dtype: torch.dtype = torch.float32) -> BaseModel:
    """Build UNet and text encoders without any weights (on torch's meta device), from headers and configs alone."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    path = Path(config.path)
    if path.is_dir():
        family = _check_folder(path)
        with torch.device("meta"):
            unet: Any = UNet2DConditionModel.from_config(json.loads((path / "unet" / "config.json").read_text("utf-8")))
            texts = tuple(
                _text(
                    (CLIPTextModelWithProjection if part.pooled else CLIPTextModel)(
                        CLIPTextConfig.from_pretrained(path / part.folder)
                    ),
                    part,
                )
                for part in family.texts
            )
    else:
        header = read_header(path)
        family = detect_family(header, vae=not config.vae)
        tensors = {name: torch.empty(shape, device="meta") for name, shape in header.shapes.items()}
        parts = {
            prefix: {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
            for prefix in (UNET, *(part.prefix for part in family.texts))
        }
        unet = build_unet(parts[UNET], family, path.name)
        texts = tuple(build_text(parts[part.prefix], part, path.name) for part in family.texts)
    for model in (unet, *(text.model for text in texts)):
        nn.Module.to(model.requires_grad_(False).eval(), dtype)
    return BaseModel(family=family, name=path.name, unet=unet, texts=texts, vae=None, tokenizer=None, dtype=dtype)


def _load_file(path: Path, tokenizer: Any, own_vae: bool) -> BaseModel:
    """Load UNet, text encoders and VAE of a single-file checkpoint, with prediction type and hashes."""
    header = read_header(path)
    family = detect_family(header, vae=own_vae)
    with safe_open(path, framework="pt") as file:
        unet = read_part(file, header.shapes, UNET)
        vae = read_part(file, header.shapes, VAE) if own_vae else {}
        texts = [read_part(file, header.shapes, part.prefix) for part in family.texts]
    return BaseModel(
        family=family,
        name=path.name,
        unet=build_unet(unet, family, path.name),
        texts=tuple(build_text(t, part, path.name) for t, part in zip(texts, family.texts, strict=True)),
        vae=build_vae(vae, path.name) if own_vae else None,
        tokenizer=tokenizer,
        identity={"unet": _hash(unet), "text_encoder": "/".join(map(_hash, texts)), "vae": _hash(vae)},
    )


def read_part(file: Any, names: Iterable[str], prefix: str) -> dict[str, Tensor]:
    """Read the tensors under a prefix, named without it."""
    return {name[len(prefix) :]: file.get_tensor(name) for name in names if name.startswith(prefix)}


def build_unet(tensors: dict[str, Tensor], family: Family, source: str) -> nn.Module:
    """Build a diffusers UNet from LDM tensors; every size is read from them."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    shape = unet_shape({k: tuple(v.shape) for k, v in tensors.items()}, family)
    with torch.device("meta"):
        unet = UNet2DConditionModel(**shape)
    names = unet_ldm_names(unet.state_dict(), shape["layers_per_block"])
    return _fill(unet, names, tensors, f"the UNet of {source}")


def unet_shape(shapes: Shapes, family: Family) -> dict[str, Any]:
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
        raise ValueError(
            f"The UNet has levels of different depth or several text widths; it is no {family.title} UNet."
        )
    channels = tuple(shapes[f"input_blocks.{level[0]}.0.out_layers.3.weight"][0] for level in levels)
    depths = tuple(_depth(shapes, f"input_blocks.{level[0]}.1.") for level in levels)
    projection = next(v for k, v in shapes.items() if k.endswith("1.proj_in.weight"))
    shape = {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": len(levels[0]),
        "down_block_types": tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attended),
        "up_block_types": tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attended)),
        "cross_attention_dim": contexts.pop(),
        # diffusers' name for the number of heads
        "attention_head_dim": family.heads or tuple(max(1, width // HEAD) for width in channels),
        "transformer_layers_per_block": tuple(max(1, depth) for depth in depths),
        "use_linear_projection": len(projection) == 2,
    }
    if "label_emb.0.0.weight" in shapes:
        shape |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": TIME_ID,
            "projection_class_embeddings_input_dim": shapes["label_emb.0.0.weight"][1],
        }
    return shape


def _depth(shapes: Shapes, prefix: str) -> int:
    """Count the transformer blocks of one attention layer."""
    place = len(prefix.split("."))
    return len({k.split(".")[place] for k in shapes if k.startswith(f"{prefix}transformer_blocks.")})


def build_text(tensors: dict[str, Tensor], part: TextPart, source: str) -> TextEncoder:
    """Build a text encoder from its tensors, CLIP's (with or without `text_model.`) or OpenCLIP's."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    if part.open_clip:
        tensors = from_open_clip(tensors)
    tensors = {k.removeprefix("text_model."): v for k, v in tensors.items()}
    what = f"the text encoder of {source}"
    for needed in ("embeddings.token_embedding.weight", "embeddings.position_embedding.weight"):
        if needed not in tensors:
            raise ValueError(f"{what} lacks the tensor {needed}; the file is incomplete.")
    vocabulary, width = tensors["embeddings.token_embedding.weight"].shape
    projected: dict[str, Any] = {"projection_dim": tensors["text_projection.weight"].shape[0]} if part.pooled else {}
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=tensors["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=1 + max(int(k.split(".")[2]) for k in tensors if k.startswith("encoder.layers.")),
        num_attention_heads=max(1, width // HEAD),
        max_position_embeddings=tensors["embeddings.position_embedding.weight"].shape[0],
        hidden_act="gelu" if part.open_clip else "quick_gelu",
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=0 if part.open_clip else vocabulary - 1,
        **projected,
    )
    with torch.device("meta"):
        encoder = (CLIPTextModelWithProjection if part.pooled else CLIPTextModel)(config)
    encoder = _fill(encoder, {k: k.removeprefix("text_model.") for k in encoder.state_dict()}, tensors, what)
    for module in encoder.modules():
        if "position_ids" in module._buffers:  # not stored in files
            module._buffers["position_ids"] = torch.arange(config.max_position_embeddings)[None]
    return _text(encoder, part)


def _text(model: Any, part: TextPart) -> TextEncoder:
    return TextEncoder(
        model=model,
        layer=part.layer,
        final_norm=part.final_norm,
        pooled=part.pooled,
        open_clip=part.open_clip,
        kohya=part.kohya,
    )


def read_vae(path: Path, family: Family) -> dict[str, Tensor]:
    """Read an autoencoder's file under the original names; diffusers' names are understood."""
    header = read_header(path)
    check_vae(header, family)
    first = "encoder.conv_in.weight"
    prefix = next(key.removesuffix(first) for key in header.shapes if key.endswith(first))
    with safe_open(path, framework="pt") as file:
        tensors = read_part(file, header.shapes, prefix)
    if any(".down_blocks." in name for name in tensors):
        for old, new in (("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0")):
            tensors = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in tensors.items()}
        levels = 1 + max(int(m[1]) for k in tensors if (m := re.match(r"encoder\.down_blocks\.(\d)\.", k)))
        names = vae_ldm_names(tensors, levels)
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
    return tensors


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
    """Give a meta-device module its tensors by mapped names; a missing, misshapen or broken one raises ValueError."""
    wanted = module.state_dict()
    state = {}
    for name, source in names.items():
        if source not in tensors:
            raise ValueError(f"{what} lacks the tensor {source}; the file is incomplete.")
        tensor, shape = tensors[source], wanted[name].shape
        if tensor.numel() != shape.numel():  # same count, other shape: a 1x1 conv stored for a linear layer
            raise ValueError(f"{what}: {source} has shape {tuple(tensor.shape)}, expected {tuple(shape)}.")
        values = tensor.half() if tensor.element_size() == 1 else tensor
        if not tensor.is_meta and not values.isfinite().all():
            raise ValueError(f"{what}: {source} holds values that are not finite; get the file again.")
        state[name] = tensor.reshape(shape)
    module.load_state_dict(state, assign=True)
    return module


def _check_folder(path: Path) -> Family:
    """Return the family of a diffusers folder; raises ValueError for any other folder."""
    for part in ("unet", "text_encoder", "vae", "scheduler"):
        if not any((path / part).glob("*.json")):
            raise ValueError(f"{path} is not a diffusers model folder: {part}/ with its config .json is missing.")
    try:
        unet = json.loads((path / "unet" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a diffusers folder: {error}") from error
    if (path / "text_encoder_2").is_dir():
        name = "sdxl"
    else:
        name = "sd2" if unet.get("cross_attention_dim") == 1024 else "sd1"
    if unet.get("in_channels", 4) != 4:
        raise ValueError(
            f"{path.name} takes {unet['in_channels']} input channels (an inpainting or edit model); choose one with 4."
        )
    return FAMILIES[name]


def _load_folder(path: Path, tokenizer: Any) -> BaseModel:
    """Load a diffusers folder, safetensors only, never from a hub."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    family = _check_folder(path)
    config = json.loads((path / "vae" / "config.json").read_text(encoding="utf-8"))
    tiny = config.get("_class_name") == "AutoencoderTiny"
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    try:
        unet = UNet2DConditionModel.from_pretrained(path / "unet", **options)
        texts = tuple(
            _text(
                (CLIPTextModelWithProjection if part.pooled else CLIPTextModel).from_pretrained(
                    path / part.folder, **options
                ),
                part,
            )
            for part in family.texts
        )
        vae = (AutoencoderTiny if tiny else AutoencoderKL).from_pretrained(path / "vae", **options)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read as a diffusers folder: {error}") from error
    if family.name == "sd2" and texts[0].model.config.num_hidden_layers == 23:
        texts[0].absent = 1  # such folders leave out the last layer, which is not used
    return BaseModel(
        family=family,
        name=path.name,
        unet=unet,
        texts=texts,
        vae=vae,
        tokenizer=tokenizer,
        identity={
            "unet": _hash_folder(path / "unet"),
            "text_encoder": "/".join(_hash_folder(path / part.folder) for part in family.texts),
            "vae": _hash_folder(path / "vae"),
        },
    )


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
