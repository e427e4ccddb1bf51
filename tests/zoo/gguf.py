"""MODELs as the loader of GGUF files makes them: codes in blocks, decoded and patched by their layers at each use.

The classes do what those of ComfyUI-GGUF do for ComfyUI, without its files.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.odd import Odd
from zoo.zoo import fill, patcher_of

import zoo.comfy_here  # noqa: F401  # isort: skip
import comfy.float
import comfy.lora
import comfy.model_patcher
import comfy.ops
import comfy.utils

BLOCK, SMALL = 32, 512  # numbers of a block with one scale, and of a weight that stays as it is
Put = namedtuple("Put", ["weight", "inplace_update"])


# --- formats -----------------------------------------------------------------------------------------------------


def _scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Join scales in float16 and codes in bytes: blocks of bytes."""
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], dim=1)


def to_q8_0(blocks: Tensor) -> Tensor:
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    return _scaled((blocks / scale.float()).round().clamp(-127, 127).to(torch.int8), scale)


def of_q8_0(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored[:, :2].view(torch.float16).to(dtype) * stored[:, 2:].view(torch.int8)


def to_q4_0(blocks: Tensor) -> Tensor:
    scale = (blocks.abs().amax(1, keepdim=True) / 7).half()
    codes = ((blocks / scale.float()).round().clamp(-8, 7) + 8).to(torch.uint8)
    return _scaled(codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4, scale)


def of_q4_0(stored: Tensor, dtype: torch.dtype) -> Tensor:
    codes = torch.cat([stored[:, 2:] & 15, stored[:, 2:] >> 4], dim=1).to(torch.int8) - 8
    return stored[:, :2].view(torch.float16).to(dtype) * codes


def to_bf16(blocks: Tensor) -> Tensor:
    return blocks.bfloat16().view(torch.uint8)


def of_bf16(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.view(torch.bfloat16).float()


FORMATS = {"Q8_0": (to_q8_0, of_q8_0), "Q4_0": (to_q4_0, of_q4_0), "BF16": (to_bf16, of_bf16)}
PLAIN = {None, "F32", "F16"}  # which torch holds as they are


# --- the loader's classes ----------------------------------------------------------------------------------------


class Codes(torch.Tensor):
    """Bytes of a weight, with its format, the shape it stands for, and the patches it gets when it is decoded."""

    def __init__(self, *_: Any, tensor_type: Any, tensor_shape: Any, patches: Any = ()) -> None:
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

    def __new__(cls, *args: Any, **_: Any) -> Codes:
        return super().__new__(cls, *args)

    def to(self, *args: Any, **kwargs: Any) -> Codes:
        new = super().to(*args, **kwargs)  # the same object where nothing changes
        new.tensor_type = getattr(self, "tensor_type", None)
        new.tensor_shape = getattr(self, "tensor_shape", new.data.shape)
        new.patches = getattr(self, "patches", []).copy()
        return new

    def clone(self, *_: Any, **__: Any) -> Codes:
        return self

    def detach(self, *_: Any, **__: Any) -> Codes:
        return self

    @property
    def shape(self) -> torch.Size:
        if not hasattr(self, "tensor_shape"):
            self.tensor_shape = self.size()
        return self.tensor_shape


def coded(weight: Any) -> bool:
    return weight is not None and getattr(weight, "tensor_type", None) not in PLAIN


def stored(weight: Tensor, kind: str) -> Codes:
    """Store a weight in a format; in float16 where its rows are no whole blocks, in float32 where it is small."""
    shape = weight.shape
    if weight.numel() <= SMALL:
        return Codes(weight, tensor_type="F32", tensor_shape=shape)
    if weight[0].numel() % BLOCK:
        return Codes(weight.half(), tensor_type="F16", tensor_shape=shape)
    rows = FORMATS[kind][0](weight.reshape(-1, BLOCK)).reshape(len(weight), -1)
    return Codes(rows, tensor_type=kind, tensor_shape=shape)


def decoded(weight: Any, dtype: torch.dtype) -> Tensor:
    """Decode a weight, by float16 as the loader does where nothing else is set."""
    if not coded(weight):
        return weight.to(dtype)
    blocks = weight.data.as_subclass(Tensor).reshape(len(weight.data) * weight.tensor_shape[1:].numel() // BLOCK, -1)
    return FORMATS[weight.tensor_type][1](blocks, torch.float16).reshape(weight.tensor_shape).to(dtype)


class Layer(nn.Module):
    """Decodes its weight at each use, and puts patches on it then."""

    comfy_cast_weights = True

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if not isinstance(self, nn.Linear) and not coded(state.get(f"{prefix}weight")):
            super()._load_from_state_dict(state, prefix, *args)
            return
        for part in ("weight", "bias"):
            if state.get(f"{prefix}{part}") is not None:
                setattr(self, part, nn.Parameter(state[f"{prefix}{part}"], requires_grad=False))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """State sizes alone, for ComfyUI's estimates of memory; of the largest weight also what decoding takes."""
        if not (coded(self.weight) or coded(self.bias)):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for part in ("weight", "bias"):
            if getattr(self, part) is not None:
                destination[prefix + part] = torch.zeros_like(getattr(self, part), device="meta")
        if getattr(self.weight, "is_largest_weight", False):
            destination[f"{prefix}temp.weight"] = torch.empty(*self.weight.tensor_shape, device="meta").half()

    def get_weight(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        pairs = getattr(tensor, "patches", [])
        patches = [each for some, _ in pairs for each in some]
        weight = decoded(tensor, dtype)
        weight = torch.Tensor(weight) if isinstance(weight, Codes) else weight
        return comfy.lora.calculate_weight(patches, weight, pairs[0][1]) if patches else weight

    def cast_bias_weight(self, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None) -> Any:
        dtype, device = dtype or input.dtype, device or input.device
        parts = []
        for part, to in ((self.weight, dtype), (self.bias, bias_dtype or dtype)):
            found = None if part is None else self.get_weight(part.to(device), dtype)
            parts.append(found if found is None else comfy.ops.cast_to(found, to, device, copy=False))
        return tuple(parts)

    def forward_comfy_cast_weights(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if coded(self.weight) or coded(self.bias):
            found = self.forward_coded(input, *args, **kwargs)
        else:
            found = super().forward_comfy_cast_weights(input, *args, **kwargs)
        return torch.Tensor(found) if isinstance(found, Codes) else found


class Ops(comfy.ops.manual_cast):
    """ComfyUI's operations on codes."""

    class Linear(Layer, comfy.ops.manual_cast.Linear):
        def __init__(self, ins: int, outs: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = ins, outs, None, None

        def forward_coded(self, input: Tensor) -> Tensor:
            return F.linear(input, *self.cast_bias_weight(input))

    class Conv2d(Layer, comfy.ops.manual_cast.Conv2d):
        def forward_coded(self, input: Tensor) -> Tensor:
            return self._conv_forward(input, *self.cast_bias_weight(input))

    class LayerNorm(Layer, comfy.ops.manual_cast.LayerNorm):
        pass


def moved(patch: Any, device: Any) -> Any:
    """Move the tensors of a patch in lists and tuples; adapters stay as they are."""
    if isinstance(patch, list | tuple):
        return type(patch)(moved(each, device) for each in patch)
    return patch.to(device) if isinstance(patch, Tensor) else patch


class Patcher(comfy.model_patcher.ModelPatcher):
    """Gives patches of codes to their codes; it returns nothing."""

    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> None:
        if key not in self.patches:
            return
        weight, patches = comfy.utils.get_attr(self.model, key), self.patches[key]
        if coded(weight):
            out = weight.to(device_to)
            out.patches = [(moved(patches, self.offload_device), key)]
        else:
            inplace_update = self.weight_inplace_update or inplace_update
            if key not in self.backup:
                kept = weight.to(device=self.offload_device, copy=inplace_update)
                self.backup[key] = Put(kept, inplace_update)
            out = comfy.lora.calculate_weight(patches, weight.to(device_to, torch.float32, copy=True), key)
            out = comfy.float.stochastic_rounding(out, weight.dtype)
        (comfy.utils.copy_to_param if inplace_update else comfy.utils.set_attr_param)(self.model, key, out)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        for each in self.model.parameters() if unpatch_weights else ():
            if coded(each) and each.patches:
                each.patches = []
        return super().unpatch_model(device_to=device_to, unpatch_weights=unpatch_weights)

    def load(self, *args: Any, force_patch_weights: bool = False, **kwargs: Any) -> None:
        super().load(*args, force_patch_weights=True, **kwargs)

    def clone(self, *args: Any, **kwargs: Any) -> Patcher:
        own, self.__class__ = self.__class__, Patcher
        found = super().clone(*args, **kwargs)
        self.__class__ = own
        return found


@torch.inference_mode()  # as ComfyUI runs nodes
def coded_model(network: type[nn.Module], kind: str) -> tuple[Patcher, Any]:
    """Make a MODEL of codes, as the loader does, and a plain one of the same numbers."""
    patchers = []
    for ops in (None, Ops):
        config = type("GgufConfig", (Odd,), {"network": network})({})
        config.set_inference_dtype(torch.float32, None)
        config.custom_operations = ops
        patchers.append(patcher_of(config.get_model({}, "", device="cpu")))
    plain, own = (each.model.diffusion_model for each in patchers)
    fill(patchers[0].model, 0)
    state = {name: stored(each.clone(), kind) for name, each in plain.state_dict().items()}
    plain.load_state_dict({name: decoded(each, torch.float32).as_subclass(Tensor) for name, each in state.items()})
    max(filter(coded, state.values()), key=lambda each: each.numel()).is_largest_weight = True
    own.load_state_dict(state, strict=False)
    for name, each in state.items():  # a Parameter of a class of its own is the tensor itself
        assert not coded(each) or own.get_parameter(name).tensor_type == kind
    return Patcher.clone(patchers[1]), patchers[0]
