"""The training data: scan folders, choose buckets, compose captions, plan the steps, cache encodings."""
