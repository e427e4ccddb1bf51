"""The contenders on one UNet: the frozen pass, this pack's LoRA eager and compiled, and diffusers with peft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lora_atelier.bench.bases import matrices_of, model_of, network_on
from lora_atelier.bench.cases import PLAIN, Setting
from lora_atelier.bench.measure import Marks
from lora_atelier.trainer_core.config import LoraConfig, MemoryConfig, ObjectiveConfig, OptimizerConfig
from lora_atelier.trainer_core.memory import Stream, compile_blocks, weight_bytes
from lora_atelier.trainer_core.memory import prepare as prepare_unet
from lora_atelier.trainer_core.models.sd.layers import PREFIX
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.objective import Objective
from lora_atelier.trainer_core.optim import build_optimizer
from lora_atelier.trainer_core.preflight.estimate import LargestBatch, estimate_step

# What makes a contender fail that is not installed, does not fit, or does not run here.
FAILURES = (RuntimeError, ImportError, OSError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, max_grad_norm=1.0)
TOKENS = 77  # of a caption
SAME = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # relative difference of first losses that is rounding

Step = Callable[[], dict[str, float]]  # takes one training step; returns seconds by phase, and the loss


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The inputs of every contender, B pictures."""

    noised: Tensor  # (B, 4, H/8, W/8)
    noise: Tensor  # the target, same shape, float32
    timesteps: Tensor  # (B,)
    context: Tensor  # (B, 77, D)
    added: dict[str, Tensor] = field(default_factory=dict)  # pooled embedding (B, P) and size numbers (B, 6)


def build_batch(unet: nn.Module, resolution: int, batch: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """Draw a seeded batch of pictures of resolution x resolution pixels for a UNet."""
    config: Any = unet.config
    seeded = torch.Generator().manual_seed(0)
    shapes = {
        "noised": (batch, config.in_channels, resolution // 8, resolution // 8),
        "noise": (batch, config.in_channels, resolution // 8, resolution // 8),
        "context": (batch, TOKENS, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        shapes["pooled"] = (batch, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
    drawn = {name: torch.randn(shape, generator=seeded).to(device) for name, shape in shapes.items()}
    added = {}
    if "pooled" in drawn:
        sizes = torch.tensor([[resolution, resolution, 0, 0, resolution, resolution]], dtype=torch.float32)
        added = {"text_embeds": drawn["pooled"].to(dtype), "time_ids": sizes.expand(batch, -1).to(device)}
    return Batch(
        noised=drawn["noised"].to(dtype),
        noise=drawn["noise"],
        timesteps=torch.full((batch,), 500, device=device),
        context=drawn["context"].to(dtype),
        added=added,
    )


def prepare(unet: nn.Module, memory: MemoryConfig, weights: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Move a frozen UNet of any dtype, wherever it is, to `device`, apply the memory settings, and return it."""
    if memory.compile:
        compile_blocks(units(unet), _no_compiling, backend="inductor" if device.type == "cuda" else "eager")
    prepare_unet(model_of(unet, dtype), memory, weights, device, Stream(device))
    return unet


class CannotCompile(RuntimeError):
    """The compilation failed."""


def _no_compiling(sentence: str) -> None:
    raise CannotCompile(sentence)  # a race of what is not compiled would be a false result


def short_reason(problem: BaseException) -> str:
    """Write the reason of a failure as one short line."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "it runs out of memory on this device"
    return " ".join(str(problem).split())[:300] or type(problem).__name__


def estimated(unet: nn.Module, batch: Batch, lora: LoraConfig, setting: Setting) -> float:
    """Estimate the peak memory in MB of training a UNet (on the meta device), as the preflight does."""
    meta, dtype = torch.device("meta"), batch.noised.dtype
    with meta:
        network = network_on(unet, lora)
    prepare_unet(model_of(unet, dtype), setting.memory, setting.weights, meta, Stream(meta))
    base = model_of(unet, dtype)
    shape = LargestBatch(samples=len(batch.noised), latents=tuple(batch.noised.shape[2:]), tokens=TOKENS)
    objective = Objective(ObjectiveConfig(), base.noise, 0)
    frozen = weight_bytes(unet)
    estimate = estimate_step(base, network, objective, shape, memory=setting.memory, weight_bytes=frozen)
    return estimate.total / 1e6


def build_frozen(unet: nn.Module, batch: Batch, lora: LoraConfig) -> Step:
    """Run forward and backward pass with no network, the gradient taken to the input latents: the limit."""
    noised = batch.noised.clone().requires_grad_()

    def update() -> None:
        noised.grad = None

    return lambda: _step(unet, noised, batch, update)


def build_ours(unet: nn.Module, batch: Batch, lora: LoraConfig) -> Step:
    """Attach this pack's network to the UNet and train it."""
    network = network_on(unet, lora).to(batch.noised.device)
    network.attach()
    optimizer = build_optimizer(OPTIMIZER, network.groups({PREFIX: OPTIMIZER.learning_rate}))
    update = _update(list(network.parameters()), optimizer)
    return lambda: _step(unet, batch.noised, batch, update)


def build_peft(unet: Any, batch: Batch, lora: LoraConfig) -> Step:
    """Train peft's LoRA on the same layers with the same optimizer."""
    import peft

    names = list(matrices_of(unet, lora.preset))
    unet.add_adapter(peft.LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=names))
    trained = [p for p in unet.parameters() if p.requires_grad]
    if len(trained) != 2 * len(names):
        raise RuntimeError(f"peft trains {len(trained)} tensors on {len(names)} layers; expected two for each.")
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = build_optimizer(OPTIMIZER, [{"params": trained, "lr": OPTIMIZER.learning_rate}])
    update = _update(trained, optimizer)
    return lambda: _step(unet, batch.noised, batch, update)


class Contender(NamedTuple):
    """A contender's step, and the settings of its UNet."""

    build: Callable[[nn.Module, Batch, LoraConfig], Step]
    memory: MemoryConfig = PLAIN


CONTENDERS = {
    "frozen": Contender(build_frozen),
    "ours": Contender(build_ours),
    "compiled": Contender(build_ours, PLAIN.replace(compile=True)),
    "peft": Contender(build_peft),
}


def share_weights(unet: nn.Module) -> nn.Module:
    """Build a second UNet on the same weight tensors."""
    with torch.device("meta"):
        twin = type(unet).from_config(unet.config)  # type: ignore[attr-defined]
    twin.load_state_dict(unet.state_dict(), assign=True)
    return twin.requires_grad_(False).eval()


def race(
    unet: nn.Module,
    batch: Batch,
    lora: LoraConfig,
    names: Iterable[str],
    steps: int,
    others: Mapping[str, Step] = MappingProxyType({}),
) -> tuple[list[dict[str, dict[str, float]]], dict[str, str]]:
    """Time `steps` steps of each contender, in turn, each with its own UNet over the same weights.

    The first turns are not counted. A contender leaves the race if it fails, or if its first prediction differs from
    the frozen one, which an untrained network must not change. Returns the steps, and the reasons of those that left.
    Raises RuntimeError when no contender is left.
    """
    device, dtype = batch.noised.device, batch.noised.dtype
    unet = prepare(unet, PLAIN, "auto", dtype, device)
    runners: dict[str, Step] = {}
    without: dict[str, str] = {}
    first: dict[str, float] = {}

    def turn() -> dict[str, dict[str, float]]:
        return {name: timings for name in list(runners) if (timings := attempt(name, runners[name]))}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FAILURES as problem:
            without[name] = short_reason(problem)
        runners.pop(name, None)
        gc.collect()  # its memory is for the others
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    for name in names:
        build, memory = CONTENDERS[name]
        twin = share_weights(unet)
        made = attempt(name, lambda: build(prepare(twin, memory, "auto", dtype, device), batch, lora))  # noqa: B023
        if made and (timings := attempt(name, made)):
            runners[name], first[name] = made, timings["loss"]
    for name, loss in first.items():
        expected = first.get("frozen", median(first.values()))
        if not abs(loss - expected) <= SAME[dtype] * expected:
            without[name] = f"it does not compute the same: a first loss of {loss:.6g}, where {expected:.6g} is right"
            del runners[name]
    for name, step in others.items():
        if attempt(name, step):
            runners[name] = step
    for _ in range(warm_up(device) - 1):
        turn()
    found = [turn() for _ in range(steps)]
    if not runners:
        raise RuntimeError(f"All contenders failed: {without}.")
    return found, without


def warm_up(device: torch.device) -> int:
    """Number of uncounted first steps: on a GPU they choose kernels and lay out memory."""
    return 1 if device.type == "cpu" else 3


def count_flops(unet: nn.Module, batch: Batch) -> float:
    """Count the floating point operations of one frozen forward and backward pass; UNet and batch on the meta device.

    Attention is counted as its plain products: the recomputing of fused kernels is no work of the model.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _loss(unet, batch.noised.clone().requires_grad_(), batch).backward()
    return counter.get_total_flops()


def _loss(unet: nn.Module, noised: Tensor, batch: Batch) -> Tensor:
    more = {"added_cond_kwargs": batch.added} if batch.added else {}
    prediction = unet(noised, batch.timesteps, encoder_hidden_states=batch.context, **more).sample
    return F.mse_loss(prediction.float(), batch.noise)


def _step(unet: nn.Module, noised: Tensor, batch: Batch, update: Callable[[], None]) -> dict[str, float]:
    marks = Marks(noised.device)
    loss = _loss(unet, noised, batch)
    marks.set("forward")
    loss.backward()
    marks.set("backward")
    update()
    marks.set("update")
    return {**marks.seconds(), "loss": float(loss.detach())}


def _update(parameters: list[Any], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Build a function that clips, steps the optimizer and clears the gradients, as the training loop does."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update
