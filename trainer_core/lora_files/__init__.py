"""LoRA files: formats, reading, matching, merging, continuing, writing."""
