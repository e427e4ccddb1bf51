"""LoRA files: their formats, reading, matching, merging, continuing, writing."""
