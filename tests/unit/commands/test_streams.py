"""What the command line writes arrives, whatever the encoding of the shell."""

import io
import sys

import pytest

from lora_atelier.trainer_core import commands


@pytest.mark.parametrize(
    ("windows", "named", "written"),
    [
        (True, "", "größe 猫 →"),
        (True, "cp1252", r"größe \u732b \u2192"),
        (False, "", r"größe \u732b \u2192"),
    ],
)
def test_signs_that_an_encoding_lacks_end_no_command(monkeypatch, windows, named, written):
    """A file gets UTF-8 on Windows, unless a person asked for another encoding."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="cp1252", errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    monkeypatch.setattr(commands, "WINDOWS", windows)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if named:
        monkeypatch.setenv("PYTHONIOENCODING", named)
    monkeypatch.setitem(commands.COMMANDS, "say", (lambda *_: print("größe 猫 →", flush=True), ""))
    commands.main(["say"])
    encoding = "utf-8" if written.endswith("→") else "cp1252"
    assert file.getvalue().decode(encoding).strip() == written
