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
from .eight_bits import (
    STORED,
    check_compute,
    chosen_compute,
    enough_tokens,
    gradient_in_16_bits,
    linear_rounded,
    rounded,
    takes_sides,
)
from .gradient_checkpointing import LEVELS, PARTS, WHOLE, keep_activations, recompute
from .messages import are_free
from .setup import describe, kept_activations, moves_weights, prepare, rungs
from .stream import Stream, activations_in_ram
from .tensor_float import tensor_float
from .weights import MULTIPLIES_IN, SHARES, Kept, check_weights, keep_weights, multiply_in, pack, weight_bytes
from .written import Watched, copied_before_written

__all__ = [
    "DTYPES",
    "LEVELS",
    "MULTIPLIES_IN",
    "PARTS",
    "SHARES",
    "STORED",
    "WHOLE",
    "Kept",
    "Programs",
    "Stream",
    "Watched",
    "activations_in_ram",
    "are_free",
    "attention_kernel",
    "begin_peak",
    "check_attention",
    "check_compute",
    "check_weights",
    "choose_dtype",
    "chosen_compute",
    "compile_blocks",
    "copied_before_written",
    "describe",
    "empty_cache",
    "enough_tokens",
    "free_bytes",
    "give_back",
    "gradient_in_16_bits",
    "in_parts",
    "keep_activations",
    "keep_weights",
    "kept_activations",
    "linear_rounded",
    "moves_weights",
    "multiply_in",
    "on_device",
    "out_of_memory",
    "pack",
    "peak_bytes",
    "plain_attention",
    "prepare",
    "recompute",
    "room_for_programs",
    "rounded",
    "rungs",
    "staying",
    "takes_sides",
    "tensor_float",
    "total_bytes",
    "weight_bytes",
    "with_room",
]
