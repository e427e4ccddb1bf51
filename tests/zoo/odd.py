"""Models as custom nodes may bring them: in no list, and written in ways that ComfyUI's own are not."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import zoo.comfy_here  # noqa: F401  # isort: skip
import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.supported_models_base
from torch.nn.utils import parametrizations

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
