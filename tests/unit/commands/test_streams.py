"""What the command line writes arrives, whatever the encoding of the shell."""

import io
import sys

import pytest

from lora_atelier.trainer_core import commands


@pytest.mark.parametrize(
    ("windows", "encoding", "written"),
    [
        (True, "cp1252", "größe 猫 →"),
        (True, "cp850", r"größe \u732b \u2192"),
        (False, "cp1252", r"größe \u732b \u2192"),
    ],
)
def test_signs_that_an_encoding_lacks_end_no_command(monkeypatch, windows, encoding, written):
    """A file gets UTF-8 on Windows, unless a person asked for another encoding than the system's, here cp1252."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    monkeypatch.setattr(commands, "WINDOWS", windows)
    monkeypatch.setattr(commands.locale, "getpreferredencoding", lambda _: "cp1252")
    monkeypatch.setitem(commands.COMMANDS, "say", (lambda *_: print("größe 猫 →", flush=True), ""))
    commands.main(["say"])
    assert file.getvalue().decode("utf-8" if written.endswith("→") else encoding).strip() == written
