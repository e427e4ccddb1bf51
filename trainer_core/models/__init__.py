"""Model families: detection, loading, and what they compute."""

from .sd import BaseModel, check_base_model, load_base_model
from .text import batch_context, encode_tokens, tokenize

__all__ = ["BaseModel", "batch_context", "check_base_model", "encode_tokens", "load_base_model", "tokenize"]
