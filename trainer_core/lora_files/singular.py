"""The singular values and vectors of a layer's delta, by way of its small factors where it has any."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..networks.layers.form import Kronecker
from .formats import BIAS, PLAIN, FileLayer, delta_weight, fits, merged_weight
from .room import DECOMPOSED, numbers_of, room_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Singular:
    """A thin singular value decomposition, float64, of a delta (out, in, *kernel) with the last axes flat."""

    u: Tensor  # (out, n)
    sigma: Tensor  # (n,), descending
    vt: Tensor  # (n, in * k)
    kernel: tuple[int, ...]  # () or (k, k)

    @property
    def norm(self) -> float:
        """The Frobenius norm of the delta."""
        return float(self.sigma.norm())


def decompose(layer: FileLayer, weight: Tensor | None = None) -> Singular:
    """Decompose the delta of a layer at strength 1, by its small factors where that is less work than by the matrix.

    weight: the frozen one, for layers `of_weight`. Raises ValueError for such a layer without it.
    """
    if layer.of_weight:
        if weight is None:
            raise ValueError(
                f"{layer.source} is a layer of {layer.kind}, whose effect depends on the model; link the MODEL, "
                "or in a shell name its file by --model."
            )
        parts = {part: tensor for part, tensor in layer.tensors.items() if part != BIAS}
        if not fits(replace(layer, tensors=parts), weight.shape, None):  # before anything of another size is made
            raise ValueError(f"{layer.source} has another shape in the model; choose a LoRA for this model.")
        with room_for(layer.source, DECOMPOSED * weight.numel()):
            frozen = weight.float()
            return of_delta((merged_weight(frozen, layer, 1.0) - frozen).double())
    with room_for(layer.source, 0 if layer.form.exact_rank else DECOMPOSED * (numbers_of(layer) or 0)):
        return _of_parts(layer)


def _of_parts(layer: FileLayer) -> Singular:
    """Decompose the delta of a layer that depends on no weight."""
    product = layer.form.product_of({part: tensor.double() for part, tensor in layer.tensors.items()}, layer.alpha)
    if product is None:
        return of_delta(delta_weight(layer).double())
    if isinstance(product, Kronecker):
        return of_kronecker(product.scale * product.left, product.right)
    return of_factors(product.scale * product.up, product.down, product.kernel)


def of_kronecker(left: Tensor, right: Tensor) -> Singular:
    """Decompose the Kronecker product of two matrices, float64: the products of their singular values and vectors.

    right: (p, q, *kernel).
    """
    one, two = of_delta(left), of_delta(right)
    sigma, order = torch.kron(one.sigma, two.sigma).sort(descending=True, stable=True)
    u, vt = torch.kron(one.u, two.u)[:, order], torch.kron(one.vt, two.vt)[order]
    return Singular(u=u, sigma=sigma, vt=vt, kernel=two.kernel)


def of_factors(up: Tensor, down: Tensor, kernel: tuple[int, ...] = ()) -> Singular:
    """Decompose up @ down: (out, r) and (r, in), both float64."""
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.t())
    u, sigma, vt = torch.linalg.svd(r_up @ r_down.t(), full_matrices=False)
    return Singular(u=q_up @ u, sigma=sigma, vt=vt @ q_down.t(), kernel=tuple(kernel))


def of_delta(delta: Tensor) -> Singular:
    """Decompose a whole delta (out, in, *kernel), float64."""
    u, sigma, vt = torch.linalg.svd(delta.flatten(1), full_matrices=False)
    return Singular(u=u, sigma=sigma, vt=vt, kernel=tuple(delta.shape[2:]))


def low_rank(
    found: Singular, rank: int, *, source: str, alpha: float = 0.0, dtype: torch.dtype = torch.float32
) -> FileLayer:
    """Build the LoRA layer nearest to a delta at a rank: both factors share the singular values evenly.

    Eckart-Young: the truncated SVD is the nearest matrix. Even shares keep both far from the limits of float16.
    alpha: of the result; 0: the rank, so that its scale is 1.
    """
    rank = min(rank, found.sigma.numel())
    root = (found.sigma[:rank] / (alpha / rank if alpha else 1.0)).sqrt()
    down, ones = root[:, None] * found.vt[:rank], (1,) * len(found.kernel)
    inputs = found.vt.shape[1] // max(1, torch.Size(found.kernel).numel())
    tensors = {
        "down": down.reshape(rank, inputs, *found.kernel).to(dtype).contiguous(),
        "up": (found.u[:, :rank] * root).reshape(len(found.u), rank, *ones).to(dtype).contiguous(),
    }
    return FileLayer(source=source, kind=PLAIN, tensors=tensors, alpha=alpha or float(rank))
