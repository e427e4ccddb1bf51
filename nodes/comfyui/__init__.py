"""The modules that use ComfyUI's internals.

`connected/` trains models that ComfyUI holds, and `models.py` patches them; `sampling.py` and `drawn.py` draw pictures.
`session.py` runs a training, `progress.py` and `failures.py` tell the pages; `pending.py` and `shown.py` know it after
a restart. `server.py` adds routes, `askers.py` says who may ask them, `folders.py` which files a workflow may touch.
"""
