"""The layers of a UNet and of CLIP: names in LoRA files, presets that train them, and the blocks they lie in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn

from ...config import DENOISER_ONLY, Preset
from ...config.algorithms import KEYS_AND_ENDS
from ..base import BASE, Layer
from .family import Family, TextPart
from .identify import made_for
from .names import UNET_OUTSIDE, unet_ldm_names
from .text import ClipEncoder

PREFIX = "lora_unet"  # of the UNet's layers in our LoRA files
PREFIXES = ("lora_unet_", "unet_", "diffusion_model_", "model_diffusion_model_", "lycoris_", "lycoris_unet_", "")
PRESETS: tuple[Preset, ...] = get_args(Preset)
TEXT_PRESETS = frozenset(preset for preset in PRESETS if preset not in DENOISER_ONLY)
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
ENDS = (".to_k", ".to_v", ".ff.net.2", ".k_proj", ".v_proj", ".fc2")


@dataclass(frozen=True)
class StableDiffusionLayers:
    """The layers of a UNet and of its text encoders; implements `Layers`."""

    unet: Any
    texts: Sequence[ClipEncoder]
    family: Family
    further_names: None = None  # every layer lists all of its names

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the UNet's blocks in the order of kohya's lists."""
        return tuple(block_names(self.unet))

    def listed(self) -> list[Layer]:
        """List the layers of the UNet and of the text encoders in memory."""
        return list_layers(self.unet, self.texts, self.family)

    def layouts(self, setting: str) -> list[list[str]]:
        """List the possible block orders of a list setting of LoRA Config."""
        return block_layouts(self.unet, setting)

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess the family that a LoRA file was made for; "" if nothing tells."""
        return made_for(widths, metadata)


def list_layers(unet: nn.Module | None, texts: Sequence[ClipEncoder], family: Family) -> list[Layer]:
    """List all modules with a weight of the UNet and the text encoders, if in memory."""
    layers = [] if unet is None else unet_layers(unet, original=family.ldm_names)
    parts = {part.kohya: part for part in family.texts}
    for index, text in enumerate(texts):
        layers += text_layers(text, parts[text.prefix], first=index == 0, only=len(texts) == 1)
    return layers


def unet_layers(unet: nn.Module, *, original: bool = False) -> list[Layer]:
    """List the modules of a UNet with a weight; original: LoRA files use the original code's names."""
    modules = [(path, module) for path, module in unet.named_modules() if _has_weight(module)]
    known = (path for path, _ in modules if path in UNET_OUTSIDE or path.startswith(("down_", "mid_", "up_")))
    config: Any = unet.config
    ldm = unet_ldm_names((f"{path}.weight" for path in known), config.layers_per_block)
    find, layers = _block_finder(unet), []
    for path, module in modules:
        ldm_path = ldm.get(f"{path}.weight", f"{path}.weight").removesuffix(".weight")
        trainable = isinstance(module, nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm)
        layers.append(
            Layer(
                name=f"{PREFIX}_{_flat(ldm_path if original else path)}",
                path=path,
                module=module,
                part=PREFIX,
                block=find(path),
                trainable=trainable,
                presets=_unet_presets(path, module) if trainable else frozenset(),
                comfy=f"diffusion_model.{ldm_path}",
                aliases=_aliases(PREFIXES, {path, ldm_path}),
                kind=_kind(path, module),
            )
        )
    return layers


def text_layers(text: ClipEncoder, part: TextPart, *, first: bool = True, only: bool = True) -> list[Layer]:
    """List the modules of a CLIP encoder with a weight; linear modules of the layers in use are trainable.

    first, only: whether it is the model's first, or only, text encoder; some LoRA files do not name it then.
    """
    prefixes = (f"{text.prefix}_", f"{part.folder}_", f"lycoris_{part.folder}_")
    prefixes += (f"text_encoders_{part.comfy}_transformer_", *(("lora_te_", "lora_te1_") if first else ()))
    prefixes += ("lycoris_", "") if only else ()
    layers = []
    for own, module in text.model.named_modules():
        if not _has_weight(module):
            continue
        # newer versions of transformers omit `text_model.`
        path = own if own.startswith(("text_model.", "text_projection")) else f"text_model.{own}"
        projection = path.rpartition(".")[2] in TEXT_LAYERS and isinstance(module, nn.Linear)
        trainable = projection and _number(path) < text.depth
        presets = TEXT_PRESETS | ({KEYS_AND_ENDS} if path.endswith(ENDS) else frozenset())
        layers.append(
            Layer(
                name=f"{text.prefix}_{_flat(path)}",
                path=path,
                module=module,
                part=text.prefix,
                block="",
                trainable=trainable,
                presets=presets if trainable else frozenset(),
                comfy=f"text_encoders.{part.comfy}.transformer.{path}",
                aliases=_aliases(prefixes, {path, path.removeprefix("text_model.")}),
                kind=("mlp" if path.endswith((".fc1", ".fc2")) else "attention") if projection else "",
            )
        )
    return layers


def block_names(unet: Any) -> list[str]:
    """List the names of a UNet's blocks in the order of kohya's lists.

    Stable Diffusion 1 and 2 have 25: embeddings belong to the first input block, conv_out to the last output block. XL
    has 23: both are separate, and the middle block counts as three.
    """
    count = len(unet.config.down_block_types) * (unet.config.layers_per_block + 1)
    inside, outside = [f"IN{i:02}" for i in range(count)], [f"OUT{i:02}" for i in range(count)]
    if _is_xl(unet):
        return ["EMB", *inside, "MID0", "MID1", "MID2", *outside, "LAST"]
    return [*inside, "MID", *outside]


def block_layouts(unet: Any, setting: str) -> list[list[str]]:
    """List the possible block orders of a list setting.

    block_weights may also follow block-weight extensions: BASE, then the blocks with a transformer.
    """
    names = block_names(unet)
    if setting != "block_weights":
        return [names]
    find = _block_finder(unet)
    attended = {find(path) for path, _ in unet.named_modules() if re.search(r"attentions\.\d+$", path)}
    return [names, [BASE, *(name for name in names if name in attended)]]


def _block_finder(unet: Any) -> Callable[[str], str]:
    """Build a function that maps a module's diffusers name to its block."""
    each, xl, names = unet.config.layers_per_block + 1, _is_xl(unet), block_names(unet)

    def find(path: str) -> str:
        part, *rest = path.split(".")
        if part in ("down_blocks", "up_blocks"):
            level, kind, position = int(rest[0]), rest[1], int(rest[2])
            number = each * level + (each - 1 if kind.endswith("samplers") else position)
            return f"IN{number + 1:02}" if part == "down_blocks" else f"OUT{number:02}"
        if part == "mid_block":
            return "MID" if not xl else "MID1" if rest[0] == "attentions" else f"MID{2 * int(rest[1])}"
        if part == "conv_in":
            return "IN00"
        return names[-1] if part in ("conv_norm_out", "conv_out") else names[0]

    return find


def _is_xl(unet: Any) -> bool:
    return unet.config.addition_embed_type == "text_time"


def _unet_presets(path: str, module: nn.Module) -> frozenset[str]:
    """List what trains a layer of the UNet, as `Layer.presets`; a norm follows the layers beside it."""
    matrix = isinstance(module, nn.Linear | nn.Conv2d)
    presets = frozenset(preset for preset in PRESETS if _in_preset(preset, path, module))
    return presets | {KEYS_AND_ENDS} if matrix and path.endswith(ENDS) else presets


def _kind(path: str, module: nn.Module) -> str:
    """Find the kind of a layer of the UNet, as `Layer.kind`; what scales by the time is a modulation."""
    if not isinstance(module, nn.Linear | nn.Conv2d) or path.startswith("add_embedding"):
        return ""
    if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
        return "convolution"
    if ".attn1." in path or ".attn2." in path:
        return "attention"
    return "mlp" if ".ff." in path else "modulation" if path.endswith(".time_emb_proj") else "other"


def _in_preset(preset: Preset, path: str, module: nn.Module) -> bool:
    """Tell whether a preset trains a layer of the UNet.

    No preset trains the size embeddings of Stable Diffusion XL; other trainers freeze them, too.
    """
    if path.startswith("add_embedding"):
        return False
    if preset == "attn-only" and isinstance(module, nn.Linear | nn.Conv2d):
        return ".attn1." in path or ".attn2." in path
    if preset in ("attn-only", "attn-mlp", "unet-transformer-only"):
        return ".attentions." in path
    if preset == "unet-convblock-only":
        return ".attentions." not in path and not path.startswith("time_embedding")
    return preset == "full" or not (isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1))


def _aliases(prefixes: tuple[str, ...], paths: set[str]) -> tuple[str, ...]:
    """List the names of a layer in LoRA files of other programs, with underscores for dots."""
    flat = {_flat(path) for path in paths}
    flat |= {name.removesuffix("_0") for name in flat if name.endswith("_to_out_0")}  # diffusers' processors
    return tuple(prefix + name for prefix in prefixes for name in sorted(flat))


def _has_weight(module: nn.Module) -> bool:
    """Tell whether a module has a weight, plain or quantized."""
    return isinstance(getattr(module, "weight", None), Tensor) or hasattr(module, "kept")


def _number(path: str) -> int:
    """Read the number of a module's CLIP layer from its path."""
    return next(int(part) for part in path.split(".") if part.isdecimal())


def _flat(path: str) -> str:
    return path.replace(".", "_")
