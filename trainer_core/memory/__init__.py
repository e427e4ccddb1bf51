"""Ways to save GPU memory: precision, quantized weights, offloading to RAM, gradient checkpointing."""

from .attention import attention_kernel, check_attention, plain_attention
from .compiled import Programs, compile_blocks, room_for_programs
from .device import (
    DTYPES,
    begin_peak,
    choose_dtype,
    empty_cache,
    free_bytes,
    give_back,
    in_parts,
    on_device,
    out_of_memory,
    peak_bytes,
    staying,
    total_bytes,
    with_room,
)
from .gradient_checkpointing import LEVELS, keep_activations, recompute
from .messages import are_free
from .setup import describe, kept_activations, moves_weights, prepare, rungs
from .stream import Stream, activations_in_ram
from .tensor_float import tensor_float
from .weights import SHARES, Kept, check_weights, keep_weights, weight_bytes
from .written import Watched, copied_before_written

__all__ = [
    "DTYPES",
    "LEVELS",
    "SHARES",
    "Kept",
    "Programs",
    "Stream",
    "Watched",
    "activations_in_ram",
    "are_free",
    "attention_kernel",
    "begin_peak",
    "check_attention",
    "check_weights",
    "choose_dtype",
    "compile_blocks",
    "copied_before_written",
    "describe",
    "empty_cache",
    "free_bytes",
    "give_back",
    "in_parts",
    "keep_activations",
    "keep_weights",
    "kept_activations",
    "moves_weights",
    "on_device",
    "out_of_memory",
    "peak_bytes",
    "plain_attention",
    "prepare",
    "recompute",
    "room_for_programs",
    "rungs",
    "staying",
    "tensor_float",
    "total_bytes",
    "weight_bytes",
    "with_room",
]
