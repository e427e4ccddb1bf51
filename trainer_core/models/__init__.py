"""Model families: detection, loading, and what they compute."""

from .family import Family
from .sd import (
    BaseModel,
    Conditions,
    check_base_model,
    load_base_model,
    noise_model,
    outline_base_model,
    predict,
    unet_layer_names,
)
from .text import (
    CHUNK,
    MAX_CHUNKS,
    Conditioning,
    TextEncoder,
    batch_context,
    count_tokens,
    encode_caption,
    find_tokenizer,
    left_out,
    load_tokenizer,
    tokenize,
)

__all__ = [
    "CHUNK",
    "MAX_CHUNKS",
    "BaseModel",
    "Conditioning",
    "Conditions",
    "Family",
    "TextEncoder",
    "batch_context",
    "check_base_model",
    "count_tokens",
    "encode_caption",
    "find_tokenizer",
    "left_out",
    "load_base_model",
    "load_tokenizer",
    "noise_model",
    "outline_base_model",
    "predict",
    "tokenize",
    "unet_layer_names",
]
