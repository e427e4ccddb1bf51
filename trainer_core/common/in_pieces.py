"""Products and decompositions of large matrices in pieces of a second at most, so that a Cancel ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .cancel import look

AT_ONCE = 2e10  # multiplications and additions that one call may make: a second of one core
PANEL = 64  # columns that are reflected before the rest of a matrix follows
aten = torch.ops.aten


class InPieces(TorchDispatchMode):
    """Look for a Cancel before each operation of torch in a `with` block, and do the long ones in pieces.

    Where one call is short nothing changes, to the bit.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, or the pieces of it."""
        look()
        found = _LONG.get(func)
        if found and not kwargs and args[0].device.type == "cpu":
            size, pieces = found
            if size(*args) > AT_ONCE:
                return pieces(*args)
        with torch._C.DisableTorchFunctionSubclass():  # else results get the classes of what was given
            return func(*args, **(kwargs or {}))


def _chunks(matrix: Tensor, work: float, axis: int = 0) -> Iterator[Tensor]:
    """Cut a matrix along an axis so that each piece is its share of the work; look for a Cancel before each."""
    length = matrix.shape[axis]
    for piece in matrix.split(max(1, int(length * AT_ONCE / max(work, 1.0))), axis):
        look()
        yield piece


def multiplied(one: Tensor, two: Tensor) -> Tensor:
    """Multiply two matrices, some rows at a time."""
    product = one.new_empty(len(one), two.shape[1])
    done = 0
    for rows in _chunks(one, _of_product(one, two)):
        torch.mm(rows, two, out=product[done : done + len(rows)])
        done += len(rows)
    return product


def _add_product(to: Tensor, one: Tensor, two: Tensor, factor: float) -> None:
    """Add factor * one @ two to a matrix in its place."""
    done = 0
    for rows in _chunks(one, _of_product(one, two)):
        to[done : done + len(rows)].addmm_(rows, two, alpha=factor)
        done += len(rows)


def triangular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a matrix into columns at right angles and a triangle, as LAPACK's geqrf does: panel by panel."""
    rest, panels = matrix.clone(), []
    rows, columns = rest.shape
    size = min(rows, columns)
    for at in range(0, size, 4 * PANEL):
        look()
        panel, tau = torch.geqrf(rest[at:, at : min(at + 4 * PANEL, size)])
        rest[at:, at : at + panel.shape[1]] = panel
        _reflect(panel, tau, rest[at:, at + panel.shape[1] :], transpose=True)
        panels.append((at, panel, tau))
    basis = torch.eye(rows, size, dtype=rest.dtype)
    for at, panel, tau in reversed(panels):
        _reflect(panel, tau, basis[at:, at:], transpose=False)
    return basis, rest[:size].triu()


def _reflect(panel: Tensor, tau: Tensor, other: Tensor, *, transpose: bool) -> None:
    """Multiply a matrix, in its place, by a panel's reflections."""
    for columns in _chunks(other, 4.0 * panel.numel() * other.shape[1], 1):
        columns.copy_(torch.ormqr(panel, tau, columns, transpose=transpose))


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve a system of equations by a decomposition at right angles."""
    basis, rest = triangular(matrix)
    found = multiplied(basis.t(), right)
    for columns in _chunks(found, float(len(rest)) ** 2 * found.shape[1], 1):
        columns.copy_(torch.linalg.solve_triangular(rest, columns, upper=True))
    return found


def eigen(matrix: Tensor, *, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """Find the eigenvalues, ascending, and eigenvectors of a symmetric matrix, float64.

    Householder's reflections make it tridiagonal, a panel at a time (Golub & Van Loan 2013, section 8.3): of each
    column one product with the whole matrix is needed, and the matrix follows after a panel.
    """
    from scipy.linalg import eigh_tridiagonal, eigvalsh_tridiagonal

    rest, size, panels = matrix.clone(), len(matrix), []
    diagonal, beside = torch.zeros(size, dtype=rest.dtype), torch.zeros(max(0, size - 1), dtype=rest.dtype)
    for at in range(0, size - 1, PANEL):
        width = min(PANEL, size - 1 - at)
        v, w = (torch.zeros(size - at, width, dtype=rest.dtype) for _ in range(2))  # of rows `at` and below
        scales = torch.ones(width, dtype=rest.dtype)
        part = rest[at:, at:]
        for j in range(width):
            look()
            column = part[j:, j] - v[j:, :j] @ w[j, :j] - w[j:, :j] @ v[j, :j]
            diagonal[at + j] = column[0]
            reflected, below = v[j + 1 :, j], column[1:]
            norm = torch.linalg.vector_norm(below)
            beside[at + j] = length = -norm if below[0] >= 0 else norm
            if not norm:
                continue
            reflected.copy_(below)
            reflected[0] -= length
            scale = -reflected[0] / length
            reflected /= reflected[0].clone()
            scales[j] = scale
            after = part[j + 1 :, j + 1 :] @ reflected
            before_v, before_w = v[j + 1 :, :j], w[j + 1 :, :j]
            after -= before_v @ (before_w.t() @ reflected) + before_w @ (before_v.t() @ reflected)
            after *= scale
            w[j + 1 :, j] = after - (0.5 * scale * (after @ reflected)) * reflected
        trailing = part[width:, width:]
        _add_product(trailing, v[width:], w[width:].t(), -1.0)
        _add_product(trailing, w[width:], v[width:].t(), -1.0)
        panels.append((at, v, scales))
    diagonal[-1] = rest[-1, -1]
    look()
    if not vectors:
        return torch.from_numpy(eigvalsh_tridiagonal(diagonal.numpy(), beside.numpy())), matrix.new_empty(0)
    values, found = map(torch.from_numpy, eigh_tridiagonal(diagonal.numpy(), beside.numpy()))
    for at, v, scales in reversed(panels):
        inner = (v.t() @ v).triu(1)
        inner.diagonal().copy_(1 / scales)
        weights = torch.linalg.solve_triangular(inner, multiplied(v.t(), found[at:]), upper=True)
        _add_product(found[at:], v, weights, -1.0)
    return values, found


def eigenvalues(matrix: Tensor) -> Tensor:
    """Find the eigenvalues of a symmetric matrix, ascending.

    torch.linalg.eigvalsh finds vectors too where its operations are watched.
    """
    return aten._linalg_eigh(matrix, "L", False)[0]


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose a matrix by the eigenvectors of its smaller Gram matrix in float64.

    Exact to about 1e-8 of the largest value: less than float32 has already rounded away of a LoRA's change.
    """
    flat = matrix.double()
    wide = flat.shape[0] <= flat.shape[1]
    squares, vectors = eigen(multiplied(flat, flat.t()) if wide else multiplied(flat.t(), flat))
    sigma, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    other = multiplied(vectors.t(), flat) if wide else multiplied(flat, vectors)
    other /= sigma.clamp(min=1e-300).unsqueeze(1 if wide else 0)
    u, vt = (vectors, other) if wide else (other, vectors.t())
    return u.to(matrix.dtype), sigma.to(matrix.dtype), vt.to(matrix.dtype)


def _in_turn(matrices: Tensor, others: Tensor) -> Tensor:
    """Multiply matrices pair by pair."""
    return torch.stack([multiplied(one, two) for one, two in zip(matrices, others, strict=True)])


def _svd(matrix: Tensor, full: bool = False, vectors: bool = True, *_: Any) -> Any:
    return aten._linalg_svd(matrix, full, vectors) if full or not vectors else singular(matrix)


def _qr(matrix: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    return triangular(matrix) if mode == "reduced" else aten.linalg_qr(matrix, mode)


def _eigh(matrix: Tensor, _: str = "L", vectors: bool = True) -> tuple[Tensor, Tensor]:
    return eigen(matrix, vectors=vectors)


def _solve(matrices: Tensor, right: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = zip(*(each.reshape(-1, *each.shape[-2:]) for each in (matrices, right)), strict=True)
    found = torch.stack([solved(one, two) for one, two in pairs]).view(right.shape)
    none = torch.zeros(matrices.shape[:-2], dtype=torch.int32)
    return found, matrices, none, none


def _of_product(one: Tensor, two: Tensor) -> float:
    return 2.0 * one.numel() * two.shape[-1]


def _cubic(factor: float, matrix: Tensor) -> float:
    return factor * matrix.numel() * min(matrix.shape) if matrix.ndim == 2 else 0.0


# Of torch's operations that may be long: multiplications and additions, and how to do them in pieces.
_LONG: dict[Any, tuple[Callable[..., float], Callable[..., Any]]] = {
    aten.mm.default: (_of_product, multiplied),
    aten.bmm.default: (_of_product, _in_turn),
    aten._linalg_svd.default: (lambda matrix, *_: _cubic(20.0, matrix), _svd),
    aten._linalg_eigh.default: (lambda matrix, *_: _cubic(8.0, matrix), _eigh),
    aten.linalg_qr.default: (lambda matrix, *_: _cubic(4.0, matrix), _qr),
    aten._linalg_solve_ex.default: (lambda matrices, *_: 3.0 * matrices.numel() * matrices.shape[-1], _solve),
}
