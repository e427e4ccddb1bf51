"""Model families: detection, loading, and what they compute."""

from .sd import BaseModel, check_base_model, load_base_model
from .text import (
    CHUNK,
    MAX_CHUNKS,
    batch_context,
    count_tokens,
    encode_tokens,
    find_tokenizer,
    left_out,
    load_tokenizer,
    tokenize,
)

__all__ = [
    "CHUNK",
    "MAX_CHUNKS",
    "BaseModel",
    "batch_context",
    "check_base_model",
    "count_tokens",
    "encode_tokens",
    "find_tokenizer",
    "left_out",
    "load_base_model",
    "load_tokenizer",
    "tokenize",
]
