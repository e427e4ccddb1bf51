"""Models as custom nodes may bring them: in no list, and written in ways that ComfyUI's own are not."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import zoo.comfy_here  # noqa: F401  # isort: skip
import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, TEXT, CHANNELS = 32, 24, 16


class Block(nn.Module):
    """Writes into the tokens that it is given, and gives nothing back."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.norm = ops.LayerNorm(WIDTH)
        self.attn_q, self.attn_k, self.attn_v = (ops.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(ops.Linear(WIDTH, 48), nn.ReLU(inplace=True), ops.Linear(48, WIDTH))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> None:
        found = self.norm(tokens)
        scores = self.attn_q(found) @ self.attn_k(found).transpose(1, 2) / WIDTH**0.5
        if mask is not None:
            scores.masked_fill_(mask[:, None, :] == 0, -1e4)
        tokens += scores.softmax(-1) @ self.attn_v(found)
        tokens[:, 1:] += self.mlp(tokens)[:, :-1]


class Written(nn.Module):
    """A transformer of such blocks, on captions with a mask and a weight for each token."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.enter, self.leave = ops.Linear(CHANNELS, WIDTH), ops.Linear(WIDTH, CHANNELS)
        self.read = ops.Linear(TEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(ops) for _ in range(3)])

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, mask: Tensor, weights: Tensor, **_: Any) -> Tensor:
        b, c, h, w = x.shape
        tokens = torch.cat([self.read(context * weights[..., None].to(context)), self.enter(x.flatten(2).mT)], dim=1)
        tokens += timesteps.to(tokens).view(-1, 1, 1).cos()
        mask = torch.cat([mask, mask.new_ones(b, h * w)], dim=1)
        for block in self.blocks:
            block(tokens, mask=mask)
        return self.leave(tokens[:, -h * w :]).mT.reshape(b, c, h, w)


class Convolution(nn.Module):
    """Gives back its result in a tuple, and computes it where its input was."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.norm = ops.GroupNorm(4, WIDTH)
        self.depthwise = ops.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.conv, self.point = ops.Conv2d(WIDTH, WIDTH, 3, padding=1), ops.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.point(nn.functional.silu(self.conv(self.depthwise(self.norm(x))) * scale))
        return torch.add(x, found, out=x), {"found": found}


class Convolutions(nn.Module):
    """A network without a linear layer."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.enter, self.leave = (
            ops.Conv2d(CHANNELS, WIDTH, 3, padding=1),
            ops.Conv2d(WIDTH, CHANNELS, 3, padding=1),
        )
        self.read = ops.Conv1d(TEXT, WIDTH, 1)
        self.blocks = nn.ModuleList([Convolution(ops) for _ in range(3)])

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **_: Any) -> Tensor:
        caption = self.read(context.mT).mean(2)[:, :, None, None]
        x, extra = self.enter(x), torch.zeros(())
        for block in self.blocks:
            x, more = block(x, caption + timesteps.to(x).view(-1, 1, 1, 1).sin())
            extra = extra + more["found"]
        return self.leave(x + extra)


class Weights(nn.Module):
    """A network whose weights are computed or shared, by layers or by blocks."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.enter, self.leave = ops.Linear(CHANNELS, WIDTH), ops.Linear(WIDTH, CHANNELS)
        self.read = ops.Linear(TEXT, WIDTH)
        shared = Block(ops)
        self.blocks = nn.ModuleList([shared, Block(ops), shared])
        self.blocks[1].attn_q.weight = self.blocks[1].attn_k.weight
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **_: Any) -> Tensor:
        b, c, h, w = x.shape
        tokens = torch.cat([self.read(context), self.enter(x.flatten(2).mT)], dim=1)
        tokens = tokens + timesteps.to(tokens).view(-1, 1, 1).cos()
        for block in self.blocks:
            block(tokens)
        tokens = tokens + self.normed(tokens)
        return self.leave(tokens[:, -h * w :]).mT.reshape(b, c, h, w)


class Rows(nn.Module):
    """Blocks in a row, each of which adds what `part` makes of the tokens."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.enter, self.leave = ops.Linear(CHANNELS, WIDTH), ops.Linear(WIDTH, CHANNELS)
        self.read = ops.Linear(TEXT, WIDTH)
        self.blocks = nn.ModuleList([self.make(ops) for _ in range(4)])

    def make(self, ops: Any) -> nn.Module:
        return Part(ops)

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **_: Any) -> Tensor:
        b, c, h, w = x.shape
        tokens = torch.cat([self.read(context), self.enter(x.flatten(2).mT)], dim=1)
        tokens = tokens + timesteps.to(tokens).view(-1, 1, 1).cos()
        for number, block in enumerate(self.blocks):
            tokens = self.step(number, block, tokens, timesteps)
        return self.leave(tokens[:, -h * w :]).mT.reshape(b, c, h, w)

    def step(self, number: int, block: nn.Module, tokens: Tensor, timesteps: Tensor) -> Tensor:
        del number, timesteps
        return block(tokens)


class Part(nn.Module):
    """Attention and an MLP."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.attn_q, self.attn_k, self.attn_v = (ops.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = self.make_mlp(ops)

    def make_mlp(self, ops: Any) -> nn.Module:
        return ops.Linear(WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(self.attn_q(tokens), self.attn_k(tokens), self.attn_v(tokens))
        return tokens + nn.functional.gelu(self.mlp(tokens))


class BufferLinear(nn.Module):
    """A linear layer whose weight is a buffer, which ComfyUI's loader patches nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = WIDTH, WIDTH, None
        self.register_buffer("weight", torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x))


class Int8Linear(BufferLinear):
    """The same in 8 bits with a scale for each output."""

    def __init__(self) -> None:
        super().__init__()
        scale = self.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = (self.weight / scale).round().to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x) * self.scale.to(x))


class InBuffers(Rows):
    def make(self, ops: Any) -> nn.Module:
        return type("PartInBuffers", (Part,), {"make_mlp": lambda *_: BufferLinear()})(ops)


class InInt8(Rows):
    def make(self, ops: Any) -> nn.Module:
        return type("PartInInt8", (Part,), {"make_mlp": lambda *_: Int8Linear()})(ops)


class Tied(Rows):
    """Reads a layer's weight once more, turned, past its call."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return super().step(number, block, tokens, timesteps) + tokens @ self.blocks[0].mlp.weight.detach().to(tokens)


class TiedUnseen(Rows):
    """The same through a copy, of which nothing tells whose it is."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        weight = self.blocks[0].mlp.state_dict()["weight"]
        return super().step(number, block, tokens, timesteps) + tokens @ weight.to(tokens)


class DataResidual(Rows):
    """Lets no gradient along the residual of one of its blocks."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        found = super().step(number, block, tokens, timesteps)
        return tokens.data + (found - tokens) if number == 2 else found


class Fused(torch.autograd.Function):
    """Attention as a kernel without a backward pass would give it: zeros come back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (torch.zeros_like(gradients[0]),) * 3


class FusedPart(Part):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Fused.apply(q, k, v)


class PlainPart(Part):
    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v)


class WithoutBackward(Rows):
    def make(self, ops: Any) -> nn.Module:
        return FusedPart(ops)


class UnderNoGrad(Rows):
    def make(self, ops: Any) -> nn.Module:
        return PlainPart(ops)


def rounded(values: Tensor, step: Any) -> Tensor:
    """Round to steps, straight through: the gradient is that of no rounding."""
    return values + ((values / step).round() * step - values).detach()


class RoundedPart(Part):
    """Rounds what its MLP is given."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(self.attn_q(tokens), self.attn_k(tokens), self.attn_v(tokens))
        return tokens + nn.functional.gelu(self.mlp(rounded(tokens, 0.005)))


class Rounded(Rows):
    def make(self, ops: Any) -> nn.Module:
        return RoundedPart(ops)


class RoundedWeights(Rows):
    """Rounds the weights of its MLPs to 8 bits in each pass, also what a file adds to them."""

    def make(self, ops: Any) -> nn.Module:
        def forward(layer: Any, x: Tensor) -> Tensor:
            step = layer.weight.detach().abs().amax() / 127
            return nn.functional.linear(x, rounded(layer.weight, step), layer.bias)

        linear = type("RoundedLinear", (ops.Linear,), {"forward": forward})
        return type("PartOfRounded", (Part,), {"make_mlp": lambda *_: linear(WIDTH, WIDTH)})(ops)


class OwnCheckpoints(Rows):
    """Recomputes its blocks by torch's older way, to which tokens without a gradient give none."""

    def step(self, *given: Any) -> Tensor:
        return checkpoint(super().step, *given, use_reentrant=True)


def added(tokens: Tensor, found: Tensor) -> Tensor:
    return torch.add(tokens, torch.mul(found, 0.5), out=tokens)


class WritesOut(Rows):
    """Adds by a function that writes into what it was given, which no source of a class tells."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return added(super().step(number, block, tokens, timesteps), tokens)


class WritesOutPart(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        return added(tokens, super().forward(tokens + 0))


class WritesOutInBlocks(Rows):
    def make(self, ops: Any) -> nn.Module:
        return WritesOutPart(ops)


with torch.inference_mode():
    HELD = torch.ones(WIDTH) * 1.1


class OfInference(Rows):
    """Multiplies by a tensor that was made in inference mode, and that no part of it holds."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return super().step(number, block, tokens * HELD, timesteps)


class ThroughNumpy(Rows):
    """Computes a part outside of torch, which numpy refuses where gradients are on."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        found = super().step(number, block, tokens, timesteps)
        return found + torch.from_numpy(np.tanh(found.numpy())) if number == 2 else found


class Experts(Rows):
    """Half of its blocks draw the noisy levels, half the others."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        noisy = float(timesteps.max()) > 700
        return super().step(number, block, tokens, timesteps) if noisy == (number < 2) else tokens


class Odd(comfy.supported_models_base.BASE):
    """The configuration of such a model."""

    unet_config: ClassVar[dict[str, Any]] = {}
    unet_extra_config: ClassVar[dict[str, Any]] = {}
    latent_format = comfy.latent_formats.Flux
    sampling_settings: ClassVar[dict[str, Any]] = {"shift": 2.0}
    network: type[nn.Module]

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> comfy.model_base.BaseModel:
        def build(dtype: torch.dtype, operations: Any, **_: Any) -> nn.Module:
            made = self.network(operations).to(device, dtype)
            made.dtype = dtype
            return made

        return OddModel(self, comfy.model_base.ModelType.FLOW, device=device, unet_model=build)


class OddModel(comfy.model_base.BaseModel):
    """Passes a mask and weights of a caption's tokens on."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        out = super().extra_conds(**kwargs)
        for name, given in (("mask", "attention_mask"), ("weights", "weights")):
            if kwargs.get(given) is not None:
                out[name] = comfy.conds.CONDRegular(kwargs[given])
        return out


class OddWritten(Odd):
    network = Written


class OddConvolutions(Odd):
    network = Convolutions


class OddWeights(Odd):
    network = Weights
