"""What stands in the way of gradients in ComfyUI's models: changed for the length of a run, then put back."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from comfy.ldm.modules.attention import attention_pytorch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....trainer_core.memory import keep_activations
from ....trainer_core.networks.network import WithDelta
from .frozen import FrozenLayer, frozen_layers, of_classes
from .live import ATTENTION

KITCHEN = "comfy_kitchen"  # ComfyUI's own operators
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
PARTS = ("_parameters", "_buffers", "_modules")  # attributes of modules that hold no passes
PASSING = (*PARTS, "forward", "training")  # and those that training sets itself
OUT = re.compile(r"\btorch\.\w+\([^()]*\bout=")
WRITING: set[type] = set()  # further classes of modules that do so, as their trial has shown
DISPATCH = "__torch_dispatch__"  # of classes of tensors that have no numbers of their own
CACHES = re.compile(r"(clear|reset)_\w*caches?")  # methods that drop what a model keeps between passes


@contextmanager
def session(patcher: Any, clip: Any = None, *beside: Any) -> Iterator[None]:
    """Make gradients of a loaded MODEL possible and right inside a `with` block; afterwards it is what it was.

    clip: whose text encoders are trained as well. beside: further MODELs.
    """
    differentiable_operators()
    with ExitStack() as stack:
        _open.append(stack)
        stack.callback(_open.remove, stack)
        for each in (patcher, *beside):
            stack.enter_context(_differentiable(each.model, [each.model.diffusion_model]))
        if clip is not None:
            stack.enter_context(_differentiable(clip.cond_stage_model, list(clip.cond_stage_model.children())))
            stack.enter_context(_loaded(clip))
        stack.enter_context(_in_training(True))
        stack.enter_context(_uncompiled())
        stack.enter_context(_every_layer_called())
        stack.enter_context(_saved_weights_kept())
        yield


@contextmanager
def _differentiable(model: nn.Module, called: Collection[nn.Module]) -> Iterator[None]:
    """Make gradients of a model possible and right; called: those of its modules of which passes begin."""
    with ExitStack() as stack:
        stack.enter_context(_normal_tensors(model))
        stack.enter_context(frozen_layers(model))
        for each in called:
            stack.enter_context(_evaluating(each))
            stack.enter_context(_nothing_written_out(each))
            stack.enter_context(_nothing_kept(each))
        # What switches checkpointing on comes later; it ends with the session.
        stack.callback(keep_activations, list(model.modules()))
        yield


@contextmanager
def _loaded(clip: Any) -> Iterator[None]:
    """Let a CLIP of a session be where it is: to load it anew for each caption could move the MODEL away."""
    own = clip.load_model

    def load(*args: Any, **kwargs: Any) -> Any:
        return clip.patcher if comfy.model_management.in_training else own(*args, **kwargs)

    clip.load_model = load
    try:
        yield
    finally:
        del clip.load_model


_open: list[ExitStack] = []  # what undoes each session


def leave_out_of(modules: Collection[nn.Module], model: nn.Module) -> None:
    """Let modules that pass `out` to operators run without it, in the innermost session and all to come.

    Layers of a network have classes of their own; for those the whole model does.
    """
    found = {model if isinstance(module, (FrozenLayer, WithDelta)) else module for module in modules}
    found = {module for module in found if not isinstance(module, _WithoutOut)}
    WRITING.update(map(type, found))
    _open[-1].enter_context(of_classes({module: _without_out(type(module)) for module in found}))


@contextmanager
def paused(*, in_training: bool = False) -> Iterator[None]:
    """Let the MODEL of a session compute as in ComfyUI's own sampling inside a `with` block.

    in_training: by the code for training, where only that calls each layer.
    """
    with _in_training(False):
        comfy.model_management.in_training = in_training
        yield


def options(patcher: Any) -> dict[str, Any]:
    """Build ComfyUI's transformer_options for training: torch's own attention, since others have no gradients."""
    return {**patcher.model_options.get("transformer_options", {}), ATTENTION: _attention}


# --- what is changed, and put back ---------------------------------------------------------------------------


@contextmanager
def _in_training(value: bool) -> Iterator[None]:
    """Tell ComfyUI whether gradients are needed; in training a Cancel waits for the run, which looks between passes."""
    before = comfy.model_management.in_training, comfy.ops.run_every_op
    comfy.model_management.in_training = value
    comfy.ops.run_every_op = _nothing if value else _look_for_cancel
    try:
        yield
    finally:
        comfy.model_management.in_training, comfy.ops.run_every_op = before


_look_for_cancel = comfy.ops.run_every_op


def _nothing() -> None:
    """Look for no Cancel."""


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let functions that a model's code compiles run as they are written: a trial watches their operators."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):  # nothing is, or an older torch
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _every_layer_called() -> Iterator[None]:
    """Let torch's own transformer layers call their linear layers, which their fast path without gradients does not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _saved_weights_kept() -> Iterator[None]:
    """Copy the weights that autograd saves, those of norms, where ComfyUI has cast them into a buffer.

    The next layer's weights go there, also outside of torch, so that no version counter tells. Linear layers and
    convolutions save none.
    """
    own = comfy.ops.cast_bias_weight

    @functools.wraps(own)
    def casting(layer: Any, *args: Any, **kwargs: Any) -> Any:
        weight, bias, *rest = own(layer, *args, **kwargs)
        if torch.is_grad_enabled() and not isinstance(layer, (FrozenLayer, nn.Embedding)):
            weight, bias = _kept(weight, layer.weight), _kept(bias, layer.bias)
        return (weight, bias, *rest)

    comfy.ops.cast_bias_weight = casting
    try:
        yield
    finally:
        comfy.ops.cast_bias_weight = own


def _kept(given: Tensor | None, weight: Tensor | None) -> Tensor | None:
    """Copy a weight that lies elsewhere than the layer's own."""
    if given is None or weight is None or type(given) not in (Tensor, nn.Parameter):
        return given
    return given if given.data_ptr() == weight.data_ptr() else given.clone()


@contextmanager
def _normal_tensors(model: nn.Module) -> Iterator[None]:
    """Replace tensors made in inference mode by normal ones on the same memory, all without gradients."""
    # ComfyUI loads models in inference mode, and autograd refuses to save such tensors.
    replaced: list[tuple[Any, Any, Tensor, Tensor]] = []
    for holder, name, tensor in _tensors(model):
        normal = _normal(tensor)
        if normal is not tensor:
            replaced.append((holder, name, tensor, normal))
            holder[name] = normal
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for holder, name, tensor, normal in replaced:
            if _at(holder, name) is normal and normal.data_ptr() == tensor.data_ptr():  # else ComfyUI has moved it
                vars(tensor).update(vars(normal))
                holder[name] = tensor


def _tensors(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield every tensor of a model: the dictionary or list that holds it, its key there, and the tensor."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers, *_holders(vars(module))):
            items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
            yield from [(holder, key, value) for key, value in items if isinstance(value, Tensor)]


def _holders(holder: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a dictionary or a list, and those inside of it, also attributes of plain objects; no parts of modules."""
    yield holder
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        inside = None if key in PARTS else value if isinstance(value, (dict, list)) else _attributes(value)
        if inside is not None and depth:
            yield from _holders(inside, depth - 1)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object; None for all else."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _at(holder: Any, key: Any) -> Any:
    """What a dictionary or a list holds at a key or an index; None where it holds nothing there."""
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _normal(tensor: Tensor) -> Tensor:
    """Give a normal tensor on the memory of one made in inference mode; others stay, also those that wrap others."""
    kind = type(tensor)
    wraps = getattr(kind, DISPATCH) is not getattr(Tensor, DISPATCH)
    if not tensor.is_inference() or wraps or tensor.is_meta:
        return tensor
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(Tensor)  # whose shape and dtype are those of its numbers
        normal = torch.empty(0, dtype=plain.dtype, device=plain.device)
        normal.set_(plain.untyped_storage(), plain.storage_offset(), plain.size(), plain.stride())
        if kind not in (Tensor, nn.Parameter):  # numbers with attributes, as the codes of GGUF
            normal = normal.as_subclass(kind)
            vars(normal).update(vars(tensor))
            return normal
        return nn.Parameter(normal, requires_grad=False) if isinstance(tensor, nn.Parameter) else normal


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Keep dropouts of the model asleep."""
    awake = [module for module in model.modules() if module.training]
    for module in awake:
        module.training = False
    try:
        yield
    finally:
        for module in awake:
            module.training = True


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """Drop what modules keep of a pass before the next one, and at the end: caches, whatever holds them."""
    clears = [getattr(module, name) for module in model.modules() for name in _clears(type(module))]
    # Layers with weights are ComfyUI's business: it keeps there how they are cast and patched.
    own = [module for module in model.modules() if not isinstance(module, comfy.ops.CastWeightBiasOp)]
    # Shallow copies: what a pass adds or exchanges differs by identity.
    before = [(holder, holder.copy()) for module in own for holder in _holders(vars(module))]

    def drop(*_: Any) -> None:
        for clear in clears:
            clear()
        for holder, was in before:
            _put_back(holder, was)

    handle = model.register_forward_pre_hook(drop)
    try:
        yield
    finally:
        handle.remove()
        drop()


def _put_back(holder: Any, was: Any) -> None:
    """Put back all of a dictionary or a list that has changed, where a change holds a tensor of a pass."""
    if isinstance(holder, list):
        same = len(holder) == len(was) and all(now is before for now, before in zip(holder, was, strict=True))
        if not same and holds_tensors(holder):
            holder[:] = was
        return
    changed = [name for name in holder if name not in PASSING and holder[name] is not was.get(name)]
    if any(holds_tensors(holder[name]) for name in changed):
        for name in changed:
            if name in was:
                holder[name] = was[name]
            else:
                del holder[name]


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Tell whether a value is a tensor, or a collection or a plain object with one."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, tuple, set)):
        inside = list(value)
    else:
        attributes = value if isinstance(value, dict) else _attributes(value)
        inside = [] if attributes is None else list(attributes.values())
    return depth > 0 and any(holds_tensors(each, depth - 1) for each in inside)


@functools.cache
def _clears(kind: type) -> tuple[str, ...]:
    """List a class's methods that drop a cache and need no arguments."""
    found = [name for name in dir(kind) if CACHES.fullmatch(name) and inspect.isfunction(getattr(kind, name))]
    return tuple(name for name in found if len(inspect.signature(getattr(kind, name)).parameters) == 1)


# --- operators and attention ---------------------------------------------------------------------------------


@contextmanager
def _nothing_written_out(model: nn.Module) -> Iterator[None]:
    """Run modules that pass `out` to operators without it; autograd has no formula for those.

    A module that reads `out` and not what is returned predicts something else then, which the trial notices.
    """
    kinds = {module: type(module) for module in model.modules()}
    writing = {module: kind for module, kind in kinds.items() if kind in WRITING or _passes_out(kind)}
    with of_classes({module: _without_out(kind) for module, kind in writing.items()}):
        yield


def _without_out(kind: type) -> type:
    return type(kind.__name__, (_WithoutOut, kind), {})


class _WithoutOut(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _LeaveOut():
            return super().forward(*args, **kwargs)


class _LeaveOut(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(kwargs or {})
        if "out" in given and torch.is_grad_enabled():
            del given["out"]
        return func(*args, **given)


@functools.cache
def _passes_out(kind: type) -> bool:
    """Tell whether the source of a class of modules passes `out` to an operator."""
    if kind.__module__.startswith("torch."):
        return False
    try:
        if not _file_passes_out(inspect.getsourcefile(kind) or ""):
            return False
        return OUT.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):  # made without a file
        return False


@functools.cache
def _file_passes_out(file: str) -> bool:
    """Tell whether a file does anywhere: the source of one class of it takes much longer to find."""
    return OUT.search("".join(linecache.getlines(file))) is not None


def _attention(_: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention by torch, whatever ComfyUI was started with."""
    return attention_pytorch(*args, **kwargs)


@functools.cache
def differentiable_operators() -> None:
    """Give ComfyUI's fused operators a backward pass, that of their own plain functions; once for the process."""
    try:
        from comfy_kitchen.backends.eager import adaln, rope
    except ImportError:  # an older ComfyUI, which has no such operators
        return
    known = torch.ops.comfy_kitchen
    for module in (rope, adaln):
        for name, function in vars(module).items():
            if not name.startswith("_") and not name.endswith("_") and hasattr(known, name) and callable(function):
                setup, backward = _formula(function)
                torch.library.register_autograd(f"{KITCHEN}::{name}", backward, setup_context=setup)


def _formula(function: Callable[..., Any]) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """Build the two parts of an operator's backward pass from a plain function of the same arguments."""

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        del output
        ctx.indices = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.indices))

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        given, wanted = list(ctx.rest), [i for i in ctx.indices if ctx.needs_input_grad[i]]
        for i, value in zip(ctx.indices, ctx.saved_tensors, strict=True):
            given[i] = value.detach().requires_grad_(i in wanted)
        # The plain function runs once more, now recorded, for autograd to differentiate.
        with torch.enable_grad():
            output = function(*given)
        outputs = output if isinstance(output, tuple) else (output,)
        pairs = [(out, g) for out, g in zip(outputs, gradients, strict=True) if g is not None]
        leaves = [given[i] for i in wanted]
        found = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        by_index = dict(zip(wanted, found, strict=True))
        return tuple(by_index.get(i) for i in range(len(given)))

    return setup, backward
