"""The shipped workflows are what their script writes, so that nodes and layout change in one place."""

import os
import subprocess
import sys
from pathlib import Path

from lora_atelier.dev import ROOT


def test_the_shipped_workflows_are_what_the_script_writes(tmp_path: Path) -> None:
    """ATELIER_WRITE_SNAPSHOT=1 writes them anew, after the snapshot of the schema."""
    if os.environ.get("ATELIER_WRITE_SNAPSHOT"):
        subprocess.run([sys.executable, ROOT / "assets" / "write_workflows.py"], check=True)
    subprocess.run([sys.executable, ROOT / "assets" / "write_workflows.py", tmp_path], check=True)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    shipped = [path for folder in ("workflows", "subgraphs") for path in (ROOT / folder).glob("*.json")]
    assert written == {path.relative_to(ROOT): path.read_bytes() for path in shipped}
