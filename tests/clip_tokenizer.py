"""Where the tests find CLIP's tokenizer: in the ComfyUI that they run with."""

from lora_atelier.dev import NEWEST, comfyui_folder

TOKENIZER = str(comfyui_folder(NEWEST) / "comfy" / "sd1_tokenizer")
