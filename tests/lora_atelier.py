"""Stand for the pack as a package: `lora_atelier.trainer_core` and the rest import from the repository root.

The pack's own __init__.py needs a running ComfyUI, so it is not executed, and the repository root is never on
sys.path, where `import nodes` would find the pack's `nodes` instead of ComfyUI's.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
