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


class GeneratedWeights(Rows):
    """Makes a weight of its blocks anew for each level of noise, as hypernetworks do."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.generate = ops.Linear(1, WIDTH * WIDTH)

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        weight = self.generate((timesteps.to(tokens).view(-1, 1) / 1000).cos()).view(-1, WIDTH, WIDTH) / WIDTH
        return super().step(number, block, tokens, timesteps) + tokens @ weight


class Normed(Rows):
    """Makes weights of directions and lengths, through a parametrization and through a hook."""

    def make(self, ops: Any) -> nn.Module:
        part = Part(ops)
        part.mlp = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        part.attn_v = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        return part


class Adapted(nn.Module):
    """A linear layer with a LoRA of another program inside, under its names."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.base_layer = ops.Linear(WIDTH, WIDTH)
        self.lora_A = nn.ModuleDict({"default": ops.Linear(WIDTH, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": ops.Linear(4, WIDTH, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) / 2


class TopTwo(nn.Module):
    """Sends each token to two of its layers."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.gate = ops.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([ops.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        shares, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * shares[rows, slot, None])
        return out.view_as(x)


class Packed(nn.Linear):
    """Weights of 4 bits, two in a byte, in the place of a linear layer's own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        codes = torch.randint(256, (WIDTH, WIDTH // 2), generator=torch.Generator().manual_seed(2))
        self.weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1).float() - 8
        return nn.functional.linear(x, weight.to(x) / 50, self.bias)


class Complex(nn.Linear):
    """A complex weight, of whose product the real part is taken."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        draws = torch.Generator().manual_seed(1)
        self.parts = [torch.randn(WIDTH, WIDTH, generator=draws) / WIDTH**0.5 for _ in range(2)]

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Stay complex in any dtype."""
        self.weight = nn.Parameter(torch.complex(*self.parts), requires_grad=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(torch.complex64), self.weight).real.to(x)


class Merging(nn.Linear):
    """Adds a product of thin matrices of its own to its weight, in each pass."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.zeros(4, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.up @ self.down, self.bias)


class Gained(nn.Linear):
    """Multiplies its weight by what the level of noise sets."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.gain, self.bias)


def with_mlp(name: str, make_mlp: Any) -> type[Rows]:
    """Rows whose blocks have other MLPs. make_mlp: of ComfyUI's operations."""
    part = type(f"PartOf{name}", (Part,), {"make_mlp": lambda self, ops: make_mlp(ops)})
    return type(name, (Rows,), {"make": lambda self, ops: part(ops)})


WithAdapters = with_mlp("WithAdapters", Adapted)
Sparse = with_mlp("Sparse", TopTwo)
InFourBits = with_mlp("InFourBits", lambda ops: Packed())
InComplex = with_mlp("InComplex", lambda ops: Complex())
MergesItsOwn = with_mlp("MergesItsOwn", lambda ops: Merging())


class GainedByLevel(with_mlp("OfGained", lambda ops: Gained(WIDTH, WIDTH))):
    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        block.mlp.gain = 0.5 + float(timesteps.max()) / 1000
        return super().step(number, block, tokens, timesteps)


class InBetween(Rows):
    """One of its blocks draws some levels in the middle, where no other acts."""

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        acts = number != 2 or 450 < float(timesteps.max()) < 700
        return super().step(number, block, tokens, timesteps) if acts else tokens


class IntoCaptions(Rows):
    """Writes into the captions that it is given."""

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **more: Any) -> Tensor:
        return super().forward(x, timesteps, context.mul_(0.8), **more)


class NoKeys(Rows):
    """Attends with nothing of its keys: their gradient is zero, and no operator has lost it."""

    def make(self, ops: Any) -> nn.Module:
        return type("PartWithoutKeys", (Part,), {"attend": lambda self, q, k, v: Part.attend(self, q, k * 0, v)})(ops)


class Compiled(Rows):
    """Has its attention compiled."""

    def make(self, ops: Any) -> nn.Module:
        attend = torch.compile(lambda q, k, v: (q @ k.mT / WIDTH**0.5).softmax(-1) @ v, backend="eager")
        return type("PartCompiled", (Part,), {"attend": lambda self, *qkv: attend(*qkv)})(ops)


class Recomputed(Rows):
    """Recomputes its blocks by torch's newer way."""

    def step(self, *given: Any) -> Tensor:
        return checkpoint(super().step, *given, use_reentrant=False)


class Cached(Rows):
    """Skips its blocks where the level has hardly changed, by what it keeps outside of it."""

    kept: ClassVar[dict[str, Any]] = {}

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **more: Any) -> Tensor:
        level = float(timesteps.max()) / 1000
        if self.kept.get("shape") != x.shape or abs(level - self.kept["level"]) > 0.1:
            self.kept.update(
                level=level, shape=x.shape, made=(super().forward(x, timesteps, context, **more) - x).detach()
            )
        return x + self.kept["made"]


class Counting(Rows):
    """Skips a block in every second pass, by a count outside of it."""

    passes: ClassVar[list[int]] = [0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.passes[0] += 1
        return super().forward(*args, **kwargs)

    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return tokens if number == 2 and self.passes[0] % 2 else super().step(number, block, tokens, timesteps)


class Scripted(Rows):
    """Has its MLPs compiled by torch.jit."""

    def make(self, ops: Any) -> nn.Module:
        part = Part(ops)
        part.mlp = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))
        return part


class Whole(Rows):
    """Runs under no_grad altogether."""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class GuidesItself(Rows):
    """Is guided by a second pass of its own, which has no gradient."""

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, **more: Any) -> Tensor:
        found = super().forward(x, timesteps, context, **more)
        with torch.no_grad():
            blank = super().forward(x, timesteps, context * 0, **more)
        return blank + 3 * (found - blank)


class HalfNorm(torch.autograd.Function):
    """A norm whose backward pass forgets that the norm depends on all values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nn.functional.rms_norm(x, (WIDTH,))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].square().mean(-1, keepdim=True).rsqrt()


class WrongBackward(Rows):
    def step(self, number: int, block: Any, tokens: Tensor, timesteps: Tensor) -> Tensor:
        return super().step(number, block, HalfNorm.apply(tokens), timesteps)


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
