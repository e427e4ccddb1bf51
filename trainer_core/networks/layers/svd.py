"""The largest singular values of a matrix, without the time that all of them take."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 192  # of the shorter side up to which all singular values are computed
BESIDE = 8  # columns beyond those asked for, and
PASSES = 4  # of the subspace iteration


def largest_singular(matrix: Tensor, rank: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, rank), (rank,), (rank, in): the leading singular vectors and values of a matrix, descending.

    Large ones by randomised subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4), near to the best and
    the same for the same draws (on the CPU). Fewer than `rank` where the matrix has fewer.
    """
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(EXACT, rank + BESIDE):
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], sigma[:rank], vt[:rank]
    start = torch.randn(matrix.shape[1], rank + BESIDE, generator=draws, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(PASSES):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ basis).Q).Q
    u, sigma, vt = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return (basis @ u)[:, :rank], sigma[:rank], vt[:rank]
