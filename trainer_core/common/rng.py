"""Random numbers: every draw of a run is a pure function of (seed, purpose, index)."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Build a generator that depends on its arguments alone.

    The arguments are hashed, not added up, so that neighbouring seeds and indices are unrelated. By default numbers
    are drawn on the CPU, so that a run on another device sees the same ones; only very large draws name a device.
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
    """Hash the arguments to `size` bytes, at most 64."""
    name = "/".join([str(seed % 2**64), purpose, *map(str, index)])
    return hashlib.blake2b(name.encode(), digest_size=size).digest()
