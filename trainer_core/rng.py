"""Every random draw of a run is a pure function of (seed, purpose, index)."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *index: int) -> torch.Generator:
    """Return a CPU generator that depends on its arguments alone.

    The name is hashed, not added up, so that neighbouring seeds and indices are unrelated. Draws are made on
    the CPU on purpose: the same run on another device sees the same numbers.
    """
    name = "/".join([str(seed % 2**64), purpose, *map(str, index)])
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def sample_uniform(seed: int, purpose: str, *index: int) -> float:
    """Draw one number from [0, 1)."""
    return torch.rand((), generator=generator(seed, purpose, *index), dtype=torch.float64).item()
