"""The torch core of LoRA Atelier: scan, plan, encode, train, export. Imports nothing of ComfyUI."""
