"""LoRA on linear and convolution layers, computed on the activations (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...common.axes import convolve
from ...common.devices import for_linalg
from ...common.exact import exact
from ...common.rng import generator
from .dora import frozen_weight
from .form import LowRank, Parts, scale_of, with_core
from .layer import NetworkLayer, pair_norm
from .product import ProductLayer, wide
from .shape import Matrix
from .svd import largest_singular

Init = Literal["default", "orthogonal", "pissa", "svd_down", "eva", "lora_ga"]
DIFFERENCES = ("orthogonal", "pissa", "lora_ga")  # of init: train the difference from where they begin
GA_GAMMA = 16.0  # of LoRA-GA's "stable" scale
LEAST_SCALE = 0.01  # of a channel that is always 0


class LoraLayer(ProductLayer):
    """delta(x) = scale * up(down(x)) beside one frozen layer; `up` starts at zero, so delta starts at zero.

    down: (rank, in, *kernel) and up: (out, rank, *ones), float32 parameters. alpha is a plain number.
    tucker: kernels larger than 1 get down (rank, in, *ones), mid (rank, rank, *kernel) and up (LyCORIS' LoCon).
    use_scalar: a trained number, initially zero, multiplies the delta, and `up` is initialised like `down`.

    init: "pissa" (Meng et al. 2024) and "orthogonal" (OLoRA, Büyükakyüz 2024) start from factors down_0, up_0 of W
    itself and train scale * (up down - up_0 down_0). The base model is unchanged: parameters are the differences u, d
    from up_0 and down_0, and the delta is scale * (u (down_0 + d) + up_0 d), a LoRA of twice the rank on the original
    model. It starts at exactly zero, never subtracts two large products, and weight decay pulls towards the base model.
    "lora_ga" (Wang et al. 2024) is such a difference from factors of the first gradients. "svd_down" and "eva"
    (Paischer et al. 2024) are plain LoRAs whose down begins along W's main directions, or along the inputs'. What is
    measured on the first batches comes later, by `begin_along`, `begin_at` and `scale_channels`; until then they are
    as default.

    channel_scaling: down is trained times a scale of each input channel, and divided by it wherever it is used.
    """

    takes = (*ProductLayer.takes, "tucker", "init", "channel_scaling")
    endings: ClassVar = {  # of kohya and LyCORIS; of peft, with or without its adapter's name; of diffusers
        "down": (
            "lora_down.weight",
            r"lora_A(?:\.\w+)?\.weight|lora_A|lora\.down\.weight|lora_linear_layer\.down\.weight",
        ),
        "mid": ("lora_mid.weight",),
        "up": (
            "lora_up.weight",
            r"lora_B(?:\.\w+)?\.weight|lora_B|lora\.up\.weight|lora_linear_layer\.up\.weight",
        ),
    }
    forms: ClassVar = {frozenset({"down", "up"}): "LoRA", frozenset({"down", "up", "mid"}): "Tucker LoRA"}
    multiplied = ("up",)
    exact_rank = True
    plus = ("up",)
    down: nn.Parameter
    mid: nn.Parameter | None
    up: nn.Parameter
    down_0: Tensor | None
    up_0: Tensor | None
    scales: Tensor | None  # (in,), of the input channels

    def __init__(
        self,
        base: Matrix,
        rank: int,
        alpha: float,
        *,
        name: str,
        seed: int,
        tucker: bool = False,
        use_scalar: bool = False,
        init: Init = "default",
        channel_scaling: bool = False,
    ) -> None:
        super().__init__(base, rank, alpha, name=name, seed=seed, use_scalar=use_scalar)
        outputs, inputs, *kernel = self.shape
        ones = (1,) * len(kernel)
        core = tucker and math.prod(kernel) > 1
        draws = generator(seed, f"init/{name}")  # of all parts, one after the other
        self.init_uniform("down", rank, inputs, *(ones if core else kernel), draws=draws)
        if core:
            self.init_uniform("mid", rank, rank, *kernel, draws=draws)
        if use_scalar:
            self.init_uniform("up", outputs, rank, *ones, draws=draws)
        else:
            self.init_zero("up", outputs, rank, *ones)
        self.register_buffer("down_0", None)
        self.register_buffer("up_0", None)
        self.register_buffer("scales", torch.ones(inputs) if channel_scaling else None)
        if init == "svd_down":
            weight = for_linalg(frozen_weight(base, torch.float32).flatten(1))
            if not weight.is_meta:  # no dry run
                # Rows as long as the random ones are on average.
                self.begin_along(largest_singular(weight, rank, draws)[2] / math.sqrt(3))
        if init in DIFFERENCES:
            down_0, up_0 = _principal(base, self.down.detach(), self.scale, init, draws)
            self.register_buffer("down_0", down_0)
            self.register_buffer("up_0", up_0.view(self.up.shape))
            self.down = nn.Parameter(torch.zeros_like(down_0))

    def forward(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + delta(x); base_output is the frozen layer's own output and may be overwritten."""
        down, up = (factor.to(x.dtype) for factor in self._factors())
        if self.geometry:
            if self.mid is None:
                hidden = convolve(x, down, **self.geometry)
            else:
                hidden = convolve(convolve(x, down), self.mid.to(x.dtype), **self.geometry)
            axes = hidden.shape[2:]
            if (mask := self._mask(x, axes.numel())) is not None:
                hidden = hidden * mask.unflatten(2, axes if mask.shape[2] > 1 else (1,) * len(axes))
            # In place: the frozen output is nobody else's, and a copy would be one more activation.
            return base_output.add_(convolve(hidden, up), alpha=self.scale)
        # The rank is the row count of every thin matrix, here and in the backward pass: BLAS is several times faster on
        # few rows than on few columns. Not in place: nn.Linear returns a view, and autograd copies the whole gradient
        # for a write into a view.
        hidden = down @ x.reshape(-1, x.shape[-1]).t()  # (rank, tokens)
        if (mask := self._mask(x, hidden.shape[1] // max(1, len(x)))) is not None:
            hidden = (hidden.view(len(down), len(x), -1) * mask.transpose(0, 1)).flatten(1)
        flat = base_output.reshape(-1, base_output.shape[-1])
        return torch.addmm(flat, hidden.t(), up.t().contiguous(), alpha=self.scale).view(base_output.shape)

    def thin(self, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """Give the factors of a linear layer without dropout."""
        if self.geometry or self.dropouts:
            return None
        down, up = (factor.to(x.dtype) for factor in self._factors())
        return down, up, self.scale

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Compute the effective down (R, in, *kernel) and up (out, R, *ones); R is the rank, or twice that."""
        down, up = self.down, self.with_scalar(self.up)
        if self.scales is not None:
            down = down / self._per_channel(self.scales)
        if self.down_0 is None or self.up_0 is None:
            return down, up
        # u (down_0 + d) + up_0 d, as one product of thin matrices.
        return torch.cat([self.down_0 + down, down]), torch.cat([up, self.up_0], 1)

    @torch.no_grad()
    def begin_along(self, rows: Tensor) -> None:
        """Set the first rows of a plain down, (n, in * k); the others stay random."""
        self.down.flatten(1)[: len(rows)].copy_(rows)

    @torch.no_grad()
    def begin_at(self, left: Tensor, right: Tensor) -> None:
        """Set up_0 and down_0 of "lora_ga" by the singular vectors of W's gradient, (out, n) and (n, in * k).

        Down gets the first right ones, up the left ones behind the first `rank`, so that together they see twice the
        rank of the gradient, both times out^(1/4) / sqrt(GA_GAMMA).
        """
        assert self.down_0 is not None and self.up_0 is not None
        stable = len(left) ** 0.25 / math.sqrt(GA_GAMMA)
        right, left = right[: self.rank], left[:, self.rank : 2 * self.rank]
        self.down_0.flatten(1)[: len(right)].copy_(stable * right)
        self.up_0.flatten(1)[:, : left.shape[1]].copy_(stable * left)

    @torch.no_grad()
    def scale_channels(self, sizes: Tensor) -> None:
        """Set the scales to the roots of the input channels' mean sizes, (in,), 1 on average; change no output."""
        assert self.scales is not None
        roots = sizes.sqrt()
        scales = (roots / roots.mean()).clamp(min=LEAST_SCALE) if roots.any() else torch.ones_like(roots)
        self.down.mul_(self._per_channel(scales.to(self.down) / self.scales))
        self.scales.copy_(scales)

    def _per_channel(self, scales: Tensor) -> Tensor:
        return scales.view(1, -1, *(1,) * (self.down.dim() - 2))

    def _mask(self, x: Tensor, positions: int) -> Tensor | None:
        """Draw the dropout mask of `hidden`, (B, R, positions or 1); None: no dropout."""
        mask = self.dropouts.hidden_mask(x, self.rank, positions) if self.dropouts else None
        return mask if mask is None or self.down_0 is None else torch.cat([mask, mask], 1)

    @torch.no_grad()
    def low_rank(self) -> tuple[Tensor, Tensor]:
        """Compute scale * up (out, R) and down (R, in * k), at least float32; with Tucker's core in down."""
        down, up = self._factors()
        down, up = _sides(wide(down), wide(up), None if self.mid is None else wide(self.mid))
        return self.scale * up, down

    def delta_weight(self) -> Tensor:
        """Compute scale * up @ down in the base weight's shape, at least float32."""
        up, down = self.low_rank()
        return (up @ down).view(self.shape)

    def factors(self) -> tuple[nn.Parameter, ...]:
        """down, up and Tucker's core; () with init, where the delta is a difference."""
        return () if self.down_0 is not None else super().factors()

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load `down`, `up` and Tucker's `mid` of a file; those of a 1x1 convolution may be matrices."""
        known = set(self.endings) if self.geometry else {"down", "up"}
        if self.down_0 is not None or not {"down", "up"} <= set(parts) <= known:
            NetworkLayer.load(self, parts, alpha)  # raises
        kernel, ones = self.shape[2:], (1,) * (len(self.shape) - 2)
        kernels = {"down": ones if "mid" in parts else kernel, "mid": kernel, "up": ones}
        super().load({part: tensor.reshape(*tensor.shape[:2], *kernels[part]) for part, tensor in parts.items()}, alpha)

    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors by kohya's endings; those of an `init` have twice the rank."""
        down, up = self._factors()
        parts = {"down": down, "up": up} | ({} if self.mid is None else {"mid": self.mid})
        # Readers divide alpha by the file's rank, which an init has doubled.
        return self.as_file(parts, self.alpha * (len(down) / self.rank))

    @classmethod
    def settings_of(cls, parts: Collection[str]) -> dict[str, Any]:
        """Tucker's core tells the form."""
        return {"tucker": "mid" in parts}

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """The rows of down."""
        return len(parts["down"])

    @classmethod
    def inputs_of(cls, parts: Parts) -> int:
        """The columns of down."""
        return parts["down"].shape[1:].numel()

    @classmethod
    def product_of(cls, parts: Parts, alpha: float) -> LowRank:
        """Up and down, with Tucker's core in down."""
        down, up = _sides(parts["down"], parts["up"], parts.get("mid"))
        kernel = parts["mid" if "mid" in parts else "down"].shape[2:]
        return LowRank(up, down, scale_of(alpha, cls.rank_of(parts)), kernel)

    @classmethod
    def delta_of(cls, parts: Parts, alpha: float) -> Tensor:
        """Compute scale * up @ down, (out, in * k)."""
        up, down, scale, _ = cls.product_of(parts, alpha)
        return scale * (up @ down)

    @classmethod
    def norm_of(cls, parts: Parts, alpha: float) -> float:
        """Compute the norm from rank x rank products, in float64."""
        up, down, scale, _ = cls.product_of({part: exact(tensor) for part, tensor in parts.items()}, alpha)
        return scale * float(pair_norm(up, down))

    @classmethod
    def comfy_form(cls, parts: Parts, alpha: float) -> tuple[dict[str, Tensor], float]:
        """Multiply a core into down, but one of two axes, which alone ComfyUI reads."""
        found = dict(parts)
        if "mid" in found and found["mid"].ndim != 4:
            found["down"] = with_core(wide(found.pop("mid")), wide(found["down"]).flatten(1))
        return found, alpha


def _sides(down: Tensor, up: Tensor, mid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write a LoRA as down (rank, in * k) and up (out, rank), with Tucker's core in down."""
    return (down if mid is None else with_core(mid, down.flatten(1))).flatten(1), up.flatten(1)


def _principal(
    base: nn.Module, down: Tensor, scale: float, init: Init, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute down_0, shaped like `down`, and up_0 (out, rank) of a frozen weight W.

    pissa: scale * up_0 down_0 is the leading part of its singular value decomposition. orthogonal: up_0 and down_0 are
    the first columns of Q and rows of R of its QR decomposition. Ranks beyond W's keep `down` in down_0, and 0 in up_0;
    all of "lora_ga" do, until there is a gradient.
    """
    weight = for_linalg(frozen_weight(base, torch.float32).flatten(1))
    down_0, up_0 = down.to(weight.device).flatten(1).clone(), weight.new_zeros(len(weight), len(down))
    if weight.is_meta or init == "lora_ga":  # a dry run
        return down_0.view(down.shape), up_0
    if init == "pissa":
        u, sigma, vt = largest_singular(weight, len(down), draws)
        root = (sigma / scale).sqrt()
        up, right = u * root, root[:, None] * vt
    else:
        up = torch.linalg.qr(weight[:, : len(down)]).Q
        right = up.t() @ weight
    down_0[: len(right)], up_0[:, : len(right)] = right, up
    return down_0.view(down.shape), up_0
