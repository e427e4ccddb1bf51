"""What takes one call of torch minutes goes in pieces: the same numbers, and a Cancel between any two of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_atelier.trainer_core.common import in_pieces
from lora_atelier.trainer_core.common.cancel import cancellable
from lora_atelier.trainer_core.common.in_pieces import InPieces, eigenvalues

DRAWS = torch.Generator().manual_seed(1)
TALL = torch.randn(90, 70, generator=DRAWS, dtype=torch.float64)
POOR = TALL[:, :5] @ torch.randn(5, 80, generator=DRAWS, dtype=torch.float64)  # of rank 5
SQUARE = TALL.t() @ TALL
SKEW = torch.stack([TALL[:70] - TALL[:70].t(), TALL[20:] - TALL[20:].t()]) + torch.eye(70)


def rebuilt(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
    return sigma, u * sigma @ vt, vt @ vt.t() if len(vt) < len(vt.t()) else u.t() @ u


def of_symmetric(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors * values @ vectors.t()


LONG: dict[str, Callable[[], Any]] = {
    "product": lambda: TALL @ TALL.t(),
    "products": lambda: torch.einsum("o i ..., i j -> o j ...", TALL.view(90, 70, 1, 1), SQUARE),
    "singular, tall": lambda: rebuilt(TALL),
    "singular, wide": lambda: rebuilt(TALL.t()),
    "singular, poor": lambda: rebuilt(POOR)[1],
    "eigen": lambda: of_symmetric(SQUARE),
    "eigen, apart": lambda: of_symmetric(torch.block_diag(SQUARE, torch.zeros(3, 3), SQUARE).double()),
    "eigenvalues": lambda: eigenvalues(SQUARE),
    "right angles": lambda: torch.linalg.qr(TALL),
    "right angles, wide": lambda: torch.linalg.qr(TALL.t()),
    "equations": lambda: torch.linalg.solve_ex(SKEW, SKEW.mT).result,
}


@pytest.mark.parametrize("name", LONG)
def test_pieces_give_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LONG[name]()
    monkeypatch.setattr(in_pieces, "AT_ONCE", 20000.0)
    monkeypatch.setattr(in_pieces, "PANEL", 8)
    looks: list[None] = []
    with cancellable(lambda: looks.append(None)), InPieces():
        cut = LONG[name]()
    assert len(looks) > 15
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (plain, cut)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-8 * float(one.abs().max()))


@pytest.mark.parametrize("name", LONG)
def test_what_is_short_stays_as_it_is(name: str) -> None:
    with InPieces():
        cut = LONG[name]()
    plain = LONG[name]()
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (plain, cut)), strict=True):
        assert torch.equal(one, other)
