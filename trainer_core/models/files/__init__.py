"""Read safetensors files, and put their tensors into modules."""
