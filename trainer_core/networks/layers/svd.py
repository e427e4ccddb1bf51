"""The largest singular values of a matrix, faster than a full decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_SIZE = 192  # shorter side up to which the full decomposition is computed
OVERSAMPLING = 8  # columns beyond the rank
ITERATIONS = 4  # of the subspace


def largest_singular(matrix: Tensor, rank: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the leading singular vectors and values of a matrix, descending: (out, rank), (rank,), (rank, in).

    Large matrices use randomised subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4): near the optimum,
    and reproducible for the same draws (on the CPU). Fewer than `rank` if the matrix has fewer.
    """
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(EXACT_SIZE, rank + OVERSAMPLING):
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], sigma[:rank], vt[:rank]
    start = torch.randn(matrix.shape[1], rank + OVERSAMPLING, generator=draws, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ basis).Q).Q
    u, sigma, vt = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return (basis @ u)[:, :rank], sigma[:rank], vt[:rank]
