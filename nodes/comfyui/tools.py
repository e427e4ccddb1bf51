"""What the tools for LoRAs share: tensors out of inference mode, progress on the node, Cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...trainer_core.common.cancel import cancellable
from ...trainer_core.common.side_by_side import cancelled_at_once
from ...trainer_core.lora_files.lora import Lora, layers_of, metadata_of
from ...trainer_core.lora_files.read import LoraFile
from .models import own


def owned(lora: Mapping[str, Tensor]) -> Lora:
    """Copy what a LORA input carries, on the CPU and out of ComfyUI's inference mode; the metadata go along."""
    with torch.inference_mode(False):
        return Lora({name: own(tensor).detach().cpu() for name, tensor in lora.items()}, metadata_of(lora))


def layers_in(lora: Mapping[str, Tensor], name: str) -> LoraFile:
    """Find the layers of what a LORA input carries, as `layers_of` does; Cancel ends it at once.

    Copies and checks of hundreds of megabytes take a second on a busy machine.
    """
    with cancel_heard():
        return cancelled_at_once(lambda: layers_of(owned(lora), name))()


@contextmanager
def tool_at_work(node: str) -> Iterator[Callable[[float], None]]:
    """Let a tool compute for the length of a `with` block: Cancel acts, and the share it is given shows on the node."""
    bar = comfy.utils.ProgressBar(1000, node_id=node)
    with cancel_heard():
        yield lambda share: bar.update_absolute(round(1000 * share), 1000)
        bar.update_absolute(1000, 1000)


@contextmanager
def cancel_heard() -> Iterator[None]:
    """Let Cancel act on what a tool does in a `with` block, out of ComfyUI's inference mode."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        cancellable(comfy.model_management.throw_exception_if_processing_interrupted),
    ):
        yield
