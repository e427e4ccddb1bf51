"""What ComfyUI makes of a LoRA's file on a MODEL, beside what its network does in training."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.lora
import torch
from torch import Tensor, nn

from ....trainer_core.networks.layers.dora import frozen_weight
from ....trainer_core.networks.layers.shape import is_matrix
from ....trainer_core.networks.network import WithDelta
from . import names
from .gradients import WRONG

SHARE = 0.3  # of a weight's norm, by which the trial changes it
UNLIKE = 0.5  # of the norm of a change: what is rounded stays below it, in 8 bits too
PARTS = ("weight", "bias")
WHOLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes that hold a changed weight well


class Filed:
    """A network's layers with other numbers for a moment, and the MODEL that gets the same numbers from a file."""

    def __init__(
        self, patcher: Any, layers: Mapping[str, Any], modules: Mapping[str, nn.Module], clip: Any = None
    ) -> None:
        """Take layers of a network, by name, that are attached to modules of a MODEL, or of a CLIP beside it."""
        self._patcher, self._clip, self._layers, self._modules = patcher, clip, layers, modules
        patchers = [patcher] if clip is None else [patcher, clip.patcher]
        self._paths = {
            module: (i, path) for i, each in enumerate(patchers) for path, module in each.model.named_modules()
        }

    @contextmanager
    def moved(self, some: Sequence[str], share: float = SHARE) -> Iterator[None]:
        """Let some layers change their weights by a share of their norms, inside a `with` block."""
        draws = torch.Generator().manual_seed(0)
        before = [(p, p.detach().clone()) for name in some for p in self._layers[name].parameters()]
        try:
            with torch.no_grad():
                for name in some:
                    _move(self._layers[name], self._modules[name], draws, share)
            yield
        finally:
            with torch.no_grad():
                for parameter, own in before:
                    parameter.copy_(own)

    @torch.no_grad()
    def unapplied(self, some: Sequence[str]) -> list[str]:
        """List the layers whose weight ComfyUI does not change by a file as training does."""
        patched = self._patched(some)
        return [name for name in some if not self._applies(patched[self._place(name)[0]], name)]

    @contextmanager
    def on(self, some: Sequence[str], *, otherwise: bool = False) -> Iterator[None]:
        """Let the MODEL compute with the weights that ComfyUI makes of a file, without the network.

        otherwise: each weight is changed by up to half of its last bit first, so that about half round the other way.
        """
        patchers = self._patched(some)
        with ExitStack() as stack:
            for name in some:
                patched, module = patchers[self._place(name)[0]], self._modules[name]
                stack.enter_context(_without_network(module))
                for part in PARTS:
                    key = self._key(name, part)
                    if key in patched.patches and _puts_itself(patched):
                        stack.enter_context(_put(patched, module, part, key, otherwise))
                    elif key in patched.patches:
                        stack.enter_context(_with_weight(module, part, _file_weight(patched, key, otherwise)))
            yield

    def _patched(self, some: Sequence[str]) -> list[Any]:
        """Clone the MODEL and the CLIP with nothing on them but some layers, as ComfyUI's loader reads their file.

        A patcher that puts patches on its weights itself puts all of them at once, so that one keeps those that it has.
        """
        bare, clip = self._patcher.clone(), self._clip and self._clip.clone()
        for patcher in [bare, clip.patcher] if clip else [bare]:
            if not _puts_itself(patcher):
                patcher.patches = {}  # those that it has are in its weights, or added to them at their use
        tensors = {
            f"{name}.{suffix}": tensor.detach()
            for name in some
            for suffix, tensor in (self._layers[name].tensors() | self._layers[name].magnitude_tensors()).items()
        }
        model, changed = names.put_beneath(bare, clip, tensors, 1.0)
        return [model, changed and changed.patcher]

    def _place(self, name: str) -> tuple[int, str]:
        """Find whose module a layer changes, 0 for the MODEL's and 1 for the CLIP's, and its path there."""
        return self._paths[self._modules[name]]

    def _key(self, name: str, part: str) -> str:
        return f"{self._place(name)[1]}.{part}"

    def _applies(self, patched: Any, name: str) -> bool:
        module: Any = self._modules[name]
        key, device = self._key(name, "weight"), self._patcher.load_device
        parts = any(True for child in module.children() for _ in child.parameters())
        if "weight" not in module._parameters or parts or key not in patched.patches:
            return False  # ComfyUI patches parameters alone, of modules without parts
        if not is_matrix(module):
            return True
        try:
            weight = frozen_weight(module, torch.float32, device)
            wanted = self._layers[name].changed_weight(weight) - weight
            if _puts_itself(patched):
                with _put(patched, module, "weight", key):
                    change = frozen_weight(module, torch.float32, device) - weight
            else:
                found = _plain(patched.patch_weight_to_device(key, device_to=device, return_weight=True))
                change = (found.to(wanted) - _own_weight(module, "weight", device)).view_as(wanted)
            return bool((change - wanted).norm() <= UNLIKE * wanted.norm())
        except torch.OutOfMemoryError:
            raise
        except WRONG:
            return False


class _Nothing:
    """A layer of a network that changes nothing."""

    reversed = False
    uses_changed_input = True

    def __call__(self, x: Tensor, base_output: Tensor) -> Tensor:
        del x
        return base_output

    def enter(self, x: Tensor) -> Tensor:
        return x

    leave = enter

    def thin(self, x: Tensor) -> None:
        del x


@contextmanager
def _without_network(module: nn.Module) -> Iterator[None]:
    if not isinstance(module, WithDelta):
        yield
        return
    own = module.__dict__["delta"]
    module.__dict__["delta"] = _Nothing()
    try:
        yield
    finally:
        module.__dict__["delta"] = own


@contextmanager
def _with_weight(module: Any, part: str, weight: Tensor) -> Iterator[None]:
    """Exchange a weight of a module; what ComfyUI streams to the device instead of it stays away meanwhile."""
    own = module._parameters[part]
    streamed = module.__dict__.pop("_v", None)
    module._parameters[part] = nn.Parameter(weight.to(own.device), requires_grad=False)
    try:
        yield
    finally:
        module._parameters[part] = own
        if streamed is not None:
            module.__dict__["_v"] = streamed


def _puts_itself(patcher: Any) -> bool:
    """Tell whether a patcher hands out no changed weight: it puts patches on weights itself, as that of GGUF does."""
    return "return_weight" not in inspect.signature(patcher.patch_weight_to_device).parameters


@contextmanager
def _put(patched: Any, module: Any, part: str, key: str, otherwise: bool = False) -> Iterator[None]:
    """Let such a patcher put its patches on a weight as it does when it loads; it is a clone's, and done once.

    What it writes, it writes on a copy that shares the weight's numbers. otherwise: see `Filed.on`.
    """
    own, device = module._parameters[part], patched.load_device
    if otherwise and part == "weight":
        weight = frozen_weight(module, torch.float32, device)
        dtype = own.dtype if own.dtype in WHOLE else _computes(patched)
        patched.add_patches({key: (weight * _half_bits(weight, dtype),)})
    backup, bare = patched.backup, patched.backup[key].weight if key in patched.backup else own
    # Clones share what is put away; and weights are exchanged, not written over.
    patched.backup, patched.weight_inplace_update = {}, False
    module._parameters[part] = _same(bare)
    try:
        patched.patch_weight_to_device(key, device_to=device)
        yield
    finally:
        module._parameters[part], patched.backup = own, backup


def _same(tensor: Tensor) -> Tensor:
    """Make a tensor of the same class, attributes and numbers; what is set on it is not set on the first one."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Any = tensor.as_subclass(type(tensor))
    vars(found).update(vars(tensor))
    return found


def _computes(patched: Any) -> torch.dtype:
    """The dtype that a model computes in; text encoders compute in float32."""
    return getattr(patched.model, "get_dtype_inference", lambda: torch.float32)()


def _half_bits(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw by which shares of it each number changes: up to half of its last bit in a dtype."""
    draws = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.device)
    return torch.finfo(dtype).eps * (draws - 0.5)


def _file_weight(patched: Any, key: str, otherwise: bool) -> Tensor:
    """Compute a weight as ComfyUI patches it, without the rounding of few bits; otherwise: see `Filed.on`."""
    path, _, part = key.rpartition(".")
    module = patched.model.get_submodule(path)
    own = module._parameters[part]
    weight = _own_weight(module, part, patched.load_device)
    changed = comfy.lora.calculate_weight(patched.patches[key], weight, key)
    kept = own.dtype in WHOLE and type(own) is nn.Parameter
    dtype = own.dtype if kept else _computes(patched)
    if otherwise:
        changed = changed * (1 + _half_bits(changed, dtype))
    return changed.to(dtype)


def _own_weight(module: Any, part: str, device: torch.device) -> Tensor:
    """Copy a weight as ComfyUI's patches see it, float32."""
    convert = getattr(module, f"convert_{part}", None)
    weight = module._parameters[part].detach().to(device, copy=True)
    return _plain(convert(weight, inplace=True) if convert else weight).float()


def _plain(weight: Any) -> Tensor:
    return weight.dequantize() if hasattr(weight, "dequantize") and hasattr(weight, "_qdata") else weight.detach()


def _move(layer: Any, module: nn.Module, draws: torch.Generator, share: float) -> None:
    """Give a layer numbers by which it changes its weight by a share of its norm."""
    free = [p for p in layer.parameters() if not p.any()] or list(layer.parameters())
    for parameter in free:
        drawn = torch.randn(parameter.shape, generator=draws).to(parameter)
        parameter.add_(drawn * (parameter.square().mean().sqrt() if parameter.any() else 1.0) * share)
    if not is_matrix(module):
        return
    weight = frozen_weight(module, torch.float32, free[0].device)
    if tuple(weight.shape) != tuple(layer.shape):  # packed in a way of its own, which ComfyUI does not change
        return
    try:
        change = (layer.changed_weight(weight) - weight).norm() / weight.norm()
    except torch.OutOfMemoryError:
        raise
    except WRONG:  # a tensor of a class of its own, which names another shape than its numbers have
        return
    if change > 0 and change.isfinite():
        for parameter in free:
            parameter.mul_((share / change) ** (1 / len(free)))
