"""Runs as files: run.json, and what people write or save to train the same run elsewhere."""
