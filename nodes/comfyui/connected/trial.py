"""What a MODEL does with gradients, found out on a small picture before a run: architectures in no list are tried."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....trainer_core.common.disk_errors import reason
from ....trainer_core.common.exact import exact
from ....trainer_core.common.wording import count, names
from ....trainer_core.memory import LEVELS, copied_before_written, free_bytes, keep_activations, recompute
from ....trainer_core.models.base import Unit
from . import gradients
from .denoiser import TOLERANCE, BatchConditions, RawDenoiser
from .filed import WHOLE, Filed
from .frozen import is_product
from .gradients import WRONG
from .layers import named_blocks, shared_out, units
from .observed import Observed, calls, tensors_in

LEVELS_TRIED = (0.25, 0.95)  # of noise, as shares of the MODEL's; some have experts for some levels
FILED = 5  # by how many bounds of rounding a picture drawn with the file may differ from one of training
NUMBERS = 256  # of what a block gives, which are compared
UNAPPLIED = ("layer's weight is none that ComfyUI changes", "layers' weights are none that ComfyUI changes")
CHANGES = (0.1, 0.03, 0.01, 0.003, 0.001)  # of the loss, as shares, by which its slope is measured
APART, ROUNDED = 0.05, 0.2  # slopes that are one but for rounding and bends, in float32 and in half of its bits
EARLIEST = 4  # the share of layers that are tried by themselves
INSTEAD = "Update ComfyUI and the node pack that the MODEL is from, or link another MODEL"
WRONG_SLOPE = f"this MODEL cannot be trained, as the loss does not follow its gradients, first before {{}}. {INSTEAD}"
OWN_CHECKPOINTS = "set gradient checkpointing of the node that loads it to off"
WORDS = {  # why a pass with gradients fails, by what torch says
    r"does not require grad": f"as no gradient leaves its code, which may recompute blocks itself: {OWN_CHECKPOINTS}",
    r"checkpoint": f"as its code recomputes blocks itself: {OWN_CHECKPOINTS}",
    r"inference tensor": "as its code keeps tensors of inference mode to itself, which autograd cannot save",
    r"in-?place operation": "as its code writes into what the backward pass needs",
    r"out=\.\.\. arguments": "as its code writes results into memory of its own, which has no gradient",
    r"not implemented": "as it has operators without a backward pass for its numbers: load it in bfloat16 or float32",
}
# By how much layers without a gradient are changed, and what shows that they act, in float32 and in half of its bits.
NUDGE, SEEN = (0.01, 0.1), (2e-5, 0.06)

Pairs = Sequence[tuple[Tensor, Tensor]]  # parameters and their gradients


class Proof(NamedTuple):
    """What passes forward and backward have shown."""

    idle: list[str]  # layers without a gradient
    gradients: dict[str, Pairs]  # of the first pass, by layer, where there are any


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
    options, (noised, _, conditions) = gradients.options(denoiser.patcher), inputs

    def at(share: float) -> Callable[[], Tensor]:
        level = torch.full_like(inputs[1], int(share * len(denoiser.sigmas)))
        return lambda: denoiser.predict(noised, level, conditions, options)

    runs = [at(share) for share in LEVELS_TRIED]
    remarks = _predictions(denoiser, runs[0], inputs, what)
    observed, random = Observed(denoiser.model.diffusion_model, modules), bool(remarks)
    rounded = denoiser.model.get_dtype_inference() in TOLERANCE
    try:
        idle, plain = prove(runs, layers, observed, ROUNDED if rounded else APART, random=random)
        if observed.writing:
            gradients.leave_out_of(observed.writing, denoiser.model.diffusion_model)
        if not random:
            _check_idle(denoiser, runs, [name for name in observed.order if name in idle], layers, modules, observed)
        found = _left_out(idle, modules, observed)
        left = {name: layers[name] for name in modules if not any(name in each for each in found.values())}
        drawn, unapplied = _compare_with_file(denoiser, runs, left, modules, random=random)
    except ValueError as error:
        raise ValueError(f"{what}: {error}.") from error
    found |= {UNAPPLIED: unapplied}
    out = "so the LoRA leaves them out"
    remarks += [f"{count(each, *verbs)}, {out}: {names(each)}." for verbs, each in found.items() if each]
    left_out = frozenset(name for each in found.values() for name in each)
    if left_out >= set(modules):
        raise ValueError(" ".join([f"{what}: this MODEL cannot be trained, as no layer can be.", *remarks]))
    blocks, run = units(denoiser.model.diffusion_model), runs[0]
    if recomputes(run, layers, plain, blocks, 2 * denoiser.bound):
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


def _check_idle(
    denoiser: RawDenoiser,
    runs: Sequence[Callable[[], Tensor]],
    idle: Sequence[str],
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    observed: Observed,
) -> None:
    """Raise ValueError where layers that get no gradient change predictions all the same."""
    if not idle:
        return
    model, rounded = denoiser.model.diffusion_model, denoiser.model.get_dtype_inference() in TOLERANCE
    filed = Filed(denoiser.patcher, layers, modules)
    with torch.no_grad():
        before = Trace(model, runs)
        with filed.moved(idle, NUDGE[rounded]):
            after = Trace(model, runs)
    if where := before.leaves(after, SEEN[rounded]):
        raise ValueError(_refused(observed.lost) if observed.lost else WRONG_SLOPE.format(where))


def _compare_with_file(
    denoiser: RawDenoiser,
    runs: Sequence[Callable[[], Tensor]],
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    *,
    random: bool,
) -> tuple[set[str], list[str]]:
    """Compare what a network does in training with what ComfyUI's loader makes of its file.

    Returns the layers that are called where samples are drawn, and those that a file does not change as training does.
    Raises ValueError for a MODEL that computes with weights beside its layers.
    """
    filed, drawn, unapplied = Filed(denoiser.patcher, layers, modules), set[str](), list[str]()
    whole = all(p.dtype in WHOLE for p in denoiser.model.diffusion_model.parameters() if p.is_floating_point())
    for some in _shared_out(modules, layers, denoiser.patcher.load_device):
        with torch.no_grad(), filed.moved(some):
            wrong = filed.unapplied(some)
        unapplied += wrong
        rest = [name for name in some if name not in wrong]
        with torch.no_grad(), filed.moved(rest):
            trained = Trace(denoiser.model.diffusion_model, runs)
            # Samples of weights in few bits round what they multiply, which training does not.
            with filed.on(rest), gradients.paused(in_training=not whole), calls(modules, drawn.add):
                drawn_with = Trace(denoiser.model.diffusion_model, runs)
        if not random and (where := trained.leaves(drawn_with, FILED * denoiser.bound)):
            raise ValueError(
                "this MODEL cannot be trained, as it computes with weights of its layers in ways of its own, where a "
                f"LoRA file does something else than training, first in {where}. {INSTEAD}"
            )
    if not whole:
        drawn.clear()
        with torch.no_grad(), gradients.paused(), calls(modules, drawn.add):
            for run in runs:
                run()
    return drawn, unapplied


def _shared_out(modules: Mapping[str, Any], layers: Mapping[str, nn.Module], device: torch.device) -> list[list[str]]:
    """Share layers out to lists whose weights fit into a quarter of the memory that is free."""
    room, lists, size = min(free_bytes(device), free_bytes(torch.device("cpu"))) // 4, list[list[str]](), 0
    for name in layers:
        weight = getattr(modules[name], "weight", None)
        size += weight.numel() * 4 if isinstance(weight, Tensor) else 0
        if not lists or size > room:
            lists, size = [*lists, []], 0
        lists[-1].append(name)
    return lists


def prove(
    runs: Sequence[Callable[[], Tensor]],
    layers: Mapping[str, nn.Module],
    observed: Observed,
    off: float = APART,
    *,
    random: bool = False,
) -> Proof:
    """Try passes forward and backward, and find the layers that get no gradient from any.

    runs: each predicts from the smallest batch; two at least, as models that keep something between passes fail in the
    second. layers: those that are trained, by name. observed: watches the passes. off: by how much slopes may differ.
    random: whether the MODEL draws random numbers, so that passes cannot be compared. Raises ValueError for a model
    that cannot be trained. Gradients are cleared.
    """
    passes, losses = list[dict[str, Pairs]](), list[float]()
    for run in runs:
        _clear(layers)
        prediction = None
        with copied_before_written():
            try:
                with observed.watching():
                    prediction = run()
                if prediction.isfinite().all():
                    prediction.float().square().mean().backward()
                    losses.append(float(prediction.detach().double().square().mean()))
            except torch.OutOfMemoryError:
                raise
            except WRONG as error:
                raise ValueError(_why(error, observed, prediction)) from error
        if not prediction.isfinite().all():
            raise ValueError("this MODEL predicts numbers that are not finite; load it in bfloat16 or float32")
        found = {
            name: [(p, p.grad) for p in layer.parameters() if p.grad is not None] for name, layer in layers.items()
        }
        if not all(gradient.isfinite().all() for pairs in found.values() for _, gradient in pairs):
            raise ValueError("gradients of this MODEL are not finite; load it in bfloat16 or float32")
        passes.append(
            {name: kept for name, pairs in found.items() if (kept := [each for each in pairs if each[1].any()])}
        )
        _clear(layers)
    if not any(passes):
        raise ValueError(
            _refused(observed.lost) if observed.lost else "this MODEL cannot be trained: no layer gets a gradient"
        )
    if not random:
        _check_slopes(runs, losses, passes, list(observed.order), observed.lost, off)
    return Proof([name for name in layers if not any(name in found for found in passes)], passes[0])


def _check_slopes(
    runs: Sequence[Callable[[], Tensor]],
    losses: Sequence[float],
    passes: Sequence[Mapping[str, Pairs]],
    order: Sequence[str],
    lost: str,
    off: float,
) -> None:
    """Raise ValueError where a loss does not change along its gradients as they say.

    All layers are tried in the first pass, and the earliest in the last: their gradients come through all others.
    """
    for number, (run, loss, found) in enumerate(zip(runs, losses, passes, strict=True)):
        moving = [name for name in order if name in found]
        some = moving if number == 0 else moving[: -(-len(moving) // EARLIEST)]
        if name := _last_wrong(run, loss, found, some, off):
            raise ValueError(_refused(lost) if lost else WRONG_SLOPE.format(name))


def _last_wrong(
    run: Callable[[], Tensor], loss: float, found: Mapping[str, Pairs], some: Sequence[str], off: float
) -> str:
    """Name the last of some layers along whose gradient the loss does not change as it says; "" for none.

    Numbers of few bits swallow small changes of many layers at once, so that each half of them is asked again.
    """
    if not some or slopes_agree(run, loss, [found[name] for name in some], off):
        return ""
    if len(some) == 1:
        return some[0]
    half = len(some) // 2
    return _last_wrong(run, loss, found, some[half:], off) or _last_wrong(run, loss, found, some[:half], off)


def _why(error: Exception, observed: Observed, prediction: Tensor | None) -> str:
    """Name what keeps a pass from having a gradient."""
    if custom := observed.custom_in(error):
        return _refused(custom)
    if prediction is not None and not prediction.requires_grad and observed.lost:
        return _refused(observed.lost)
    said = reason(error)
    words = (sentence for pattern, sentence in WORDS.items() if re.search(pattern, said, re.I))
    why = next(words, f"as its code fails where gradients are on ({said.rstrip('.')})")
    return f"this MODEL cannot be trained, {why}. {INSTEAD}"


def _refused(operators: str) -> str:
    return f"this MODEL cannot be trained, as operators hand no gradient on: {operators}. {INSTEAD}"


@torch.no_grad()
def slopes_agree(run: Callable[[], Tensor], loss: float, layers: Sequence[Pairs], off: float = APART) -> bool:
    """Tell whether the loss changes along gradients as they say, by central differences; each layer counts alike.

    loss: of the pass as it is. layers: the parameters of each, and their gradients. Where rounding hides the change, it
    is no evidence, and the answer is yes.
    """
    norms = [sum(exact(gradient).square().sum() for _, gradient in each) ** 0.5 for each in layers]
    pairs = [(p, g / float(norm)) for each, norm in zip(layers, norms, strict=True) for p, g in each]
    expected = float(sum(norms))
    before, slopes = [parameter.clone() for parameter, _ in pairs], list[float]()
    try:
        for change in CHANGES:
            losses = []
            for by in (change * loss / expected, -change * loss / expected):
                for (parameter, step), own in zip(pairs, before, strict=True):
                    parameter.copy_(own + by * step)
                losses.append(_loss(run))
            slopes.append((losses[0] - losses[1]) / (2 * change * loss))
            if abs(slopes[0] - 1) < off:
                return True
    finally:
        for (parameter, _), own in zip(pairs, before, strict=True):
            parameter.copy_(own)
    # Of two steps that agree: larger ones are bent, smaller ones rounded away.
    sure = [(abs(one - other), one) for one, other in pairwise(slopes) if abs(one - other) < off * abs(one)]
    return not sure or abs(min(sure)[1] - 1) < off


def _loss(run: Callable[[], Tensor]) -> float:
    return float(run().double().square().mean())


class Trace:
    """What the blocks of a MODEL give in some passes, in a few numbers each, and what these passes predict."""

    def __init__(self, model: nn.Module, runs: Sequence[Callable[[], Tensor]]) -> None:
        self._seen: list[tuple[str, Tensor]] = []
        with ExitStack() as stack:
            for path, block in named_blocks(model).items():
                handle = block.register_forward_hook(functools.partial(self._note, path), with_kwargs=True)
                stack.callback(handle.remove)
            for run in runs:
                self._seen.append(("its last layers", run()))

    def _note(self, path: str, _: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        # Blocks may write into what they are given instead of giving something back.
        for tensor in tensors_in((output, *args, *kwargs.values())):
            if tensor.is_floating_point():
                flat = tensor.detach().flatten()
                self._seen.append((path, flat[:: max(1, len(flat) // NUMBERS)].float().clone()))

    def leaves(self, other: Trace, bound: float) -> str:
        """Name where two traces part by more than a share, "" where their predictions do not."""
        pairs = list(zip(self._seen, other._seen, strict=False))
        parts = [path for (path, one), (_, two) in pairs if one.shape != two.shape or _apart(one, two) > bound]
        ends = [_apart(one, two) > bound for (path, one), (_, two) in pairs if path == "its last layers"]
        return parts[0] if any(ends) or len(self._seen) != len(other._seen) else ""


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


def recomputes(
    run: Callable[[], Tensor],
    layers: Mapping[str, nn.Module],
    plain: Mapping[str, Pairs],
    blocks: Sequence[Unit],
    bound: float,
) -> bool:
    """Tell whether gradients stay the same where blocks are recomputed; some blocks do something else the second time.

    plain: gradients of a pass without that, by layer. bound: of their relative difference. Gradients are cleared.
    """
    recompute(blocks, LEVELS[-1], copies=True)
    try:
        with copied_before_written():
            run().float().square().mean().backward()
        given = {id(p): gradient for pairs in plain.values() for p, gradient in pairs}
        found = {id(p): p.grad for layer in layers.values() for p in layer.parameters() if p.grad is not None}
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
    finally:
        keep_activations(block for block, _ in blocks)
        _clear(layers)
    size = sum(exact(gradient).square().sum() for gradient in given.values())
    difference = sum(_squared(given.get(key), found.get(key)) for key in given.keys() | found.keys())
    return bool(difference <= bound**2 * size)


def _squared(one: Tensor | None, other: Tensor | None) -> Any:
    """The sum of squares of a difference; an absent gradient is one of zeros, as recomputed blocks give."""
    if one is None or other is None:
        return sum(exact(each).square().sum() for each in (one, other) if each is not None)
    return exact(one - other).square().sum()


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


def _clear(layers: Mapping[str, nn.Module]) -> None:
    for layer in layers.values():
        layer.zero_grad(set_to_none=True)


def _is_product(layer: Any) -> bool:
    """Tell whether a LoRA fits a layer; one that takes more than its input does not."""
    try:
        return is_product(layer)
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
