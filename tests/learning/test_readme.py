"""The README's example runs as it stands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_core_is_usable_from_python_in_ten_lines(checkpoint, pictures, comfyui, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 10
    shutil.copy(checkpoint, tmp_path / "model.safetensors")
    shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copytree(comfyui / "comfy" / "sd1_tokenizer", tmp_path / "ComfyUI" / "comfy" / "sd1_tokenizer")
    short = code.replace("steps=500, batch_size=2", "steps=2, resolution=64, bucket_step=32")
    assert short != code
    setup = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + short], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("my_lora.safetensors ")
    assert (tmp_path / "my_lora.safetensors").is_file()
