"""dev.py finds the newest frontend it has fetched, and goes on without a connection."""

import os
from pathlib import Path

import pytest

import lora_atelier.dev as dev


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give an empty cache, on a machine without a connection."""
    monkeypatch.setattr(dev, "CACHE", tmp_path)
    monkeypatch.setattr(dev, "run", lambda command: 1)
    return tmp_path


def fetch(cache: Path, *versions: str) -> None:
    """Lay out frontends that were fetched long ago."""
    for version in versions:
        folder = cache / f"{dev.FRONTEND}-{version}"
        folder.mkdir()
        os.utime(folder, (0, 0))


def test_the_newest_is_the_one_of_the_highest_version_and_few_are_kept(cache: Path) -> None:
    fetch(cache, "1.9.3", "1.58.1", "1.47.12", "1.100.0")
    assert dev.newest_frontend().name == f"{dev.FRONTEND}-1.100.0"
    assert [folder.name.rsplit("-")[-1] for folder in dev.fetched_frontends()] == ["1.58.1", "1.100.0"]


def test_without_a_connection_the_last_one_serves_for_another_day(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(cache, "1.58.1")
    assert dev.newest_frontend(ask=True).name == f"{dev.FRONTEND}-1.58.1"
    assert "could not be downloaded" in capsys.readouterr().out
    assert dev.newest_frontend(ask=True).name == f"{dev.FRONTEND}-1.58.1"
    assert capsys.readouterr().out == ""


def test_without_a_connection_and_without_any_the_remedy_is_named(cache: Path) -> None:
    with pytest.raises(dev.SetupError, match="check the connection to the Python package index"):
        dev.newest_frontend()
