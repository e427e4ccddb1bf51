"""The estimate of a step's memory: what is counted, by hand; what settings change; the models are left alone."""

from types import SimpleNamespace

import pytest
import torch
from estimates import PLAIN, estimate, meta_base
from tiny_models import network_on, tiny_unet
from torch.utils.checkpoint import checkpoint as recompute

from lora_atelier.trainer_core.config import (
    OPTIMIZERS,
    LoraConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
)
from lora_atelier.trainer_core.networks import Network
from lora_atelier.trainer_core.networks.choose import TrainedLayer
from lora_atelier.trainer_core.objective import Objective
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.optim import build_optimizer
from lora_atelier.trainer_core.preflight.estimate import (
    Estimate,
    LargestBatch,
    LiveBytes,
    estimate_step,
    fused_attention,
    optimizer_state,
)
from lora_atelier.trainer_core.preflight.measured import network_bytes

SIZE = 1000 * 4  # bytes of the tensors that are counted by hand


@pytest.fixture(params=["cpu", "meta"])
def ones(request):
    return torch.ones(1000, device=request.param, requires_grad=True)


def exp_twice(x):
    return x.exp().exp()


def test_a_chain_keeps_every_result_and_two_gradients(ones):
    with LiveBytes() as live:
        x = ones
        for _ in range(5):
            x = x.exp()
        assert live.now == live.peak == 5 * SIZE  # exp saves what it returns
        x = x.sum()
        x.backward()
        assert live.peak == 6 * SIZE + 8  # the first gradient beside all results; the loss, and its gradient
        del x
    assert live.now == SIZE  # what is left: ones.grad
    ones.grad = None
    assert live.now == 0


def test_a_checkpointed_chain_keeps_the_inputs_of_its_parts(ones):
    with LiveBytes() as live:
        x = ones
        for _ in range(3):
            x = recompute(exp_twice, x, use_reentrant=False)
        assert live.now == 3 * SIZE  # results of the three parts
        assert live.peak == 4 * SIZE  # and what lies between two of them
        x.sum().backward()
        x = None
    assert live.now == SIZE
    # three inputs and results of parts, what is computed again of the last one, and the gradient
    assert live.peak == 3 * SIZE + 2 * SIZE + SIZE + 8


def test_what_is_freed_in_place_or_a_view_takes_no_more(ones):
    with torch.no_grad(), LiveBytes() as live:
        x = ones + 1
        for _ in range(3):
            x = x * 2  # the old value lives until the new one is there
        assert (live.now, live.peak) == (SIZE, 2 * SIZE)
        x.mul_(2).add_(1)
        parts = [x.view(10, 100).t(), x[:10], *x.chunk(2), x.detach(), ones.view(10, 100), ones[::2]]
        torch.add(x, 1, out=x)
        assert (live.now, live.peak) == (SIZE, 2 * SIZE)
        y = x.view(2, 5, 100) @ torch.ones(100, 100, device=x.device)  # a view of a product, as its shape is another
        del x
        assert live.now == SIZE + SIZE, "the parts hold the first tensor"
        del parts
        assert live.now == SIZE
        assert live.peak == 2 * SIZE + 100 * 100 * 4
        assert y.shape == (2, 5, 100)
    del y
    assert live.now == 0


def test_only_what_is_new_or_named_counts(ones):
    live = LiveBytes(block=512)
    assert live.count([ones, ones.view(2, 500)]) == 4096  # eight blocks for 4000 bytes, once
    with live:
        ones.detach().add_(1)
        scalar = ones.detach().sum()
        assert live.now == 4096 + 512
        del scalar
    assert live.now == 4096


def test_what_hooks_put_away_counts_as_they_keep_it(ones):
    def pack(saved):
        return saved.half()

    def unpack(packed):
        return packed.float()

    with LiveBytes() as live, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (ones * 1).exp().sum()
        assert live.now == SIZE // 2 + 4
        loss.backward()
    assert live.now == SIZE + 4


def test_results_from_memory_have_the_shapes_of_the_real_ones():
    def chain(x):
        kernel = torch.empty(8, 8, 3, 3, device="meta", dtype=x.dtype)
        y = torch.nn.functional.conv2d(x, kernel, stride=2)
        norm = torch.nn.functional.group_norm(y, 2)
        return y, norm.permute(0, 2, 3, 1), norm * 2, (norm > 0) * 2, (norm > 0) * 2.0, norm.double().sum(0), y.chunk(3)

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(2, 8, 9, 9, device="meta", dtype=dtype)
        real = torch.utils._pytree.tree_leaves(chain(x))
        with LiveBytes() as live:
            chain(x)
            held = live.now
            again = torch.utils._pytree.tree_leaves(chain(x))
            assert held == 0 and live.now > 0
        for a, b in zip(real, again, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exchanged_attention_keeps_what_the_fused_kernel_of_the_cpu_keeps(dtype):
    def run(device):
        with LiveBytes() as live:
            shape = (2, 128, 4, 32)
            q, k, v = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
            kept = live.now
            out.backward(torch.empty_like(out))
        return kept, live.now, out.shape, out.stride(), [x.grad.stride() for x in (q, k, v)]

    real = run("cpu")
    with fused_attention():
        assert run("meta") == run("cpu") == real
    assert run("meta")[0] > real[0]  # without, all attention weights


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("paged_")])
def test_the_state_is_as_large_as_that_of_the_optimizer(name):
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (100, (5, 819), 4096, (8, 50, 50))]
    config = OptimizerConfig(name=name, learning_rate=1.0)
    optimizer = build_optimizer(config, [{"params": parameters, "lr": 1.0}])
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    states = [state for part in getattr(optimizer, "parts", [optimizer]) for state in part.state.values()]
    values = [value for state in states for value in state.values()]
    kept = [t for value in values for t in (value if isinstance(value, list) else [value])]
    kept = [t for t in kept if isinstance(t, torch.Tensor)]
    tables = (
        256 * 4 * {"adamw8bit": 2, "ademamix8bit": 2}.get(name, name.endswith("8bit"))
    )  # of 8-bit values, one for all parameters
    found = sum(count * dtype.itemsize for count, dtype in optimizer_state(parameters, config))
    assert found == LiveBytes().count(kept) - tables


def test_what_soap_and_automagic_keep_is_counted():
    """SOAP: AdamW's two numbers of each weight, and two squares of each side up to the limit. Automagic: a byte."""

    def size(name, **options):
        config = OptimizerConfig(name=name, options=options)
        return sum(count * dtype.itemsize for count, dtype in optimizer_state([torch.ones(16, 300)], config))

    assert size("soap") == 4 * (2 * 16 * 300 + 2 * 16**2)
    assert size("soap", max_precondition_dim=300) == 4 * (2 * 16 * 300 + 2 * 16**2 + 2 * 300**2)
    assert size("automagic") == 16 * 300 + 4 * (16 + 300)


def test_a_running_average_is_part_of_the_state_where_it_is_kept():
    parameters = [torch.nn.Parameter(torch.ones(8, 50)), torch.nn.Parameter(torch.ones(7))]
    sizes = [
        sum(count * dtype.itemsize for count, dtype in optimizer_state(parameters, OptimizerConfig(**options)))
        for options in ({}, {"ema_decay": 0.99}, {"ema_decay": 0.99, "ema_device": "cpu"})
    ]
    assert sizes == [sizes[0], sizes[0] + 4 * 407, sizes[0]]


def test_activations_grow_with_the_batch_and_nothing_else_does():
    one, two, four = (estimate(shape={"samples": size}) for size in (1, 2, 4))
    assert one.weights == two.weights == four.weights
    assert one.network == two.network == four.network
    assert four.activations - two.activations == pytest.approx(2 * (two.activations - one.activations), rel=0.001)


def test_the_rank_changes_the_network():
    four, eight = estimate(rank=4), estimate(rank=8)
    layers = len(network_on(tiny_unet(), LoraConfig(preset="full")).layers)
    counts = 4 * 2 * layers  # a step count for each of two tensors a layer
    assert eight.weights == four.weights
    assert eight.network - counts == 2 * (four.network - counts)
    # the peak is in the forward pass, before the gradients, so that the rest is smaller by what these grow
    assert eight.activations == pytest.approx(four.activations, rel=0.02)


def test_what_the_network_holds_and_does_not_train_counts_without_gradient_and_state():
    trained = network_on(tiny_unet(), LoraConfig(rank=4, preset="full"))
    assert estimate(init="pissa").network - estimate().network == sum(p.nbytes for p in trained.parameters())
    plain, pissa = (network_on(tiny_unet(), LoraConfig(rank=4, init=init)) for init in ("default", "pissa"))
    assert network_bytes(pissa, PLAIN) - network_bytes(plain, PLAIN) == sum(p.nbytes for p in plain.parameters())


def test_every_setting_changes_what_it_should():
    base = meta_base()
    plain = estimate(base)
    half = estimate(meta_base(dtype=torch.bfloat16))
    assert (2 * half.weights, half.network) == (plain.weights, plain.network)
    assert half.activations < 0.6 * plain.activations
    assert estimate(base, weight_bytes=7) == Estimate(weights=7, network=plain.network, activations=plain.activations)
    assert estimate(base, memory=MemoryConfig(attention="math")).activations > 2 * plain.activations
    assert estimate(base, shape={"tokens": 462}).activations > plain.activations
    gradients = sum(p.nbytes for p in network_on(tiny_unet(), LoraConfig(rank=4, preset="full")).parameters())
    assert 0 < estimate(base, shape={"accumulates": True}).total - plain.total <= gradients
    blocks = estimate(base, block=512)
    assert blocks.total % 512 == 0 and plain.total < blocks.total
    assert Estimate(weights=5_000_000_000, network=1_000_000_000, activations=60_000_000).gigabytes == "6.1 GB"


def test_the_models_are_left_as_they_were():
    base = meta_base()
    before = {name: vars(module).keys() for name, module in base.unet.named_modules()}
    attention = torch.nn.functional.scaled_dot_product_attention
    assert estimate(base) == estimate(base)
    assert {name: vars(module).keys() for name, module in base.unet.named_modules()} == before
    assert torch.nn.functional.scaled_dot_product_attention is attention


class Joined(torch.nn.Module):
    """A denoiser of latents beside inputs of their axes, of one convolution whose kernel is 1 along each axis."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.inside = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1](8, 4, 1)

    def forward(self, noised, beside):
        return self.inside(torch.cat([noised, beside], 1))


def step_on(axes):
    """Estimate a step of a LoRA on such a denoiser."""
    with torch.device("meta"):
        denoiser = Joined(len(axes))
        network = Network(
            [TrainedLayer("inside", denoiser.inside, 2, 2.0, part="x")], LoraConfig(rank=2, alpha=2), seed=0
        )
    base = SimpleNamespace(
        denoiser=SimpleNamespace(
            module=denoiser,
            written=None,
            predict=lambda noised, levels, conditions: denoiser(noised, conditions),
        ),
        text=SimpleNamespace(encoders=()),
        latents=SimpleNamespace(channels=4),
        conditions=SimpleNamespace(
            without_data=lambda count, axes, tokens: torch.empty(count, 4, *axes, device="meta"),
        ),
    )
    shape = LargestBatch(samples=2, latents=axes, tokens=1, masked=True)
    return estimate_step(base, network, Objective(ObjectiveConfig(), flow_noise(10), 0), shape, block=1)


def test_a_sound_a_picture_and_a_clip_of_as_many_numbers_take_as_much():
    sound, picture, clip = (step_on(axes) for axes in ((1024,), (32, 32), (4, 16, 16)))
    assert sound == picture == clip
    assert sound.activations > 2 * 1024 * 4 * 4 * 4, "the latents of two samples, more than four times"
    assert step_on((8, 16, 16)).activations == pytest.approx(2 * clip.activations, rel=0.01)
