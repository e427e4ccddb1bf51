"""doctor says what is wrong with an installation, and nothing of whose machine it is."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_atelier.trainer_core.commands import main

doctor = importlib.import_module("lora_atelier.trainer_core.commands.doctor")  # its package has a function of that name


@pytest.fixture
def installed(tmp_path: Path, comfyui: Path) -> Path:
    """Give a ComfyUI folder with the parts that doctor looks at."""
    folder = tmp_path / "somebody" / "ComfyUI"
    shutil.copytree(comfyui / "comfy" / "sd1_tokenizer", folder / "comfy" / "sd1_tokenizer")
    (folder / "comfyui_version.py").write_text('# generated\n__version__ = "0.99.1"\n', encoding="utf-8")
    return folder


def told(capsys, *arguments: object) -> tuple[int, list[str]]:
    status = main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out.splitlines()


def test_a_sound_installation_is_listed_and_trains(installed, capsys, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=9e9))  # of this machine: unknown
    status, lines = told(capsys, "--comfyui", installed)
    assert status == 0 and lines[-1].startswith("Nothing is wrong.")
    assert all(line.startswith("ok") for line in lines[:-1])
    found = "\n".join(lines)
    assert re.search(r"^ok     LoRA Atelier \d+\.\d+\.\d+$", found, re.MULTILINE)
    assert "ComfyUI 0.99.1" in found and f"torch {torch.__version__} on " in found and "models/loras can be" in found
    assert "2 steps on " in lines[-2] and "a LoRA of 0.8 MB" in lines[-2]
    assert "somebody" not in found and str(Path.home()) not in found and str(doctor.PACK) not in found


def test_what_is_wrong_has_a_line_with_what_to_do(installed, capsys, monkeypatch):
    (installed / "output").write_text("a file", encoding="utf-8")
    own = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: {"diffusers": "", "scipy": "0.9"}.get(name, own(name)))
    monkeypatch.setattr(doctor, "two_steps", lambda _: (_ for _ in [(False, "2 steps failed")]))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2e9))
    status, lines = told(capsys, "--comfyui", installed)
    wrong = [line.removeprefix("WRONG  ") for line in lines if line.startswith("WRONG")]
    assert status == 1 and lines[-1].startswith("6 things are wrong.")
    assert wrong[0] == 'diffusers is not installed; install "diffusers>=0.30" with ComfyUI\'s Python'
    assert wrong[1].startswith('scipy 0.9 is older than 1.10; install "scipy>=1.10" with ')
    assert wrong[2].startswith("output: ") and "somebody" not in wrong[2]
    assert wrong[3] == "models/loras can be written, 2 GB free; a run may take 5 GB, so delete what you do not need"


def test_folders_are_looked_at_where_the_pack_lies(installed, tmp_path, capsys, monkeypatch):
    base = tmp_path / "somebody" / "Documents"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "output").write_text("a file", encoding="utf-8")
    monkeypatch.setattr(doctor, "comfyui_around", lambda: base)
    monkeypatch.setattr(doctor, "two_steps", lambda _: iter(()))
    status, lines = told(capsys, "--comfyui", installed)
    found = "\n".join(lines)
    assert status == 1 and "ok     ComfyUI 0.99.1" in lines and "WRONG  output: ComfyUI/output " in found
    assert (base / "models" / "loras").is_dir() and "somebody" not in found


def test_without_comfyui_it_says_how_to_name_it(tmp_path, capsys):
    status, lines = told(capsys, "--comfyui", tmp_path)
    assert status == 1
    assert "WRONG  ComfyUI is not around the pack; name its folder: doctor --comfyui FOLDER" in lines
    assert "WRONG  no step was tried, as it needs ComfyUI's tokenizer" in lines


@pytest.mark.parametrize(("version", "well"), [("0.20.0", False), ("0.20.1", True), ("0.100.0", True)])
def test_a_comfyui_that_is_too_old_is_named(installed, version, well):
    (installed / "comfyui_version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    first = next(iter(doctor.places(installed, installed)))
    assert first == (well, f"ComfyUI {version}" + ("" if well else " is older than 0.20.1; update ComfyUI"))


def test_a_python_without_packages_gets_the_list_of_them_and_no_traceback():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        without = [sys.executable, "-S", "-E", str(doctor.PACK), *arguments]
        return subprocess.run(without, capture_output=True, text=True, encoding="utf-8")

    looked = run("doctor")
    assert looked.returncode == 1 and not looked.stderr
    assert "WRONG  torch is not installed for this Python; run doctor by the Python that" in looked.stdout
    for name, _ in doctor.required("dependencies"):
        assert f"WRONG  {name} is not installed; install " in looked.stdout
    planned = run("plan", "a.json")
    assert planned.returncode == 1
    assert re.fullmatch(
        r"\w+ is not installed for this Python\. Run this by the Python that starts ComfyUI; `doctor` in place of the "
        r"command lists what is missing\.\n",
        planned.stderr,
    )


def test_a_package_that_cannot_be_loaded_is_a_line_and_no_traceback(installed, capsys, monkeypatch):
    def broken():
        raise OSError(r'[WinError 126] Error loading "D:\Anna B\python_embeded\Lib\c10.dll" or one of its dependencies')
        yield

    monkeypatch.setattr(doctor, "devices", broken)
    monkeypatch.setattr(doctor, "two_steps", lambda _: iter(()))
    status, lines = told(capsys, "--comfyui", installed)
    assert status == 1
    sentence = '[WinError 126] Error loading "c10.dll" or one of its dependencies'
    assert f"WRONG  what is installed cannot be used: {sentence}" in lines


def test_every_package_that_is_required_is_looked_at():
    assert {name for name, _ in doctor.required("dependencies")} >= {"diffusers", "transformers", "safetensors"}
    assert [name for group in ("bnb", "tensorboard") for name, _ in doctor.required(group)] == [
        "bitsandbytes",
        "tensorboard",
    ]
    assert doctor.required("optimizers")
