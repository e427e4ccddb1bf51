"""Model files: headers, tensors, and what a file is."""
