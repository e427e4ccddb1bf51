"""What a MODEL does with gradients, found out on a small picture before a run: architectures in no list are tried."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....trainer_core.common.disk_errors import reason
from ....trainer_core.common.exact import exact
from ....trainer_core.common.wording import count, names
from ....trainer_core.memory import LEVELS, copied_before_written, keep_activations, recompute
from ....trainer_core.models.base import Unit
from . import gradients
from .denoiser import BatchConditions, RawDenoiser
from .frozen import is_product
from .gradients import WRONG
from .layers import shared_out, units
from .observed import Observed, calls

CHANGES = (0.1, 0.03, 0.01, 0.003, 0.001)  # of the loss, as shares, by which its slope is measured
APART = 0.05  # slopes that are one but for rounding and bends


class Found(NamedTuple):
    """What a trial has found."""

    left_out: frozenset[str]  # names of layers that cannot be trained
    units: list[Unit]  # blocks that can be recomputed
    drawn_as_trained: bool  # whether only code for training calls all layers, so that samples need it
    remarks: list[str]  # for the person, a sentence each


def try_out(
    denoiser: RawDenoiser,
    inputs: tuple[Tensor, Tensor, BatchConditions],
    what: str,
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
) -> Found:
    """Try a MODEL in its session, with a network on it; raises ValueError for one that cannot be trained.

    inputs: of a pass on one small picture. what: the MODEL and the picture, in messages. layers: the network's, by
    name. modules: those of the MODEL that they change.
    """
    options = gradients.options(denoiser.patcher)

    def run() -> Tensor:
        return denoiser.predict(*inputs, options)

    remarks = _predictions(denoiser, run, inputs, what)
    observed = Observed(denoiser.model.diffusion_model, modules)
    try:
        idle = prove(run, layers, observed)
    except ValueError as error:
        raise ValueError(f"{what}: {error}.") from error
    found = _left_out(idle, modules, observed)
    out = "so the LoRA leaves them out"
    remarks += [f"{count(each, *verbs)}, {out}: {names(each)}." for verbs, each in found.items() if each]
    left_out = frozenset(name for each in found.values() for name in each)
    drawn: set[str] = set()
    with comfyui_runs(what), gradients.paused(), calls(modules, drawn):
        run()
    blocks = units(denoiser.model.diffusion_model)
    if recomputes(run, layers, blocks, 2 * denoiser.bound):
        blocks = shared_out(blocks, bytes_kept(run, blocks))
    else:
        blocks = []
        remarks.append("Recomputed blocks of this MODEL give other gradients, so gradient checkpointing stays off.")
    return Found(left_out, blocks, not drawn >= observed.called - left_out, remarks)


def _left_out(
    idle: Sequence[str], modules: Mapping[str, nn.Module], observed: Observed
) -> dict[tuple[str, str], list[str]]:
    """Sort the layers that cannot be trained by their reason: a sentence for one layer, and one for several."""
    uncalled = [name for name in modules if name not in observed.called and name in idle]
    behind = f" ({observed.lost} hands none on)" if observed.lost else ""
    no_gradient = f"no gradient from pictures with captions{behind}"
    return {
        ("layer is never called by the MODEL", "layers are never called by the MODEL"): uncalled,
        (f"layer gets {no_gradient}", f"layers get {no_gradient}"): [name for name in idle if name not in uncalled],
        ("layer is computed by other code as well", "layers are computed by other code as well"): [
            name for name in modules if name in observed.past and name not in idle
        ],
        ("layer does more than multiply by a weight", "layers do more than multiply by a weight"): [
            name for name, module in modules.items() if name not in observed.past and not _is_product(module)
        ],
    }


@contextmanager
def comfyui_runs(what: str) -> Iterator[None]:
    """Explain an error of ComfyUI's own code, without gradients. what: it runs, and on what."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError:
        raise
    except WRONG as error:
        raise ValueError(
            f"ComfyUI cannot run {what} ({reason(error)}). Link the CLIP that belongs to the MODEL to Use Connected "
            "Model, or set another resolution of Train LoRA."
        ) from error


def _predictions(
    denoiser: RawDenoiser, run: Callable[[], Tensor], inputs: tuple[Tensor, Tensor, BatchConditions], what: str
) -> list[str]:
    """Check the predictions themselves; return remarks on them."""
    with comfyui_runs(what):
        first, second = run(), run()
    if first.shape != inputs[0].shape:
        shapes = " and ".join(str(tuple(each.shape[1:])) for each in (inputs[0], first))
        raise ValueError(f"{what}: this MODEL cannot be trained, as latents and its predictions differ: {shapes}.")
    if (first - second).abs().max() > denoiser.bound * first.abs().max():
        return ["The MODEL draws random numbers of its own, so a resumed run may differ."]
    with comfyui_runs(what):
        follows = denoiser.follows_sampling(*inputs, gradients.options(denoiser.patcher))
    if not follows:
        raise ValueError(f"{what}: this MODEL cannot be trained, as its code changes what its network predicts.")
    return []


def prove(run: Callable[[], Tensor], layers: Mapping[str, nn.Module], observed: Observed) -> list[str]:
    """Try two passes forward and backward, and list the layers that get no gradient from them.

    run: predicts from the smallest batch. layers: those that are trained, by name. observed: watches the first pass.
    Raises ValueError for a model that cannot be trained. Gradients are cleared.
    """
    watches = [observed.watching, nullcontext]  # models that keep something between passes fail in the second
    for watch in watches:
        prediction = None
        with copied_before_written():
            try:
                with watch():
                    prediction = run()
                if prediction.isfinite().all():
                    prediction.float().square().mean().backward()
            except torch.OutOfMemoryError:
                raise
            except WRONG as error:
                raise ValueError(_why(error, observed, prediction)) from error
        if not prediction.isfinite().all():
            raise ValueError("this MODEL predicts numbers that are not finite; load it in bfloat16 or float32")
        found = [p.grad for layer in layers.values() for p in layer.parameters() if p.grad is not None]
        if not all(gradient.isfinite().all() for gradient in found):
            raise ValueError("gradients of this MODEL are not finite; load it in bfloat16 or float32")
    idle = [name for name, layer in layers.items() if not any(_moves(p) for p in layer.parameters())]
    moving = [p for name, layer in layers.items() if name not in idle for p in layer.parameters() if _moves(p)]
    found = [p.grad / len(watches) for p in moving if p.grad is not None]
    for layer in layers.values():
        layer.zero_grad(set_to_none=True)
    if observed.lost and not (moving and slopes_agree(run, moving, found)):
        raise ValueError(_refused(observed.lost))
    return idle


def _why(error: Exception, observed: Observed, prediction: Tensor | None) -> str:
    """Name what keeps a pass from having a gradient."""
    if custom := observed.custom_in(error):
        return _refused(custom)
    if prediction is not None and not prediction.requires_grad and observed.lost:
        return _refused(observed.lost)
    return f"this MODEL cannot be trained: {reason(error)}"


def _refused(operators: str) -> str:
    return (
        f"this MODEL cannot be trained, as operators hand no gradient on: {operators}. Update ComfyUI and the node "
        "pack that the MODEL is from, or link another MODEL"
    )


@torch.no_grad()
def slopes_agree(run: Callable[[], Tensor], parameters: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Tell whether the loss changes along the gradients that were found as they say, by central differences.

    Where rounding hides the change, it is no evidence, and the answer is yes.
    """
    draws = torch.Generator().manual_seed(0)
    steps = [gradient * float(torch.rand((), generator=draws) + 0.5) for gradient in found]
    expected = float(sum(exact(step * gradient).sum() for step, gradient in zip(steps, found, strict=True)))
    loss, before, slopes = _loss(run), [parameter.clone() for parameter in parameters], []
    for change in CHANGES:
        losses = []
        for by in (change * loss / expected, -change * loss / expected):
            for parameter, own, step in zip(parameters, before, steps, strict=True):
                parameter.copy_(own + by * step)
            losses.append(_loss(run))
        slopes.append((losses[0] - losses[1]) / (2 * change * loss))
    for parameter, own in zip(parameters, before, strict=True):
        parameter.copy_(own)
    # Of two steps that agree: larger ones are bent, smaller ones rounded away.
    sure = [(abs(one - other), one) for one, other in pairwise(slopes) if abs(one - other) < APART * abs(one)]
    return not sure or abs(min(sure)[1] - 1) < APART


def _loss(run: Callable[[], Tensor]) -> float:
    return float(run().double().square().mean())


def recomputes(
    run: Callable[[], Tensor], layers: Mapping[str, nn.Module], blocks: Sequence[Unit], bound: float
) -> bool:
    """Tell whether gradients stay the same where blocks are recomputed; some blocks do something else the second time.

    bound: of their relative difference. Gradients are cleared.
    """

    def found() -> list[Tensor]:
        with copied_before_written():
            run().float().square().mean().backward()
        taken = [p.grad for layer in layers.values() for p in layer.parameters() if p.grad is not None]
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
        return taken

    plain = found()
    recompute(blocks, LEVELS[-1], copies=True)
    try:
        again = found()
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
    finally:
        keep_activations(block for block, _ in blocks)
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
    if len(plain) != len(again):
        return False
    difference = sum(exact(a - b).square().sum() for a, b in zip(plain, again, strict=True))
    return bool(difference <= bound**2 * sum(exact(a).square().sum() for a in plain))


def bytes_kept(run: Callable[[], Tensor], blocks: Sequence[Unit]) -> list[int]:
    """Count the bytes that each block keeps for the backward pass, in one pass forward."""
    kept: list[dict[int, int]] = [{} for _ in blocks]
    inside: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if inside:  # a block inside a block belongs to the outer one
            kept[inside[0]][tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    def enter(number: int, *_: Any) -> None:
        inside.append(number)

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for number, (block, _) in enumerate(blocks):
            before = block.register_forward_pre_hook(functools.partial(enter, number))
            for handle in (before, block.register_forward_hook(leave)):
                stack.callback(handle.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        run()
    return [sum(each.values()) for each in kept]


def _moves(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _is_product(layer: Any) -> bool:
    """Tell whether a LoRA fits a layer; one that takes more than its input does not."""
    try:
        return is_product(layer)
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
