"""OFT and BOFT: rotate the outputs of a layer in blocks (Qiu et al. 2023, Liu et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...common.axes import like
from ...common.devices import kind_of
from ...config import setting
from .form import ALPHA, Parts
from .layer import NetworkLayer
from .lokr import factorise
from .product import wide
from .shape import Matrix, weight_shape

if TYPE_CHECKING:
    from ...config import LoraConfig


def butterfly_size(outputs: int, limit: int) -> int:
    """Find BOFT's block size: the largest even number up to `limit` that divides `outputs` into 2^p blocks.

    Raises ValueError, with the smallest possible size, when there is none.
    """
    odd = outputs
    while odd % 2 == 0:
        odd //= 2
    size = 2 * odd  # the smallest; the others are its multiples by powers of two
    if outputs % 2 or size > limit:
        remedy = (
            (f"set {setting('lora.rank')} to {size} or more")
            if outputs % 2 == 0
            else (f"name it in {setting('lora.exclude')}")
        )
        raise ValueError(f"BOFT cannot split a layer of {outputs} outputs into blocks of up to {limit}; {remedy}.")
    while size * 2 <= min(limit, outputs):
        size *= 2
    return size


def skew(blocks: Tensor, constraint: float) -> Tensor:
    """Compute Q = X - X^T of blocks (…, b, b), at least float32, with a norm of at most `constraint` (0: no limit).

    As in LyCORIS and ComfyUI, the norm is that of all blocks of a layer, 1e-8 added.
    """
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    q = blocks - blocks.transpose(-1, -2)
    if constraint > 0:
        q = q * (constraint / (torch.linalg.vector_norm(q) + 1e-8)).clamp(max=1)
    return q


def turn(q: Tensor) -> Tensor:
    """Compute R - I for the rotation R = (I + Q)(I - Q)^-1 (Cayley) of skew-symmetric Q (…, b, b).

    R - I = 2 Q (I - Q)^-1 has no cancellation: small rotations keep their digits in a small dtype, and Q = 0 gives
    exactly 0. The factors commute. I - Q is always invertible, and a check would wait for the GPU, so there is none.
    """
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    if kind_of(q.device).linalg:
        return torch.linalg.solve_ex(eye - q, 2 * q).result
    return cast(Tensor, Solved.apply(eye - q, 2 * q))


class Solved(torch.autograd.Function):
    """A^-1 B (…, b, b), with a backward pass that solves again, where torch cannot use its factors of A twice."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        solved = torch.linalg.solve_ex(a, b).result
        ctx.save_for_backward(a, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, solved = ctx.saved_tensors
        of_b = torch.linalg.solve_ex(a.mT, grads[0]).result
        return -of_b @ solved.mT, of_b


def turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Compute the rotation's change of rows (n, out): rotated minus original.

    turns: R - I of OFT's blocks (blocks, size, size), applied as R^T, or of BOFT's stages (stages, blocks, size, size),
    applied as B_m … B_1; stage i pairs each element with the one 2^i size / 2 places further.
    """
    count, size, _ = turns.shape[-3:]
    if turns.ndim == 3:
        blocks = rows.view(-1, count, size).transpose(0, 1)
        return torch.bmm(blocks, turns).transpose(0, 1).reshape(rows.shape)
    result = rows
    for stage, blocks_of_stage in enumerate(turns):
        reach = 2**stage * size // 2
        groups = rows.shape[1] // (2 * reach)  # counted, as there may be no rows
        pairs = result.view(len(rows), groups, 2, reach).transpose(2, 3)
        blocks = pairs.reshape(len(rows), count, size).transpose(0, 1)
        change = torch.bmm(blocks, blocks_of_stage.transpose(1, 2)).transpose(0, 1)
        result = result + change.reshape(len(rows), groups, reach, 2).transpose(2, 3).reshape(rows.shape)
    return result - rows


def turned_weight(weight: Tensor, turns: Tensor) -> Tensor:
    """Compute the change of a weight (out, in, *kernel) whose outputs are rotated."""
    columns = weight.flatten(1).t().contiguous()
    return turned(columns, turns).t().reshape(weight.shape)


class OftLayer(NetworkLayer):
    """A layer that rotates blocks of outputs by orthogonal matrices: W' = R^T W, the bias is unchanged; R starts at I.

    oft_blocks X: (blocks, size, size), size being the smaller factor of `factorise(outputs, rank)`. constraint: limit
    of ||Q|| = ||X - X^T|| per output, 0 = none. In files alpha is the limit of the whole layer.
    """

    takes = ("rank", "constraint")
    endings: ClassVar = {part: (part,) for part in ("oft_blocks", "rescale")}
    forms: ClassVar = {frozenset({"oft_blocks"}): "OFT", frozenset(endings): "OFT"}
    of_weight = True
    decomposes = False
    scaled = False
    staged: ClassVar[bool] = False
    power: ClassVar[str] = "with the square of the strength"  # with which ComfyUI applies it

    def __init__(self, base: Matrix, rank: int, *, constraint: float = 0.0) -> None:
        super().__init__()
        self.outputs, _, *kernel = weight_shape(base)
        self.channels = bool(kernel)  # a convolution's outputs are its second axis, those of linear layers the last
        self.constraint = constraint * self.outputs
        self.oft_blocks = nn.Parameter(torch.zeros(self._blocks_shape(rank)))

    @classmethod
    def remarks(cls, config: LoraConfig) -> list[str]:
        """Tell what strengths other than 1 do."""
        said = (
            f"At strengths other than 1, ComfyUI applies {config.algorithm.upper()} {cls.power}. Set "
            f"{setting('lora.bake')} to save a plain LoRA, whose strength acts as usual."
        )
        return [] if config.bake else [said]

    def _blocks_shape(self, rank: int) -> tuple[int, ...]:
        size, count = factorise(self.outputs, rank)
        return count, size, size

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load the blocks of a file, whose alpha limits their norm; 0 = no limit."""
        if set(parts) != {"oft_blocks"}:
            super().load(parts, alpha)
        self.oft_blocks = nn.Parameter(skew(parts["oft_blocks"].detach().float(), alpha).triu())

    def _turns(self) -> Tensor:
        return turn(skew(self.oft_blocks, self.constraint))

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """The frozen layer's bias, (out,)."""
        assert self.frozen is not None, "the network is not attached"
        bias = cast(Tensor | None, self.frozen.bias)
        return None if bias is None else bias.detach().to(dtype)

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute R^T (base_output - b) + b."""
        turns = self._turns()
        shift = None
        if (bias := self._bias(turns.dtype)) is not None:  # the bias is not rotated: subtract (R^T - I) b
            shift = turned(bias[None], turns).flatten().to(x.dtype)
        turns = turns.to(x.dtype)
        if not self.channels:
            rows = base_output.reshape(-1, self.outputs)
            change = turned(rows, turns) if shift is None else turned(rows, turns).sub_(shift)
            return (rows + change).view(base_output.shape)
        output = self._turn_channels(base_output, turns)
        return output if shift is None else output.sub_(like(shift[None], output))

    def _turn_channels(self, output: Tensor, turns: Tensor) -> Tensor:
        """Apply R^T to a convolution's output (batch, out, *axes)."""
        count, size, _ = turns.shape
        blocks = output.reshape(len(output) * count, size, -1)
        rotations = turns.transpose(1, 2).repeat(len(output), 1, 1)
        return torch.baddbmm(blocks, rotations, blocks).view(output.shape)

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Compute the rotated weight, at least float32."""
        weight = wide(weight)
        return weight + turned_weight(weight, self._turns().detach().to(weight.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Collect the blocks by LyCORIS' suffix, constrained; no alpha, which ComfyUI reads as another constraint."""
        return {"oft_blocks": skew(self.oft_blocks.detach(), self.constraint).triu()}

    @classmethod
    def holds(cls, parts: Parts) -> bool:
        """Tell both kinds from each other by the axes of the blocks."""
        return "oft_blocks" in parts and (parts["oft_blocks"].ndim != 3) == cls.staged

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """The size of a block."""
        return parts["oft_blocks"].shape[-1]

    @classmethod
    def change_of(cls, weight: Tensor, parts: Parts, alpha: float, strength: float) -> Tensor:
        """Compute the change of a weight; as in ComfyUI, strength scales each rotation's change and the weight's."""
        return strength * turned_weight(weight, strength * turn(skew(parts["oft_blocks"], alpha)))

    @classmethod
    def fits(cls, parts: Parts, weight: torch.Size) -> bool:
        """Tell whether the blocks cover the outputs of a weight."""
        *_, count, size, side = parts["oft_blocks"].shape
        rescale = parts["rescale"].numel() if "rescale" in parts else weight[0]
        return size == side and count * size == rescale == weight[0]


class BoftLayer(OftLayer):
    """A layer that rotates in stages of a butterfly, which mixes all outputs: W' = B_m … B_1 W.

    oft_blocks: (stages, blocks, size, size) with 2^p blocks of `butterfly_size(outputs, rank)` and p + 1 stages.
    """

    staged = True
    power = "more than in proportion"

    def _blocks_shape(self, rank: int) -> tuple[int, ...]:
        size = butterfly_size(self.outputs, rank)
        count = self.outputs // size
        return count.bit_length(), count, size, size

    def _turn_channels(self, output: Tensor, turns: Tensor) -> Tensor:
        """Apply B_m … B_1 to a convolution's output (batch, out, *axes)."""
        rows = output.movedim(1, -1).reshape(-1, self.outputs)
        change = turned(rows, turns).view(len(output), *output.shape[2:], -1)
        return output + change.movedim(-1, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Collect the blocks by LyCORIS' suffix, and alpha 0, without which ComfyUI does not change such layers."""
        return {**super().tensors(), ALPHA: torch.tensor(0.0)}

    @classmethod
    def change_of(cls, weight: Tensor, parts: Parts, alpha: float, strength: float) -> Tensor:
        """Compute the change of a weight; in ComfyUI, `rescale` acts on BOFT only."""
        change = turned_weight(weight, strength * turn(skew(parts["oft_blocks"], alpha)))
        if "rescale" in parts:
            change = (weight + change) * parts["rescale"].view(-1, *(1,) * (weight.ndim - 1)) - weight
        return strength * change
