"""Runs as files: run.json, and what people write or save to train the same run elsewhere.

`settings.py` maps the inputs of each node to its configuration. `read.py` reads a prompt by it, `canvas.py` makes a
prompt of a saved workflow, `write.py` writes a workflow. `foreign/` reads and writes files of other trainers, which
`importing.py` brings in.
"""
