"""Model families: detection, loading, and what they compute."""

from .autoencoder import encode_blank, encode_painted, encode_pixels
from .family import Family
from .outline import outline_base_model
from .remarks import remarks
from .sd import BaseModel, Conditions, check_base_model, load_base_model, noise_model, predict, unet_layer_names
from .text import (
    CHUNK,
    MAX_CHUNKS,
    Conditioning,
    TextEncoder,
    Words,
    batch_context,
    count_tokens,
    cut_words,
    encode_caption,
    find_tokenizer,
    left_out,
    load_tokenizer,
    mentions,
    token_ids,
    tokenize,
    word_ids,
)

__all__ = [
    "CHUNK",
    "MAX_CHUNKS",
    "BaseModel",
    "Conditioning",
    "Conditions",
    "Family",
    "TextEncoder",
    "Words",
    "batch_context",
    "check_base_model",
    "count_tokens",
    "cut_words",
    "encode_blank",
    "encode_caption",
    "encode_painted",
    "encode_pixels",
    "find_tokenizer",
    "left_out",
    "load_base_model",
    "load_tokenizer",
    "mentions",
    "noise_model",
    "outline_base_model",
    "predict",
    "remarks",
    "token_ids",
    "tokenize",
    "unet_layer_names",
    "word_ids",
]
