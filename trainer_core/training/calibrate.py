"""Look at the first batches of a run before its first step: inputs of layers, and gradients of their weights.

What is measured begins the network or scales its channels, and then belongs to its state: a resumed run measures
nothing. No weight's gradient and no input is kept as a whole: both are known by their products with thin matrices, as
in subspace iteration (Halko, Martinsson, Tropp 2011).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn

from ..common.axes import convolve
from ..common.devices import for_linalg
from ..common.rng import generator
from ..common.wording import count, names, say
from ..config import setting
from ..models import differentiable
from ..networks.layers.lora import LoraLayer
from ..objective import Pass, prompts, strengths
from .batch import ReadConditioning, read_batch
from .state import Run

BATCHES = 8  # micro-batches that are looked at
TURNS = 3  # how often all of them are, for the main directions of inputs
GRADIENT_TURNS = 2  # for those of gradients, each with two backward passes
MEASURED = ("eva", "lora_ga")  # of init


def calibrate(run: Run) -> None:
    """Begin the layers of a fresh run as its settings ask, by the first batches; the network is attached.

    A fresh network still changes nothing. All processes take what the first one has measured.
    """
    config = run.config.lora
    layers = {
        name: layer
        for name, layer in run.network.layers.items()
        if isinstance(layer, LoraLayer) and layer.down.requires_grad
    }
    if not layers or not (config.init in MEASURED or config.channel_scaling):
        return
    run.callbacks.phase(say("looking at the first batches"), 0, 1)
    read = run.reader(training=True)
    compiled, run.programs.in_use = run.programs.in_use, False  # programs would keep what watches them
    try:
        if config.init == "eva":
            begin_along_inputs(run, layers, read)
        if config.init == "lora_ga":
            begin_at_gradients(run, layers, read)
        if config.channel_scaling:
            scale_by_inputs(run, layers, read)
    finally:
        run.programs.in_use = compiled
    if run.world.size > 1:
        share(run, layers)
    if run.ema:  # it began with the weights of before
        for average, parameter in zip(run.ema.averages, run.ema.parameters, strict=True):
            average.copy_(parameter.detach())


def first_passes(run: Run, read: ReadConditioning) -> Generator[Pass, None, None]:
    """Yield passes of the first micro-batches as the run will train them, without dropout."""
    terms = run.objective.terms
    micro_batches = islice((each for step in range(run.plan.steps) for each in run.plan.step(step)), BATCHES)
    try:
        for planned in micro_batches:
            for strength, micro_batch in strengths(terms, planned):
                run.callbacks.check()
                run.encode(micro_batch.samples, prompts(terms, micro_batch.index))
                run.network.reverse(strength < 0)
                batch = read_batch(run.encoded, micro_batch, run.plan, run.config, terms)
                draws = run.objective.draw(batch, run.device)
                with differentiable(run.base, draws.noised.shape):
                    yield run.passing(micro_batch.samples, draws, read, micro_batch.index)
    finally:
        run.network.reverse(False)


def scale_by_inputs(run: Run, layers: Mapping[str, LoraLayer], read: ReadConditioning) -> None:
    """Scale the channels of layers by the mean sizes of their inputs."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def see(name: str, x: Tensor) -> None:
        if name in layers:
            channels = x.movedim(1, -1) if layers[name].geometry else x
            sizes = channels.float().abs().flatten(0, -2)
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + sizes.sum(0), count + len(sizes)

    with run.network.watched(see):
        for seen in first_passes(run, read):
            seen.without_gradients()
    for name, (total, rows) in sums.items():
        layers[name].scale_channels(total / max(1, rows))


def begin_along_inputs(run: Run, layers: Mapping[str, LoraLayer], read: ReadConditioning) -> None:
    """Set down to the leading right singular vectors of all inputs of each layer (EVA, ranks as they are set)."""
    rows = {name: random_rows(run, name, layer, layer.rank) for name, layer in layers.items()}
    for _ in range(TURNS):
        products = {name: torch.zeros_like(each) for name, each in rows.items()}

        def see(name: str, x: Tensor, rows: dict[str, Tensor] = rows, products: dict[str, Tensor] = products) -> None:
            if name in layers:
                products[name] += covariance_product(x.float(), rows[name], layers[name])

        with run.network.watched(see):
            for seen in first_passes(run, read):
                seen.without_gradients()
        # Where nothing was seen the rows stay random.
        rows = {name: right_vectors(each) if each.any() else rows[name] for name, each in products.items()}
    for name, layer in layers.items():
        layer.begin_along(rows[name].flatten(1).to(layer.down))


def begin_at_gradients(run: Run, layers: Mapping[str, LoraLayer], read: ReadConditioning) -> None:
    """Set up_0 and down_0 by the leading singular vectors of the gradient of each weight (LoRA-GA).

    A layer's factors give that gradient G's products: at up 0 that of up is G down^T, at down 0 that of down up^T G.
    """
    rows = {name: random_rows(run, name, layer, 2 * layer.rank) for name, layer in layers.items()}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    broken: set[str] = set()
    for _ in range(GRADIENT_TURNS):
        standing = {name: StandIn(layer, rows[name]) for name, layer in layers.items()}
        gradients = gradients_of(run, standing, "up", read, broken)
        columns = {name: torch.linalg.qr(for_linalg(each.flatten(1))).Q for name, each in gradients.items()}
        standing = {name: StandIn(layers[name], rows[name], each) for name, each in columns.items()}
        for name, each in gradients_of(run, standing, "down", read, broken).items():
            u, _, vt = torch.linalg.svd(for_linalg(each.flatten(1)), full_matrices=False)
            found[name] = columns[name] @ u, vt
            rows[name] = vt.view(each.shape).to(each)
    for name, (left, right) in found.items():
        layers[name].begin_at(left.to(layers[name].down.device), right.to(layers[name].down.device))
    if without := sorted(broken - set(found)):
        run.callbacks.note(
            f"{count(without, 'layer')} begin as default, as their first gradients were not finite: {names(without)}; "
            f"set {setting('base_model.precision')} to float32 or bfloat16 to begin them by lora_ga."
        )


class StandIn:
    """Other factors in a layer's place, wider than its own, whose product is 0."""

    def __init__(self, layer: LoraLayer, down: Tensor, up: Tensor | None = None) -> None:
        """Take down, (n, in, *kernel), and up 0; or with up, (out, n), a down of 0."""
        outputs, ones = layer.shape[0], (1,) * (len(layer.shape) - 2)
        own = down.new_zeros(outputs, len(down), *ones) if up is None else up.to(down).view(outputs, -1, *ones)
        if up is not None:
            down = down.new_zeros(own.shape[1], *down.shape[1:])
        self.layer, self.factors = layer, {"down": nn.Parameter(down), "up": nn.Parameter(own)}

    def swap(self) -> None:
        """Change places with the layer's own factors."""
        layer = self.layer
        kept = {"down": layer.down, "up": layer.up}
        layer.down, layer.up = self.factors["down"], self.factors["up"]
        self.factors = kept


def gradients_of(
    run: Run, standing: Mapping[str, StandIn], factor: str, read: ReadConditioning, broken: set[str]
) -> dict[str, Tensor]:
    """Sum the gradients of one factor of stand-ins over the first batches; layers without one are left out.

    broken: gets the names of those whose sums are not finite.
    """
    trained = {name: each.factors[factor] for name, each in standing.items()}
    fixed = {name: (each.layer.down_0, each.layer.up_0, each.layer.scales) for name, each in standing.items()}
    for each in standing.values():
        each.swap()
        each.layer.down_0 = each.layer.up_0 = each.layer.scales = None
    try:
        for seen in first_passes(run, read):
            losses = run.objective.loss(seen.predict(), seen)
            run.scaler.scale(losses.sum()).backward()
    finally:
        for name, each in standing.items():
            each.swap()
            each.layer.down_0, each.layer.up_0, each.layer.scales = fixed[name]
        run.network.zero_grad(set_to_none=True)
    found = {name: each.grad.float() for name, each in trained.items() if each.grad is not None and each.grad.any()}
    broken.update(overflowed := {name for name, each in found.items() if not each.isfinite().all()})
    return {name: each for name, each in found.items() if name not in overflowed}


def covariance_product(x: Tensor, rows: Tensor, layer: LoraLayer) -> Tensor:
    """Compute rows @ C of the inputs' uncentred covariance C, as the gradient of |rows x|^2 / 2; of any geometry."""
    with torch.enable_grad():
        free = rows.detach().requires_grad_()
        seen = convolve(x, free, **layer.geometry) if layer.geometry else x @ free.t()
        return torch.autograd.grad(seen.square().sum() / 2, free)[0]


def right_vectors(product: Tensor) -> Tensor:
    """Compute the right singular vectors of (n, in, *kernel), as rows of its shape, the largest first."""
    vt = torch.linalg.svd(for_linalg(product.flatten(1)), full_matrices=False).Vh
    return vt.view(len(vt), *product.shape[1:]).to(product)


def random_rows(run: Run, name: str, layer: LoraLayer, count: int) -> Tensor:
    """Draw rows to begin with, (n, in, *kernel) float32, of length 1; at most as many as the weight has ranks."""
    outputs, *inputs = layer.shape
    count = min(count, outputs, torch.Size(inputs).numel())
    rows = torch.randn(count, *inputs, generator=generator(run.config.train.seed, f"init/{name}/first"))
    return right_vectors(rows).to(layer.down.device)


def share(run: Run, layers: Mapping[str, LoraLayer]) -> None:
    """Give all processes the weights and scales of the one that leads."""
    tensors = [
        tensor.detach()
        for layer in layers.values()
        for tensor in (layer.down, layer.down_0, layer.up_0, layer.scales)
        if tensor is not None
    ]
    sums = run.world.total([tensor if run.world.leads else torch.zeros_like(tensor) for tensor in tensors])
    for tensor, each in zip(tensors, sums, strict=True):
        tensor.copy_(each)
