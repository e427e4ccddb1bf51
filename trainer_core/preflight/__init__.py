"""Checks and reports before a model is loaded: plan, sizes, memory, disk.

`outline.py` builds run and network without weights; `estimate.py` (or `measured.py`, for linked models) counts a step's
memory in it, and `memory.py` chooses what fits. `network.py` counts layers and the file. `report.py` writes what a run
and Dataset Preview say first, `preview.py` draws its sheet. `shown_pictures.py` and `curation.py` serve the dataset's
page.
"""
