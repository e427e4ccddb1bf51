"""What a MODEL does with gradients, found out on a small picture before a run: architectures in no list are tried."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import comfy.model_management
import numpy as np
import torch
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from ....trainer_core.common.devices import kept_random_state
from ....trainer_core.common.wording import count, names
from ....trainer_core.memory import free_bytes
from ....trainer_core.models.base import Unit
from . import gradients
from .denoiser import TOLERANCE, BatchConditions, RawDenoiser
from .filed import WHOLE, Filed
from .frozen import is_product
from .gradients import WRONG
from .layers import feed_forward, named_blocks, shared_out, units
from .observed import Observed, calls, tensors_in
from .proof import APART, INSTEAD, ROUNDED, WRONG_SLOPE, prove, recomputes, refused
from .stopped import where_stopped

LEVELS_TRIED = (0.25, 0.95)  # of noise, as shares of the MODEL's; some have experts for some levels
FURTHER = (0.02, 0.4, 0.5, 0.6, 0.75)  # and where some layers are called at neither
NEAR = 0.02  # from the first of them, as steps of a sampler may be
FILED = 5  # by how many bounds of rounding a picture drawn with the file may differ from one of training
OTHERWISE = 2  # or by how often what two files differ by whose weights are only rounded otherwise
NUMBERS = 256  # of what a block gives, which are compared
LAST = "its last layers"
BLURRED = (
    "Predictions of this MODEL in {dtype} differ by {share:.0%} where its weights are only rounded otherwise. So do "
    "samples of the run and pictures with its file; load the MODEL in float32 to see the same."
)
UNAPPLIED = ("layer's weight is none that ComfyUI changes", "layers' weights are none that ComfyUI changes")
# By how much layers without a gradient are changed, and what shows that they act, in float32 and in half of its bits.
NUDGE, SEEN = (0.01, 0.1), (2e-5, 0.06)


class Found(NamedTuple):
    """What a trial has found."""

    left_out: frozenset[str]  # names of layers that cannot be trained
    units: list[Unit]  # blocks that can be recomputed, and parts of them
    drawn_as_trained: bool  # whether only code for training calls all layers, so that samples need it
    remarks: list[str]  # for the person, a sentence each


def joint(one: Found, other: Found) -> Found:
    """Join what the trials of two experts have found; their blocks are recomputed all or none."""
    return Found(
        one.left_out | other.left_out,
        one.units + other.units if one.units and other.units else [],
        one.drawn_as_trained or other.drawn_as_trained,
        list(dict.fromkeys(one.remarks + other.remarks)),
    )


class TrainedClip(NamedTuple):
    """A CLIP whose text encoders are trained, and the conditions that it makes of a caption anew for each pass."""

    clip: Any
    conditions: Callable[[], BatchConditions]


def try_out(
    denoiser: RawDenoiser,
    inputs: tuple[Tensor, Tensor, BatchConditions],
    what: str,
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    text: TrainedClip | None = None,
) -> Found:
    """Try a MODEL in its session, with a network on it; raises ValueError for one that cannot be trained.

    inputs: of a pass on one small picture. what: the MODEL and the picture, in messages. layers: the network's, by
    name. modules: those of the MODEL that they change, and of the CLIP. text: where text encoders are trained.
    """
    options, (noised, _, conditions) = gradients.options(denoiser.patcher), inputs

    def at(share: float) -> Callable[[], Tensor]:
        level = torch.full_like(inputs[1], int(share * len(denoiser.sigmas)))
        return lambda: denoiser.predict(noised, level, text.conditions() if text else conditions, options)

    runs, near = [at(share) for share in LEVELS_TRIED], at(LEVELS_TRIED[0] + NEAR)
    remarks = _predictions(denoiser, runs[0], inputs, what)
    if remarks:  # it is compared as it draws the same numbers
        near, *runs = (_seeded(run) for run in (near, *runs))
    if _reuses(runs, near, denoiser.bound):
        raise ValueError(
            f"{what}: this MODEL cannot be trained, as it reuses what it computed at another level of noise; link it "
            "without the node that lets it skip blocks."
        )
    observed = Observed(denoiser.model.diffusion_model, modules, text and text.clip.cond_stage_model)
    clip = text and text.clip
    rounded = denoiser.model.get_dtype_inference() in TOLERANCE
    try:
        off = ROUNDED if rounded else APART
        idle, plain = prove(runs, layers, observed, off)
        further = _calling([name for name in idle if name not in observed.called], modules, at)
        if further:
            seeded = [_seeded(run) for run in further] if remarks else further
            idle = [name for name in prove(seeded, layers, observed, off).idle if name in idle]
            runs += seeded
        if observed.writing:
            gradients.leave_out_of(observed.writing, denoiser.model.diffusion_model)
        still = [name for name in observed.order if name in idle]
        _check_idle(denoiser, runs, still, Filed(denoiser.patcher, layers, modules, clip), observed)
        found = _left_out(idle, modules, observed)
        left = {name: layers[name] for name in modules if not any(name in each for each in found.values())}
        filed = Filed(denoiser.patcher, left, modules, clip)
        drawn, unapplied, blurred = _compare_with_file(denoiser, runs, left, modules, filed)
    except ValueError as error:
        raise ValueError(f"{what}: {error}.") from error
    remarks += [blurred] if blurred else []
    found |= {UNAPPLIED: unapplied}
    out = "so the LoRA leaves them out"
    remarks += [f"{count(each, *verbs)}, {out}: {names(each)}." for verbs, each in found.items() if each]
    left_out = frozenset(name for each in found.values() for name in each)
    if left_out >= set(modules):
        raise ValueError(" ".join([f"{what}: this MODEL cannot be trained, as no layer can be.", *remarks]))
    blocks, run = units(denoiser.model.diffusion_model), runs[0]
    blocks += _trained(units(clip.cond_stage_model), modules) if clip else []
    if recomputes(run, layers, plain, blocks, 2 * denoiser.bound):
        blocks = shared_out(blocks, bytes_kept(run, blocks))
        parts = feed_forward(blocks)
        blocks += parts if parts and recomputes(run, layers, plain, parts, 2 * denoiser.bound) else []
    else:
        blocks = []
        remarks.append("Recomputed blocks of this MODEL give other gradients, so gradient checkpointing stays off.")
    return Found(left_out, blocks, not drawn >= observed.called - left_out, remarks)


def _trained(blocks: Sequence[Unit], modules: Mapping[str, nn.Module]) -> list[Unit]:
    """Choose the blocks with layers that are trained: a recomputed block has a backward pass, needed or not."""
    trained = set(modules.values())
    return [unit for unit in blocks if not trained.isdisjoint(unit[0].modules())]


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
            f"ComfyUI cannot run {what}: its code stops with an error{where_stopped(error)}, which the log has. Link "
            "the CLIP that belongs to the MODEL to Use Connected Model, or set another resolution of Train LoRA."
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
    if _apart_at_most(first, second) > denoiser.bound:
        with comfyui_runs(what):
            first, second = (_seeded(run)() for _ in range(2))
        if _apart_at_most(first, second) <= denoiser.bound:
            _check_as_sampled(denoiser, _seeded(run), first, what)
            return ["The MODEL draws random numbers of its own, so a resumed run may differ."]
        raise ValueError(
            f"{what}: this MODEL cannot be trained, as it predicts something else each time that it is asked the same: "
            "it keeps what it computed, counts its passes, or draws from a generator of its own. Link it without the "
            "node that lets it skip blocks."
        )
    with comfyui_runs(what):
        follows = denoiser.follows_sampling(*inputs, gradients.options(denoiser.patcher))
    if not follows:
        raise ValueError(f"{what}: this MODEL cannot be trained, as its code changes what its network predicts.")
    _check_as_sampled(denoiser, run, first, what)
    return []


def _check_as_sampled(denoiser: RawDenoiser, run: Callable[[], Tensor], trained: Tensor, what: str) -> None:
    """Raise ValueError for a MODEL that nodes change whenever ComfyUI samples; trained: what it predicts else."""
    patcher = denoiser.patcher
    if not patcher.get_all_callbacks(CallbacksMP.ON_PRE_RUN):
        return
    with comfyui_runs(what):
        patcher.pre_run()
        try:
            sampled = run()
        finally:
            patcher.cleanup()
    if _apart_at_most(trained, sampled) > denoiser.bound:
        raise ValueError(
            f"{what}: this MODEL cannot be trained, as a node changes it whenever ComfyUI samples, so that it would "
            "draw with another network than was trained. Link it without that node."
        )


def _apart_at_most(one: Tensor, other: Tensor) -> float:
    """The largest difference of two predictions, as a share of the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def _seeded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Let a pass draw the same random numbers each time, and leave those of the process as they were."""

    def seeded() -> Tensor:
        states = random.getstate(), np.random.get_state()
        try:
            with kept_random_state(comfy.model_management.get_torch_device()):
                torch.manual_seed(0)
                random.seed(0)
                np.random.seed(0)
                return run()
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    return seeded


@torch.no_grad()
def _calling(
    some: Sequence[str], modules: Mapping[str, nn.Module], at: Callable[[float], Callable[[], Tensor]]
) -> list[Callable[[], Tensor]]:
    """Choose passes at further levels of noise that call some layers, as some of a MODEL's parts draw few levels."""
    chosen, missing = list[Callable[[], Tensor]](), set(some)
    for share in FURTHER if missing else ():
        called = set[str]()
        with calls({name: modules[name] for name in missing}, called.add):
            at(share)()
        if called:
            chosen.append(at(share))
        missing -= called
    return chosen


@torch.no_grad()
def _reuses(runs: Sequence[Callable[[], Tensor]], near: Callable[[], Tensor], bound: float) -> bool:
    """Tell whether a prediction depends on the level that was predicted before it, as that of a cache does."""
    found = []
    for before in runs:  # a level that is near, and one that is far
        before()
        found.append(near())
    return bool((found[0] - found[1]).abs().max() > bound * found[0].abs().max())


def _check_idle(
    denoiser: RawDenoiser,
    runs: Sequence[Callable[[], Tensor]],
    idle: Sequence[str],
    filed: Filed,
    observed: Observed,
) -> None:
    """Raise ValueError where layers that get no gradient change predictions all the same."""
    if not idle:
        return
    model, rounded = denoiser.model.diffusion_model, denoiser.model.get_dtype_inference() in TOLERANCE
    with torch.no_grad():
        before = Trace(model, runs)
        with filed.moved(idle, NUDGE[rounded]):
            after = Trace(model, runs)
    if where := before.leaves(after, SEEN[rounded]):
        raise ValueError(refused(observed.lost) if observed.lost else WRONG_SLOPE.format(where))


def _compare_with_file(
    denoiser: RawDenoiser,
    runs: Sequence[Callable[[], Tensor]],
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    filed: Filed,
) -> tuple[set[str], list[str], str]:
    """Compare what a network does in training with what ComfyUI's loader makes of its file.

    Returns the layers that are called where samples are drawn, those that a file does not change as training does, and
    a remark on a MODEL that makes much of rounding. Raises ValueError for one that computes with weights beside its
    layers.
    """
    drawn, unapplied, blurred = set[str](), list[str](), ""
    whole = all(p.dtype in WHOLE for p in denoiser.model.diffusion_model.parameters() if p.is_floating_point())
    # Samples of weights in few bits round what they multiply, which training does not.
    paused = functools.partial(gradients.paused, in_training=not whole)
    for some in _shared_out(modules, layers, denoiser.patcher.load_device):
        with torch.no_grad(), filed.moved(some):
            wrong = filed.unapplied(some)
        unapplied += wrong
        rest = [name for name in some if name not in wrong]
        with torch.no_grad(), filed.moved(rest):
            trained = Trace(denoiser.model.diffusion_model, runs)
            with filed.on(rest), paused(), calls(modules, drawn.add):
                drawn_with = Trace(denoiser.model.diffusion_model, runs)
        if where := trained.leaves(drawn_with, FILED * denoiser.bound):
            with torch.no_grad(), filed.moved(rest), filed.on(rest, otherwise=True), paused():
                rounding = drawn_with.apart(Trace(denoiser.model.diffusion_model, runs))
            weights = [getattr(modules[name], "weight", None) for name in rest]  # which some round to their own dtype
            dtypes = [denoiser.model.get_dtype_inference(), *(each.dtype for each in weights if each is not None)]
            dtype = next((each for each in dtypes if each in TOLERANCE), None)
            if dtype and trained.apart(drawn_with) <= OTHERWISE * rounding:
                blurred = BLURRED.format(dtype=str(dtype).removeprefix("torch."), share=rounding)
                continue
            raise ValueError(
                "this MODEL cannot be trained, as it computes with weights of its layers in ways of its own, where a "
                f"LoRA file does something else than training, first in {where}. {INSTEAD}"
            )
    if not whole:
        drawn.clear()
        with torch.no_grad(), gradients.paused(), calls(modules, drawn.add):
            for run in runs:
                run()
    return drawn, unapplied, blurred


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


class Trace:
    """What the blocks of a MODEL give in some passes, in a few numbers each, and what these passes predict."""

    def __init__(self, model: nn.Module, runs: Sequence[Callable[[], Tensor]]) -> None:
        self._seen: list[tuple[str, Tensor]] = []
        with ExitStack() as stack:
            for path, block in named_blocks(model).items():
                handle = block.register_forward_hook(functools.partial(self._note, path), with_kwargs=True)
                stack.callback(handle.remove)
            for run in runs:
                self._seen.append((LAST, run()))

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
        ends = [_apart(one, two) > bound for (path, one), (_, two) in pairs if path == LAST]
        return next(iter(parts), LAST) if any(ends) or len(self._seen) != len(other._seen) else ""

    def apart(self, other: Trace) -> float:
        """Measure by how much the predictions of two traces differ at most, as a share of the first one's."""
        own, others = ([tensor for path, tensor in each._seen if path == LAST] for each in (self, other))
        return max(_apart(one, two) for one, two in zip(own, others, strict=True))


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


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


def _is_product(layer: Any) -> bool:
    """Tell whether a LoRA fits a layer; one that takes more than its input does not."""
    try:
        return is_product(layer)
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
