"""The MODEL, CLIP and VAE that a configuration means, as long as anything holds it."""

from __future__ import annotations

import uuid
import weakref
from dataclasses import dataclass
from typing import Any

from ....trainer_core.config import BaseModelConfig


@dataclass(frozen=True, eq=False)
class Live:
    """Models that ComfyUI has loaded, as they are wired."""

    model: Any  # ModelPatcher
    clip: Any
    vae: Any
    sampled: Any = None  # ModelPatcher that draws the samples, with the LoRA on it; None: `model`


class Key(str):
    """A key that keeps its models alive: ComfyUI's cache holds the socket's value, and so the models."""

    live: Live

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        """Become plain text where a configuration becomes plain values."""
        return str(self)


_living: weakref.WeakValueDictionary[str, Live] = weakref.WeakValueDictionary()


def key_of(live: Live) -> Key:
    """Make a key for models."""
    key = Key(uuid.uuid4().hex)
    key.live = live
    _living[str(key)] = live
    return key


def live_of(config: BaseModelConfig) -> Live:
    """Find the models of a configuration; raises ValueError when nothing holds them any more."""
    assert config.connected is not None
    key = config.connected.key
    live = key.live if isinstance(key, Key) else _living.get(key)
    if live is None:
        raise ValueError(f"The models linked as {config.path} are no longer loaded; press Run again.")
    return live
