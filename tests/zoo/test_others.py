"""Models as custom nodes of other authors change them, rebuilt small: each is trained right, or refused in a sentence.

Ways of TeaCache, of block swapping, of GGUF, nunchaku, SageAttention, PEFT, RamTorch and others to take a model over.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.again import again
from zoo.linked import live_of
from zoo.odd import WIDTH, Part, Rows
from zoo.test_train import drawn_with, pictures, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_unlisted import link, notes_of  # noqa: F401 (link is a fixture)


class Cached(Rows):
    """Skips its blocks where a level is near the last one, and adds what they added then."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.last: dict[str, Any] = {}

    def memory(self) -> dict[str, Any]:
        return self.last

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **options: Any) -> Tensor:
        memory, level = self.memory(), float(timesteps.max())
        alone = self.leave(self.enter(x.flatten(2).mT)).mT.reshape(x.shape)
        if memory and abs(level - memory["level"]) < 100 and memory["added"].shape == x.shape:
            return alone + memory["added"]
        own = super().forward(x, timesteps, context, **options)
        memory.update(level=level, added=(own - alone).detach())
        return own


OUTSIDE: dict[str, Any] = {}


class CachedOutside(Cached):
    """The same with a memory that no part of the MODEL holds."""

    def memory(self) -> dict[str, Any]:
        return OUTSIDE


class SwappedPart(Part):
    """Holds copies of its weights, and takes them over for each pass, as a block that is moved to the device."""

    def forward(self, tokens: Tensor) -> Tensor:
        own = {parameter: parameter.data for parameter in self.parameters()}
        for parameter, data in own.items():
            parameter.data = data.clone()
        found = super().forward(tokens)
        for parameter, data in own.items():
            parameter.data = data
        return found


class PackedLinear(nn.Module):
    """A layer of a class of its own, whose weight is a row of bytes, with a scale for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = WIDTH, WIDTH, None
        weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)) / 6
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        packed = (weight / self.scale).round().to(torch.int8).flatten()
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.view(WIDTH, WIDTH).to(x) * self.scale.to(x))


class PackedPart(Part):
    def make_mlp(self, ops: Any) -> nn.Module:
        return PackedLinear()


class Kernel(torch.autograd.Function):
    """A product of a fused kernel, made to draw alone: its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()


class KernelLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6)) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(x, self.qweight.to(x))


class KernelPart(Part):
    def make_mlp(self, ops: Any) -> nn.Module:
        return KernelLinear()


class RoundedAttention(Part):
    """Rounds queries and keys to steps, through which no gradient comes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = ((each / step).round() * step for each, step in ((q, 0.05), (k, 0.05)))
        return super().attend(q, k, v)


class Adapted(nn.Module):
    """A layer inside of another author's adapter, whose own change is frozen."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = ops.Linear(WIDTH, WIDTH), ops.Linear(WIDTH, 4), ops.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B(self.lora_A(x))


class AdaptedPart(Part):
    def make_mlp(self, ops: Any) -> nn.Module:
        return Adapted(ops)


class ChunkedPart(Part):
    """Calls its MLP for a few tokens at a time."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(self.attn_q(tokens), self.attn_k(tokens), self.attn_v(tokens))
        return tokens + torch.cat([F.gelu(self.mlp(each)) for each in tokens.split(7, dim=1)], dim=1)


class SparsePart(Part):
    """Attends to the keys with the largest products alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / WIDTH**0.5
        least = scores.topk(5, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, -1e4).softmax(-1) @ v


class Skipping(Rows):
    """Leaves one of its blocks out, as a guidance by skipped layers does."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return tokens if number == 1 else super().step(number, block, tokens, timesteps)


class RoutedPart(Part):
    """Sends each token to one of two experts."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.mlp_other, self.route = ops.Linear(WIDTH, WIDTH), ops.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(self.attn_q(tokens), self.attn_k(tokens), self.attn_v(tokens))
        first = (self.route(tokens.detach()).argmax(-1) == 0)[..., None]
        return tokens + torch.where(first, self.mlp(tokens), self.mlp_other(tokens))


class Fetched(torch.autograd.Function):
    """A product with a weight that is fetched for it, and once more on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.clone().t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] @ ctx.weight.clone(), None


class FetchedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Fetched.apply(x, self.weight) + self.bias


class FetchedPart(Part):
    def make_mlp(self, ops: Any) -> nn.Module:
        return FetchedLinear(WIDTH, WIDTH)


class Damped(Rows):
    """Halves the gradients that leave one of its blocks."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.blocks[2].register_full_backward_hook(lambda _, given, above: tuple(each * 0.5 for each in given))


def of(part: type[nn.Module]) -> type[Rows]:
    return type(f"RowsOf{part.__name__}", (Rows,), {"make": lambda _, ops: part(ops)})


RIGHT = {  # -> how many layers are trained, and what a note says
    Cached: (16, ""),
    of(PackedPart): (12, "4 layers' weights are none that ComfyUI changes, so the LoRA leaves them out"),
    of(AdaptedPart): (24, ""),
    of(ChunkedPart): (16, ""),
    of(SparsePart): (16, ""),
    Skipping: (12, "4 layers are never called by the MODEL, so the LoRA leaves them out"),
    of(FetchedPart): (16, ""),
}
REFUSED = {
    CachedOutside: "as it reuses what it computed at another level of noise; link it without the node",
    of(SwappedPart): "as no layer can be. 16 layers are computed by other code as well",
    of(KernelPart): "as a function in its code has no backward pass",
    of(RoundedAttention): "as the loss does not follow its gradients, first before",
    of(RoutedPart): "as operators hand no gradient on: detach in RoutedPart",
    Damped: "as the loss does not follow its gradients, first before",
}


def some(networks: Any, first: str) -> Any:
    """Choose one for every run, and the others for thorough ones."""
    found = {each.__name__: each for each in networks}
    return pytest.mark.parametrize(
        "network", [found[first], *again(*(each for each in networks if each.__name__ != first))]
    )


@some(RIGHT, "RowsOfPackedPart")
def test_it_draws_with_its_file_what_it_drew_in_training(network, link, pictures, tmp_path):  # noqa: F811
    OUTSIDE.clear()
    result, said = notes_of(sampled(link(network), pictures), tmp_path)
    count, note = RIGHT[network]
    assert len({name.partition(".")[0] for name in result.tensors}) == count
    assert note in said and ("leaves them out" in said) == bool(note)
    assert (result.samples - drawn_with(live_of(link(network)), result.tensors)).abs().max() <= 1.5 / 255


@some(REFUSED, "CachedOutside")
def test_it_is_refused_in_a_sentence(network, link, pictures, tmp_path):  # noqa: F811
    OUTSIDE.clear()
    with pytest.raises(ValueError, match="this MODEL cannot be trained, " + re.escape(REFUSED[network])):
        notes_of(sampled(link(network), pictures), tmp_path)
