"""The largest singular value of a matrix, between two bounds that steps bring closer, down to all digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..common.cancel import look
from ..common.in_pieces import eigenvalues
from ..common.rng import generator

WRONG = 1e-3  # the probability that an upper bound is too low, for any matrix
ROUNDING = 1e-5  # what float32 may change of a bound
BLOCK = 2**20  # numbers of a matrix that are multiplied at once: they fit into a processor's cache
STEPS, MOST = 4, 100  # steps at once, and before all digits take less time


@dataclass(kw_only=True, slots=True)
class SpectralNorm:
    """Bounds of a matrix's largest singular value, and Lanczos' basis and tridiagonal matrix of M^T M so far."""

    low: float
    high: float
    basis: Tensor | None = None  # (MOST + 1, n), of which a row more than steps is filled
    diagonal: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """How far apart the bounds are, as the logarithm of their ratio; 0 once all digits are known."""
        return math.log(self.high / self.low) if self.low < self.high else 0.0


def first_bounds(matrix: Tensor) -> SpectralNorm:
    """Bound the largest singular value of a matrix, float32, by its Frobenius norm."""
    norm = math.hypot(*(float(block.norm()) for block in _blocks(matrix)))
    return SpectralNorm(low=norm / min(matrix.shape) ** 0.5 * (1 - ROUNDING), high=norm * (1 + ROUNDING))


def narrow(norm: SpectralNorm, matrix: Tensor) -> None:
    """Bring the bounds of a matrix closer by steps of Lanczos' method on M^T M; after many, find all digits.

    Each step reads M once, and keeps its vector at right angles to all before (Golub & Van Loan 2013, section 10.1).
    The lower bound is the largest Ritz value. The upper one needs the random start: its share of the largest
    eigenvalue's vector is at least d = WRONG / sqrt(2 n / pi), but with probability WRONG. Step k makes a vector of
    norm 1 of the start by the polynomial p(x) = prod(x - ritz values) / prod(norms of the steps' rests), so p of the
    largest eigenvalue is at most 1 / d. Beyond the Ritz values p grows: the bound is where it is 1 / d (Hochstenbach
    2013, Probabilistic upper bounds for the matrix two-norm).
    """
    from scipy.linalg import eigvalsh_tridiagonal  # LAPACK for matrices of 32 rows waits for threads; this does not

    blocks = _blocks(matrix)
    size = min(matrix.shape)
    if len(norm.diagonal) + STEPS > min(MOST, size - 1) or norm.spread < 4 * ROUNDING:
        norm.low = norm.high = _all_digits(blocks)
        norm.basis = None
        return
    basis = _start(size) if norm.basis is None else norm.basis
    for step in range(len(norm.diagonal), len(norm.diagonal) + STEPS):
        look()
        last, known = basis[step], basis[: step + 1]
        after = torch.zeros(size)
        for block in blocks:
            after = torch.addmv(after, block.t(), block @ last)
        norm.diagonal.append(float(after @ last))
        for _ in range(2):  # once leaves what rounding adds, which grows with the steps
            after = torch.addmv(after, known.t(), known @ after, alpha=-1)
        norm.beside.append(max(float(after.norm()), torch.finfo(after.dtype).tiny))
        basis[step + 1] = after / norm.beside[-1]
    norm.basis = basis
    ritz = np.asarray(eigvalsh_tridiagonal(norm.diagonal, norm.beside[:-1]))
    largest = max(float(ritz[-1]), 0.0)
    share = WRONG / (2 * size / math.pi) ** 0.5
    high = largest + _distance(ritz[-1] - ritz, sum(map(math.log, norm.beside)) - math.log(share))
    norm.low = max(norm.low, largest**0.5 * (1 - ROUNDING))
    norm.high = max(norm.low, min(norm.high, high**0.5 * (1 + ROUNDING)))


def _start(size: int) -> Tensor:
    """Draw a vector of norm 1, every direction as likely, with room for the steps' vectors, (MOST + 1, size)."""
    start = torch.randn(size, generator=generator(0, "spectral norm"))
    basis = torch.empty(MOST + 1, size)
    basis[0] = start / start.norm()
    return basis


def _blocks(matrix: Tensor) -> tuple[Tensor, ...]:
    """Cut a tall matrix into blocks of rows; a wide one, whose columns do not lie together, is one block."""
    rows, columns = matrix.shape
    return matrix.split(max(64, BLOCK // columns)) if rows >= columns else (matrix.t(),)


def _distance(gaps: np.ndarray, level: float) -> float:
    """Find x > 0 where the sum of log(x + gap) reaches a level, from above; gaps: not negative, one of them is 0.

    Newton's method on log(x), in which the sum is convex: no step goes below the solution.
    """
    x = math.exp(level / len(gaps))  # as if all gaps were 0
    while (excess := float(np.log(x + gaps).sum()) - level) > 1e-6:
        x *= math.exp(-excess / float((x / (x + gaps)).sum()))
    return x


def _all_digits(blocks: Sequence[Tensor]) -> float:
    """Compute the largest singular value in float64."""
    size = blocks[0].shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64)
    for block in blocks:
        look()
        gram += block.double().t() @ block.double()
    return max(float(eigenvalues(gram)[-1]), 0.0) ** 0.5
