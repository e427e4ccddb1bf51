"""One run: its preparation, its steps, its checkpoints and its result."""
