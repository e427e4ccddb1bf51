"""The README's example runs as it is printed, in a Python that has nothing of ComfyUI and no helper of the tests.

The Python is isolated, as that of ComfyUI's portable build is: the script's folder is not on its path.
"""

import os
import re
import shutil
import subprocess
import sys

from lora_atelier.dev import ROOT, TINY_BASE

NOT_IN_THE_PACK = shutil.ignore_patterns(".*", "tests", "docs", "bench")  # but with what is compiled


def test_the_core_is_usable_from_python_in_ten_lines(pictures, comfyui, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 10
    shutil.copytree(ROOT, tmp_path / "lora_atelier", ignore=NOT_IN_THE_PACK)
    shutil.copy(TINY_BASE, tmp_path / "model.safetensors")
    shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copytree(comfyui / "comfy" / "sd1_tokenizer", tmp_path / "ComfyUI" / "comfy" / "sd1_tokenizer")
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # An isolated Python does not read from the environment where compiled modules are kept.
    kept = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    command = [sys.executable, "-I", *kept, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("my_lora.safetensors ")
    assert (tmp_path / "my_lora.safetensors").is_file() and len(list((tmp_path / "runs").glob("[!.]*"))) == 1


def test_the_demo_imports_no_package_of_the_tests():
    """`dev.py demo` installs ComfyUI's requirements and the pack's alone."""
    code = (
        "import sys\n"
        "for name in ('pytest', '_pytest', 'hypothesis', 'playwright', 'xdist'): sys.modules[name] = None\n"
        "import comfy_demo\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
