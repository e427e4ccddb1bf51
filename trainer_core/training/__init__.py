"""One run: its preparation, its steps, its saves and its result.

A value that each save holds is a line of `CONTENT` in `checkpoint.py` and a field of `Run` in `state.py`. What
describes a save is filled in `saving.py`; its fields are those of `Checkpoint` in `runs/folder.py`.
"""
