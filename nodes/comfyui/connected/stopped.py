"""Where code of a linked model stopped with an error, in words: whose it is, and in which file."""

from __future__ import annotations

import logging
import re
import traceback

from .observed import OURS

OF_COMFYUI = re.compile(r".*[\\/]((?:custom_nodes|comfy|comfy_extras)[\\/].+)")
LIBRARIES = re.compile(r"[\\/](?:site|dist)-packages[\\/]|<")  # torch and others, and code without a file


def where_stopped(error: BaseException) -> str:
    """Name the class or function whose code raised an error, as " in Block of x.py"; "" if none is known.

    What the error says is for those who wrote that code: it goes to the log.
    """
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, own = frame.f_code, frame.f_globals.get("__name__", "")
        if LIBRARIES.search(code.co_filename) or own.startswith(OURS):
            continue
        file = re.sub(r"[\\/]", "/", OF_COMFYUI.sub(r"\1", code.co_filename))
        short = file if file.startswith(("custom_nodes/", "comfy")) else file.rpartition("/")[2]
        who = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else code.co_name
        where = f" in {who} of {short}"
    logging.getLogger(__name__).warning("A linked model stopped%s: %s: %s", where, type(error).__name__, error)
    return where
