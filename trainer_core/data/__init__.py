"""The training data: scan folders, choose buckets, compose captions, plan the steps, cache encodings.

An axis beside width, height and frames begins in `common/axes.py`; here it changes `crops.py` and `plan.py`. Another
kind of data, such as sounds, needs a decoder beside `films.py` and its facts in `scan/pictures.py`; CONTRIBUTING.md
lists its other places.
"""
