"""The modules that use ComfyUI's internals."""
