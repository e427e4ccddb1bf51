"""LoRA files that a run builds on: one that is continued, and those that are merged into the base model beneath it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from .config import BaseModelConfig, BeneathConfig, OptimizerConfig, RunConfig
from .models import BaseModel, outline_base_model, token_ids, unet_layer_names, word_ids
from .models.header import FileHeader, read_header
from .models.names import unet_ldm_names
from .networks import Embeddings, Network, Start, named_layers
from .networks.files import FileLayer, fits, group_tensors, layer_kind, made_for, merged_weight, without_lokr_core

UNET_PREFIXES = ("lora_unet_", "unet_", "diffusion_model_", "model_diffusion_model_", "lycoris_", "lycoris_unet_", "")
ENDINGS = {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}  # others end as they are named
ENDINGS |= {part: f"{part}.weight" for part in ("a1", "a2", "b1", "b2")}
BUNDLED = "bundle_emb."  # how OneTrainer names embeddings in LoRA files: bundle_emb.<word>.<text encoder>
FEW = 3  # names in a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFile:
    """A LoRA file that was read, or of which only the header was: then all tensors are on the meta device."""

    name: str
    layers: dict[str, FileLayer]  # by their names in the file
    metadata: dict[str, str]
    digest: str = ""  # sha256 of all that decides what it does
    model_hash: str = ""  # sha256 of the tensors, as kohya's sshs_model_hash
    words: tuple[str, ...] = ()  # whose embeddings lie in the file besides, and are not read


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """What a run continues."""

    layers: dict[str, Start]  # by kohya name
    name: str
    digest: str
    model_hash: str

    def describe(self) -> dict[str, Any]:
        """Return what a new file tells of this one; rank and alpha are those of the largest layer."""
        largest = max(self.layers.values(), key=lambda layer: layer.rank)
        size = {"rank": largest.rank, "alpha": largest.alpha, "kinds": sorted({s.kind for s in self.layers.values()})}
        return {"file": self.name, "sshs_model_hash": self.model_hash, **size}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A module of a base model that a LoRA can change."""

    module: Any
    comfy: str  # what ComfyUI's loader knows it by, whatever the family
    aliases: tuple[str, ...]  # its names in LoRA files, with underscores for dots


def outline_lora(path: Path) -> LoraFile:
    """Read which layers a LoRA file has from its header alone. Raises ValueError for anything that is no LoRA."""
    header = read_header(path)
    return _lora_file(header, {name: torch.empty(shape, device="meta") for name, shape in header.shapes.items()})


def load_lora(path: Path) -> LoraFile:
    """Read a LoRA file whole. Raises ValueError for anything that is no LoRA and for values that are not finite."""
    header = read_header(path)
    data = path.read_bytes()
    tensors = load(data)
    for name, tensor in tensors.items():
        if not (tensor.half() if tensor.element_size() == 1 else tensor).isfinite().all():
            raise ValueError(f"{path.name}: {name} holds values that are not finite; use another LoRA.")
    start = 8 + int.from_bytes(data[:8], "little")
    return _lora_file(
        header,
        tensors,
        digest=hashlib.sha256(data + json.dumps(_adapter(header), sort_keys=True).encode()).hexdigest(),
        model_hash=hashlib.sha256(data[start:]).hexdigest(),
    )


def _lora_file(header: FileHeader, tensors: Mapping[str, Tensor], **more: str) -> LoraFile:
    name = header.path.name
    words = tuple(sorted({key.removeprefix(BUNDLED).split(".")[0] for key in tensors if key.startswith(BUNDLED)}))
    grouped, unknown = group_tensors(key for key in tensors if not key.startswith(BUNDLED))
    if not grouped:
        raise ValueError(f"{name} is no LoRA (first tensor: {next(iter(tensors))}); choose a LoRA file.")
    if unknown:
        raise ValueError(
            f"{name} holds {len(unknown)} tensors of a kind that is not understood ({_some(unknown)}); use a file of "
            "LoRA, LoHa, LoKr, GLoRA, OFT, DoRA or full differences."
        )
    adapter, layers = _adapter(header), {}
    for layer, parts in grouped.items():
        kind = layer_kind(parts)
        if not kind:
            raise ValueError(f"{layer} in {name} has only {', '.join(sorted(parts))}; the file is incomplete.")
        found = {part: tensors[tensor] for part, tensor in parts.items()}
        stored = found.pop("alpha", None)
        if stored is None:
            alpha = _adapter_alpha(adapter, layer, found)
        else:
            alpha = 0.0 if stored.is_meta else float(stored)
        layers[layer] = FileLayer(source=layer, kind=kind, tensors=found, alpha=alpha)
    return LoraFile(name=name, layers=layers, metadata=header.metadata, words=words, **more)


def _adapter(header: FileHeader) -> dict[str, Any]:
    """Return peft's settings of the adapter: from the metadata as diffusers writes them, or from peft's own file."""
    stored = header.metadata.get("lora_adapter_metadata", "")
    beside = header.path.with_name("adapter_config.json")
    if not stored and header.path.name == "adapter_model.safetensors" and beside.is_file():
        stored = beside.read_text(encoding="utf-8")
    try:
        return json.loads(stored or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"The adapter settings of {header.path.name} are broken ({error}); get them again.") from error


def _adapter_alpha(adapter: Mapping[str, Any], layer: str, tensors: Mapping[str, Tensor]) -> float:
    """Return the alpha that peft's settings give a layer, 0 when they give none (the scale is 1)."""
    model, _, rest = layer.partition(".")
    of_model = {k.removeprefix(f"{model}."): v for k, v in adapter.items() if k.startswith(f"{model}.")}
    settings, name = (of_model, rest) if of_model else (adapter, layer)
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    found = next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", name)), None)
    alpha = float(patterns[found] if found is not None else settings.get("lora_alpha") or 0)
    rank = tensors["down"].shape[0] if "down" in tensors else 1
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def find_places(base: BaseModel) -> dict[str, Place]:
    """Return all modules that a LoRA can change by kohya name."""
    modules = (
        name for name, module in base.unet.named_modules() if isinstance(getattr(module, "weight", None), Tensor)
    )
    ldm = unet_ldm_names((f"{name}.weight" for name in modules), base.unet.config.layers_per_block)
    texts = {text.kohya: (text.model, text.depth) for text in base.texts}
    parts = {part.kohya: part for part in base.family.texts}
    places = {}
    for kohya, (name, module) in named_layers(base.unet, texts, unet_layer_names(base)).items():
        if kohya.startswith("lora_unet_"):
            original = ldm[f"{name}.weight"].removesuffix(".weight")
            comfy, names, prefixes = f"diffusion_model.{original}", {name, original}, UNET_PREFIXES
        else:
            prefix = next(prefix for prefix in texts if kohya.startswith(f"{prefix}_"))
            part, first = parts[prefix], prefix == next(iter(texts))
            comfy = f"text_encoders.{part.comfy}.transformer.{name}"
            names = {name, name.removeprefix("text_model.")}
            prefixes = (f"{prefix}_", f"{part.folder}_", f"lycoris_{part.folder}_")
            prefixes += (f"text_encoders_{part.comfy}_transformer_", *(("lora_te_", "lora_te1_") if first else ()))
            prefixes += ("lycoris_", "") if len(texts) == 1 else ()
        flat = {alias.replace(".", "_") for alias in names}
        flat |= {alias.removesuffix("_0") for alias in flat if alias.endswith("_to_out_0")}  # diffusers' processors
        places[kohya] = Place(
            module=module, comfy=comfy, aliases=tuple(prefix + alias for prefix in prefixes for alias in sorted(flat))
        )
    return places


def fit(lora: LoraFile, base: BaseModel, places: Mapping[str, Place]) -> dict[str, FileLayer]:
    """Return a file's layers by kohya name.

    Raises ValueError when one has no place in the base model or another shape, saying what the file seems to be for.
    """
    kohya = {alias: name for name, place in places.items() for alias in place.aliases}
    found: dict[str, FileLayer] = {}
    homeless = []
    for name, layer in lora.layers.items():
        flat = name.replace(".", "_").replace("base_model_model_", "").replace("_processor_", "_")
        place = kohya.get(flat)
        if place is None:
            homeless.append(name)
        elif place in found:
            raise ValueError(f"{lora.name} has the layer {place} twice, as {found[place].source} and as {name}.")
        else:
            found[place] = layer
    guess, title = made_for(lora.layers, lora.metadata), base.family.title
    remedy = f"choose one for {title}."
    if guess not in ("", title):
        remedy = f"it is a LoRA for {guess}, the base model is {title}; {remedy}"
    if homeless:
        raise ValueError(
            f"{len(homeless)} of {len(lora.layers)} layers of {lora.name} have no place in {base.name} "
            f"({_some(homeless)}): {remedy}"
        )
    if misfits := [layer.source for name, layer in found.items() if not _fits(layer, places[name].module)]:
        raise ValueError(
            f"{len(misfits)} of {len(lora.layers)} layers of {lora.name} have another shape than in {base.name} "
            f"({_some(misfits)}): {remedy}"
        )
    return found


def _fits(layer: FileLayer, module: Any) -> bool:
    bias = getattr(module, "bias", None)
    return fits(layer, module.weight.shape, None if bias is None else bias.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (", …" if len(names) > FEW else "")


def start_layers(lora: LoraFile, base: BaseModel, places: Mapping[str, Place]) -> dict[str, Start]:
    """Return what each layer of a file that is continued begins with, by kohya name; kinds may differ by layer.

    Raises ValueError for layers of a kind of module that is not trained.
    """
    starts = {}
    for name, layer in fit(lora, base, places).items():
        module = places[name].module
        norm = isinstance(module, nn.GroupNorm | nn.LayerNorm) and set(layer.tensors) <= {"diff", "diff_b"}
        if not norm and not isinstance(module, nn.Linear | nn.Conv2d):
            what = type(module).__name__
            raise ValueError(
                f"{layer.source} in {lora.name} changes a module of the kind {what}, which is not trained; use the "
                "file beneath a new LoRA instead."
            )
        start = Start(kind=layer.kind, tensors={p: t.float() for p, t in layer.tensors.items()}, alpha=layer.alpha)
        if not layer.alpha and "oft_blocks" not in layer.tensors:
            start = start._replace(alpha=float(start.rank))
        starts[name] = start
    return starts


def file_remarks(config: RunConfig) -> list[str]:
    """Return sentences about what of the files that are continued or merged is left out."""
    paths = [path for path in (config.lora.start, *(beneath.path for beneath in config.lora.beneath)) if path]
    return [
        f"{lora.name} holds embeddings besides its layers ({_some(list(lora.words))}); they are left out."
        for lora in map(outline_lora, map(Path, paths))
        if lora.words
    ]


def check_lora_files(config: RunConfig) -> None:
    """Raise ValueError for files that cannot be continued or merged, before anything is loaded: from headers alone."""
    if not config.lora.start and not config.lora.beneath:
        return
    base = outline_base_model(config.base_model)
    places = find_places(base)
    for beneath in config.lora.beneath:
        fit(outline_lora(Path(beneath.path)), base, places)
    if not config.lora.start:
        return
    lora = outline_lora(Path(config.lora.start))
    names = start_layers(lora, base, places)
    optimizer = config.optimizer
    rates = {"lora_unet": ("learning_rate", optimizer.learning_rate)}
    text_rates = (
        ("text_encoder_learning_rate", optimizer.text_encoder_learning_rate),
        ("text_encoder_2_learning_rate", optimizer.text_encoder_2_learning_rate),
    )
    rates |= {text.kohya: rate for text, rate in zip(base.texts, text_rates, strict=False)}
    for prefix, (setting, rate) in rates.items():
        if rate > 0 and not any(name.startswith(f"{prefix}_") for name in names):
            raise ValueError(
                f"{setting} is {rate:g}, but {lora.name} has no layer there ({prefix}_…) that could be continued; "
                "set it to 0."
            )


def outline_network(config: RunConfig, dtype: torch.dtype = torch.float32) -> tuple[BaseModel, Network]:
    """Build what a run trains, and what it is trained on in dtype, without weights: shapes on the meta device.

    Raises ValueError for a choice of layers that does not go with the base model, and for files whose layers cannot be
    continued.
    """
    base = outline_base_model(config.base_model, dtype)
    with torch.device("meta"):
        return base, build_network(
            base, config, learning_rates(config.optimizer, base), load_start(config, outline=True)
        )


def merge_beneath(base: BaseModel, beneath: tuple[BeneathConfig, ...]) -> None:
    """Add LoRA files to the weights of a base model in memory, in their order.

    Computed in float32 and rounded once, to the model's dtype. The text encoders' identity follows their weights.
    Raises ValueError for a file that does not fit, and for a sum that the dtype cannot hold.
    """
    if not beneath:
        return
    places = find_places(base)
    changes: dict[str, list[tuple[FileLayer, float]]] = {}
    text = []
    for config in beneath:
        lora = load_lora(Path(config.path))
        layers = fit(lora, base, places)
        for name, layer in layers.items():
            changes.setdefault(name, []).append((layer, config.strength))
        if not all(name.startswith("lora_unet_") for name in layers):
            text.append(f"{lora.digest}*{config.strength}")
    for name, summands in changes.items():
        module = places[name].module
        weight = module.weight.detach().float()
        bias = module.bias.detach().float() if getattr(module, "bias", None) is not None else None
        for layer, strength in summands:
            weight = merged_weight(weight, layer, strength)
            if bias is not None and "diff_b" in layer.tensors:
                bias = bias + strength * layer.tensors["diff_b"].float()
        module.weight.data = weight.to(base.dtype)
        if bias is not None:
            module.bias.data = bias.to(base.dtype)
        if not all(parameter.isfinite().all() for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{name} does not fit {base.dtype} with {len(summands)} LoRAs beneath added; lower their strength, or "
                "use bfloat16 or float32 precision."
            )
    _mark_text(base, *text)


def _mark_text(base: BaseModel, *changes: str) -> None:
    """Let the text encoders' identity tell what was added to them."""
    base.identity["text_encoder"] = "+".join([base.identity["text_encoder"], *changes])


def load_start(config: RunConfig, *, outline: bool = False) -> Continued | None:
    """Read the file that a run continues, if it does; outline: its header alone, tensors on the meta device."""
    if not config.lora.start:
        return None
    base = outline_base_model(config.base_model)
    lora = (outline_lora if outline else load_lora)(Path(config.lora.start))
    return Continued(
        layers=start_layers(lora, base, find_places(base)),
        name=lora.name,
        digest=lora.digest,
        model_hash=lora.model_hash,
    )


def learning_rates(optimizer: OptimizerConfig, base: BaseModel) -> dict[str, float]:
    """Return the learning rate of each model by what names of its layers in a LoRA file begin with."""
    texts = (optimizer.text_encoder_learning_rate, optimizer.text_encoder_2_learning_rate)
    kohya = (text.kohya for text in base.family.texts)
    return {"lora_unet": optimizer.learning_rate, **dict(zip(kohya, texts, strict=False))}


def build_network(base: BaseModel, config: RunConfig, rates: Mapping[str, float], start: Continued | None) -> Network:
    """Build the layers that are new, of models with a learning rate, or all those of a file that is continued.

    rates: learning rates by what names of layers in a LoRA file begin with. A file's layers without one stay as they
    are, and act on what is trained; the text encoders' identity tells of those in them.
    """
    texts = {text.kohya: (text.model, text.depth) for text in base.texts}
    names = unet_layer_names(base)
    if start is None:
        unet = base.unet if rates["lora_unet"] > 0 else None
        texts = {prefix: text for prefix, text in texts.items() if rates[prefix] > 0}
        network = Network(unet, texts, config.lora, config.train.seed, names)
    else:
        if not all(name.startswith("lora_unet_") for name in start.layers):
            _mark_text(base, start.digest)
        network = Network(base.unet, texts, config.lora, config.train.seed, names, start.layers)
    network.embeddings = build_embeddings(base, config)
    return network


def build_embeddings(base: BaseModel, config: RunConfig) -> Embeddings:
    """Build the vectors of the words that are learned; of a base model's outline without values."""
    embeddings = config.lora.embeddings
    init = {e.token: token_ids(base.tokenizer, e.init) for e in embeddings if base.tokenizer}
    return Embeddings(base.texts, embeddings, word_ids(embeddings), init, config.train.seed)


def comfy_tensors(path: Path, config: BaseModelConfig) -> dict[str, Tensor]:
    """Return a LoRA file's tensors by names that ComfyUI's loader understands, whatever those in the file are."""
    base = outline_base_model(config)
    places = find_places(base)
    tensors = {}
    for name, stored in fit(load_lora(path), base, places).items():
        layer = without_lokr_core(stored)
        for part, tensor in layer.tensors.items():
            tensors[f"{places[name].comfy}.{ENDINGS.get(part, part)}"] = tensor
        if layer.alpha or "oft_blocks" in layer.tensors:  # without it ComfyUI leaves BOFT's layers as they were
            tensors[f"{places[name].comfy}.alpha"] = torch.tensor(layer.alpha)
    return tensors
