"""Every random draw of a run is a pure function of (seed, purpose, index)."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator that depends on its arguments alone.

    The name is hashed, not added up, so that neighbouring seeds and indices are unrelated. Draws are made on
    the CPU on purpose: the same run on another device sees the same numbers; only what would be
    too much to carry over is drawn on another device.
    """
    return torch.Generator(device).manual_seed(int.from_bytes(_digest(seed, purpose, index, 8), "little") >> 1)


def sample_uniform(seed: int, purpose: str, *index: int) -> float:
    """Draw one number from [0, 1)."""
    return torch.rand((), generator=generator(seed, purpose, *index), dtype=torch.float64).item()


def uniforms(seed: int, purpose: str, *index: int, count: int = 1) -> tuple[float, ...]:
    """Draw up to eight numbers from [0, 1) at once, without the cost of a generator; for plans of many visits."""
    digest = _digest(seed, purpose, index, 8 * count)
    return tuple((int.from_bytes(digest[i : i + 8], "little") >> 11) / 2**53 for i in range(0, 8 * count, 8))


def _digest(seed: int, purpose: str, index: tuple[int, ...], size: int) -> bytes:
    """Return `size` bytes (at most 64) that depend on the arguments alone."""
    name = "/".join([str(seed % 2**64), purpose, *map(str, index)])
    return hashlib.blake2b(name.encode(), digest_size=size).digest()
