"""Stand for the pack as a package: `lora_atelier.trainer_core` and the rest import from the repository root.

So the repository's folder may have any name, and neither it nor its parent need be on sys.path: in the folder
itself `import nodes` would find the pack's `nodes` instead of ComfyUI's.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
