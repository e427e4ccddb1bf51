"""The shipped workflows are what their script writes, so that nodes and layout change in one place."""

import subprocess
import sys
from pathlib import Path

from lora_atelier.dev import ROOT


def test_the_shipped_workflows_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "assets" / "write_workflows.py", tmp_path], check=True)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    shipped = [path for folder in ("workflows", "subgraphs") for path in (ROOT / folder).glob("*.json")]
    assert written == {path.relative_to(ROOT): path.read_bytes() for path in shipped}
