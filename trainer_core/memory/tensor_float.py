"""Let an NVIDIA GPU round the factors of float32 products to TF32, or forbid it, for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tensor_float(choice: str) -> Iterator[None]:
    """Set TF32 on or off for a `with` block; auto leaves it as it is. Afterwards every flag is as it was."""
    if choice == "auto":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    places: list[Any] = [products]
    places += [getattr(convolutions, each) for each in ("conv", "rnn") if hasattr(convolutions, each)]
    if hasattr(products, "fp32_precision"):  # torch since 2.9 refuses to read the older flags once the newer are set
        names = [each.fp32_precision for each in places]
        kept = [name == "tf32" for name in names[:2]]
    else:
        names, kept = [], [products.allow_tf32, convolutions.allow_tf32]
    _set(choice == "on", choice == "on")
    try:
        yield
    finally:
        _set(*kept)
        for each, name in zip(places, names, strict=bool(names)):  # the older flags know on and off alone
            each.fp32_precision = name


def _set(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions
