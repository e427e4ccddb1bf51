"""The layers of any MODEL: which can be trained, by which presets, and the repeated blocks they lie in.

Nothing is listed by architecture but UNets: blocks are found as modules that repeat, roles are read from paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ....trainer_core.config import Preset
from ....trainer_core.config.algorithms import KEYS_AND_ENDS
from ....trainer_core.memory.gradient_checkpointing import LEVELS, PARTS, WHOLE
from ....trainer_core.models.base import BASE, Layer, Unit
from ....trainer_core.models.sd.layers import PREFIX
from ....trainer_core.networks.layers.shape import is_linear, is_matrix, is_norm, is_spatial
from . import names

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # of blocks
AUXILIARY = re.compile(  # lists of small blocks beside the model's own: of captions, of further inputs
    r"refiner|adapter|guidance|fusion|connector|caption|te?xt|audio|music|vision|face|inject|embed|encoder|projector|visual\."
)
# Pieces of paths inside a block.
MODULATION = re.compile(r"\w*(modulation|ada_?(ln|LN)|norm)\w*|(\w+_)?mod([A-Z_]\w*)?|mapper(_sca|_crp)?")
EMBEDDER = re.compile(r"(\w+_)?(time|timestep|emb|embed|embedder|embedding|embeddings)(_\w+)?")
ATTENTION = re.compile(r"\w*(attn|attention)\w*|(to_)?w?[qkvo]\d?|\w*(qkv|kv)\w*|[qkvo]_proj|linear[12]", re.I)
KEYS = re.compile(r"(to_|add_)?(w\d?)?(k|v|qkv|kv|key|value)(_proj|_linear|_[xytc]|_img)?|Wqkv", re.I)
MLP_END = re.compile(
    r"(.*[._])?(mlp\w*|ff\w*|feed_forward|ffn|experts?\w*|channelwise|DenseReluDense)\.(\S+\.)?"
    r"(2|4|fc2|c_proj|w2|wo|layer2|linear_2|linear_fc2|down|down_proj|out_layer)|ff_out|(.*\.)?block\.layer2"
)
FEED_FORWARD = re.compile(
    r"(\w+_)?(mlp|ffn?|feed_?forward|channelwise|DenseReluDense)(_\w+)?"
)  # the whole part of a block
UNET_PARTS = ("input_blocks", "middle_block", "output_blocks")  # of OpenAI's UNet
UNET_UNITS = ("ResBlock", "BasicTransformerBlock")  # its modules that repeat


def list_layers(model: Any) -> list[Layer]:
    """List all modules with a weight of a MODEL's denoiser; model: ComfyUI's BaseModel."""
    denoiser = model.diffusion_model
    aliases, slices = names.aliases(model)
    find, unet = _Blocks(denoiser), is_unet(denoiser)
    layers = []
    for path, module in denoiser.named_modules():
        if not path or not (isinstance(getattr(module, "weight", None), Tensor) or is_linear(module)):
            continue
        matrix = is_matrix(module)
        trainable = path in aliases and (matrix or is_norm(module))  # ComfyUI can patch no weight that is computed
        presets = (_unet_presets if unet else _presets)(path, module, find) if trainable else frozenset[str]()
        layers.append(
            Layer(
                name=f"{PREFIX}_{path.replace('.', '_')}",
                path=path,
                module=module,
                part=PREFIX,
                block=find.block(path),
                trainable=trainable,
                presets=presets,
                comfy=f"{names.DENOISER}{path}",
                aliases=tuple(aliases.get(path, ())),
                slices=slices.get(path, {}),
                kind=_kind(path, module, presets, find, unet),
            )
        )
    return layers


def unreachable(listed: Sequence[Layer]) -> list[str]:
    """List the linear layers of blocks whose weight no LoRA file names: it is computed in each pass, or complex."""
    return [each.name for each in listed if each.block and not each.trainable and isinstance(each.module, nn.Linear)]


def blocks(denoiser: nn.Module) -> list[str]:
    """List the names of a denoiser's blocks, which are their paths, in their order."""
    return list(_Blocks(denoiser).main)


def named_blocks(denoiser: nn.Module) -> dict[str, nn.Module]:
    """Map paths of all repeated blocks to what of them is called, also of small ones beside the model's own."""
    found = {}
    for path, block in _Blocks(denoiser).found.items():
        found |= {path + (f", part {n}" if n else ""): each for n, each in enumerate(_called(block))}
    return found


def block_layouts(denoiser: nn.Module, setting: str) -> list[list[str]]:
    """List the possible block orders of a list setting; block_weights may begin with BASE, for all other layers."""
    found = blocks(denoiser)
    return [found, [BASE, *found]] if setting == "block_weights" else [found]


def units(denoiser: nn.Module) -> list[Unit]:
    """List the repeated blocks, each with the lowest gradient checkpointing level that recomputes it.

    Each level recomputes a further fifth of the blocks, evenly over the model; the last one recomputes all.
    """
    if is_unet(denoiser):
        found = [module for module in denoiser.modules() if type(module).__name__ in UNET_UNITS]
    else:
        found = list(named_blocks(denoiser).values())
    return [(module, WHOLE + number % (len(LEVELS) - WHOLE)) for number, module in enumerate(found)]


def feed_forward(found: Sequence[Unit]) -> list[Unit]:
    """List the feed-forward parts of blocks that are modules of their own, for the level of parts alone."""
    return [(part, LEVELS.index(PARTS)) for block, _ in found for part in _feed_forward(block)]


def _feed_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost parts of a block that are called as such and have several layers."""
    for name, child in module.named_children():
        named = FEED_FORWARD.fullmatch(name) and not MODULATION.fullmatch(name)
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)  # which has no forward
        if named and not listed and sum(map(is_linear, child.modules())) > 1:
            yield child
        else:
            yield from _feed_forward(child)


def shared_out(found: Sequence[Unit], kept: Sequence[int]) -> list[Unit]:
    """Share blocks out to the levels of gradient checkpointing, so that each saves a further fifth of their bytes.

    kept: bytes that each block keeps for the backward pass.
    """
    sums, levels = [0] * (len(LEVELS) - WHOLE), {}
    for number in sorted(range(len(found)), key=lambda number: (-kept[number], number)):
        level = min(range(len(sums)), key=lambda level: (sums[level], level))
        sums[level] += kept[number]
        levels[number] = level + WHOLE
    return [(unit, levels[number]) for number, (unit, _) in enumerate(found)]


def is_unet(denoiser: nn.Module) -> bool:
    """Tell whether a denoiser is a UNet of Stable Diffusion's kind, whose layers the UNet presets name."""
    return all(hasattr(denoiser, part) for part in UNET_PARTS)


class _Blocks:
    """The repeated blocks of a denoiser by their paths."""

    def __init__(self, denoiser: nn.Module) -> None:
        self.found = dict(_unet_blocks(denoiser) if is_unet(denoiser) else _repeated(denoiser, "", is_linear))
        self.found = self.found or dict(_repeated(denoiser, "", is_matrix))  # a network of convolutions alone
        halves = any("decoder" in path for path in self.found)  # whose other half is the encoder
        seen = {path: path.replace("encoder", "") if halves else path for path in self.found}
        main = [path for path, name in seen.items() if not AUXILIARY.search(name)]
        self.main = dict.fromkeys(main or self.found)

    def block(self, path: str) -> str:
        """Find the block that a module lies in; "" for modules outside the model's own blocks."""
        pieces = path.split(".")
        starts = (".".join(pieces[:end]) for end in range(1, len(pieces) + 1))
        return next((start for start in starts if start in self.main), "")

    def inside(self, path: str) -> str:
        """Cut a path to what is behind its block, "" outside of blocks; without blocks all of a model is inside."""
        block = self.block(path)
        return path if not self.main else path[len(block) + 1 :] if block else ""


def _repeated(module: nn.Module, path: str, works: Callable[[Any], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the outermost lists of blocks, with their paths. works: tells layers that blocks have."""
    for name, child in module.named_children():
        if _is_list_of_blocks(child, works):
            yield from ((f"{path}{name}.{number}", each) for number, each in child.named_children())
        else:
            yield from _repeated(child, f"{path}{name}.", works)


def _is_list_of_blocks(module: nn.Module, works: Callable[[Any], bool]) -> bool:
    """Tell whether a module lists blocks: of several layers, one of them of the kind that works.

    What runs in a row or is found by name has blocks of one class only: else it may be the parts of one block.
    """
    children = list(module.children()) if isinstance(module, LISTS) else []
    listed = isinstance(module, nn.ModuleList)
    if len(children) < (1 if listed else 2) or (not listed and len({type(each) for each in children}) > 1):
        return False
    return all(list(each.children()) and any(map(works, each.modules())) for each in children)


def _unet_blocks(unet: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a UNet in its order; the middle counts as one, and some have none."""
    for part in UNET_PARTS:
        module = getattr(unet, part)
        if part == "middle_block":
            yield from [(part, module)] if module is not None else []
        else:
            yield from ((f"{part}.{number}", each) for number, each in module.named_children())


def _called(block: nn.Module) -> list[nn.Module]:
    """List the modules of a block whose forward runs: a list of modules has none."""
    if not isinstance(block, nn.ModuleList | nn.ModuleDict):
        return [block]
    return [each for child in block.children() if list(child.children()) for each in _called(child)]


def _presets(path: str, module: nn.Module, find: _Blocks) -> frozenset[str]:
    """List what trains a layer of a transformer, as `Layer.presets`; a norm follows the layers of its block."""
    presets: set[Preset | str] = {"full"}
    if not is_spatial(module):
        presets.add("full-lin")
    inside = find.inside(path)
    pieces = inside.split(".")
    if is_norm(module):
        return frozenset(presets | ({"attn-only", "attn-mlp"} if inside else set()))
    marked = any(MODULATION.fullmatch(piece) or EMBEDDER.fullmatch(piece) for piece in pieces)
    if inside and not marked and is_linear(module):
        presets.add("attn-mlp")
        attends = any(ATTENTION.fullmatch(piece) for piece in pieces) and not _in_mlp(pieces)
        presets |= {"attn-only"} if attends else set()
        ends = (attends and KEYS.fullmatch(_last(pieces))) or MLP_END.fullmatch(inside)
        presets |= {KEYS_AND_ENDS} if ends else set()
    return frozenset(presets)


def _kind(path: str, module: nn.Module, presets: frozenset[str], find: _Blocks, unet: bool) -> str:
    """Find the kind of a layer, as `Layer.kind`; outside of blocks is what embeds, and the last layer."""
    if not presets or not is_matrix(module):
        return ""
    if is_spatial(module):
        return "convolution"
    if "attn-only" in presets:
        return "attention"
    if unet:
        return "mlp" if ".ff." in path else "modulation" if ".emb_layers." in path else "other"
    if "attn-mlp" in presets:
        return "mlp"
    return "modulation" if any(map(MODULATION.fullmatch, find.inside(path).split("."))) else "other"


def is_key_or_end(path: str) -> bool:
    """Tell whether a layer of a text encoder makes keys or values, or ends an MLP."""
    return bool(KEYS.fullmatch(_last(path.split("."))) or MLP_END.fullmatch(path))


def _in_mlp(pieces: list[str]) -> bool:
    return any(re.fullmatch(r"\w*(mlp|ff|feed_?forward|ffn|experts?)\w*", piece, re.I) for piece in pieces[:-1])


def _last(pieces: list[str]) -> str:
    """The last piece of a path that is a name."""
    return next((piece for piece in reversed(pieces) if not piece.isdecimal()), "")


def _unet_presets(path: str, module: nn.Module, find: _Blocks) -> frozenset[str]:
    """List what trains a layer of a UNet, as for those that this pack loads itself."""
    del find
    if path.startswith("label_emb"):
        return frozenset()
    presets = {"full"}
    if not is_spatial(module):
        presets.add("full-lin")
    attention = re.search(r"\.attn[12]\.", path) is not None
    within = ".transformer_blocks." in path or re.search(r"\.1\.(norm|proj_in|proj_out)$", path) is not None
    if within:
        presets |= {"attn-mlp", "unet-transformer-only"} | ({"attn-only"} if attention or is_norm(module) else set())
        presets |= {KEYS_AND_ENDS} if path.endswith((".to_k", ".to_v", ".ff.net.2")) else set()
    elif not path.startswith("time_embed"):
        presets.add("unet-convblock-only")
    return frozenset(presets)
