"""Import ComfyUI into this process, on the CPU: the folder that COMFYUI_PATH names, else the newest downloaded one."""

import logging
import sys

from lora_atelier.dev import comfyui_folder

FOLDER = comfyui_folder()
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))

import comfy.cli_args  # noqa: E402
import utils.install_util  # noqa: E402, F401  # first, as in ComfyUI itself: its nodes.py puts another `utils` before it
from comfyui_version import __version__ as VERSION  # noqa: E402, F401

comfy.cli_args.args.cpu = True  # read when model_management is imported
logging.getLogger().setLevel(logging.WARNING)  # ComfyUI tells every model that it builds
