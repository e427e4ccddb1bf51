"""The command line: python custom_nodes/lora-atelier train RUN, for a folder of whatever name."""

import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    folder = Path(__file__).absolute().parent
    # This folder holds a package `nodes`, and ComfyUI has a module of that name.
    sys.path[:] = [path for path in sys.path if Path(path).absolute() != folder]
    pack = sys.modules["lora_atelier"] = ModuleType("lora_atelier")
    pack.__path__ = [str(folder)]

    from lora_atelier.trainer_core.commands import main

    sys.exit(main())
