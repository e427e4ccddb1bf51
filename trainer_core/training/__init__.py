"""One run: its preparation, its steps, its saves and its result."""
