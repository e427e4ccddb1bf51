"""LoRA files: formats, reading, matching, merging, continuing, writing.

What a run's save holds beside its LoRA file is listed by `training/checkpoint.py`, and what describes a save is a field
of `Checkpoint` in `runs/folder.py`. What a LoRA file says of its run is in `metadata.py`.
"""
