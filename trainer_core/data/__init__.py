"""The training data: scan folders, place pictures in buckets, compose captions, plan the steps, cache encodings."""
