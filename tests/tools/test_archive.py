"""The archive that the ComfyUI registry serves holds what people need, and nothing that its scan flags.

The registry takes what git tracks, without what .comfyignore names, and looks for texts in every file of it: code,
JavaScript, Markdown and pictures alike. A version with one finding is not offered. Its rules are not public; these are
the texts that publishers have reported.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from PIL import Image

from lora_atelier.dev import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

LARGEST = 49_000_000  # bytes of all files; the three tiny models are 42 MB of them

TRIGGERS = {  # as the registry names its rules -> texts that they were seen to match
    "network": (
        r"\.connect\(",
        r"\.bind\(",
        r"\.send(all)?\(",
        r"\.recv\(",
        r"aiohttp\.ClientSession",
        "urllib",
        "urlopen",
        "requests",
        r"\bimport socket\b",
        r"\bsocket\.\w+\(",
        r"raw\.githubusercontent\.com",
    ),
    "environment": (r"os\.environ", r"\benviron\b", "getenv"),
    "commands": ("subprocess", r"os\.system", r"os\.popen", "rm -rf"),
    "code": (r"(?<![.\w])eval\s*\(", r"(?<![.\w])exec\s*\(", "__import__", "importlib"),
    "database": ("sqlite",),
    "cryptography": ("cryptography",),
}

# What may be a finding and was never reported, and where it stands for a reason. A new place is a decision.
UNSURE = {
    r"(?<=[.\w])eval\(": {  # schedule-free optimizers have such a method; ast.literal_eval reads numbers
        "trainer_core/optim/average.py": 1,
        "trainer_core/optim/custom.py": 1,
        "trainer_core/optim/expression.py": 1,  # simpleeval's
    },
    "pip install": {"README.md": 5},
}

NEEDED = [  # each has a reason to be there that no import shows
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "__init__.py",
    "assets/README.md",
    "assets/atelier-tiny-clip.safetensors",
    "assets/atelier-tiny-flow.safetensors",
    "assets/atelier-tiny.safetensors",
    "assets/concept_example/mossling_01.png",
    "js/atelier.js",
    "js/docs/AtelierTrain.md",
    "locales/zh/nodeDefs.json",
    "pyproject.toml",
    "workflows/1 Start here.jpg",
    "workflows/1 Start here.json",
]


def archive() -> dict[str, bytes]:
    """Read the archive's files: what git tracks, without what .comfyignore names."""

    def listed(*options: str) -> set[str]:
        output = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        return {name for name in output.stdout.decode().split("\0") if name}

    kept = listed() - listed("--cached", "--ignored", "--exclude-from=.comfyignore")
    return {name: (ROOT / name).read_bytes() for name in sorted(kept) if (ROOT / name).is_file()}


def about() -> dict[str, Any]:
    """Read pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Give the archive's files by their names."""
    return archive()


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule, texts in TRIGGERS.items() for text in texts])
def test_nothing_in_the_archive_is_flagged(files: dict[str, bytes], rule: str, text: str) -> None:
    found = {name: match[0] for name, data in files.items() if (match := re.search(text.encode(), data))}
    assert not found, f"rule {rule}: do without it, or keep the file out of the archive"


@pytest.mark.parametrize("text", UNSURE)
def test_what_may_be_flagged_stands_only_where_it_must(files: dict[str, bytes], text: str) -> None:
    found = {name: len(re.findall(text.encode(), data)) for name, data in files.items()}
    found = {name: count for name, count in found.items() if count and not name.endswith(".safetensors")}
    assert found == UNSURE[text]


def test_the_triggers_are_found_where_they_are(tmp_path: Path) -> None:
    """The texts of the reports, so that the patterns above cannot be wrong unnoticed."""
    reported = [
        "node.connect(0, other, 1)",
        "handler.bind(this)",
        "client.send(data)",
        "probe.sendall(data)",
        "client.recv(4)",
        "aiohttp.ClientSession()",
        "import urllib.request",
        "urlopen(address)",
        "import requests",
        "import socket",
        "socket.create_connection(place)",
        "https://raw.githubusercontent.com/a/b/main/c.png",
        'os.environ.get("HOME")',
        "from os import environ",
        'os.getenv("HOME")',
        "subprocess.run(command)",
        "os.system(command)",
        "rm -rf folder",
        "eval(text)",
        "exec(text)",
        '__import__("json")',
        'importlib.import_module("torch")',
        "sqlite3.connect(path)",
        "from cryptography.fernet import Fernet",
    ]
    patterns = [text for texts in TRIGGERS.values() for text in texts]
    assert [line for line in reported if not any(re.search(text, line) for text in patterns)] == []
    harmless = ["model.eval()", "io.Custom(socketless=True)", "from .sockets import io", "def execute(cls):"]
    assert [line for line in harmless if any(re.search(text, line) for text in patterns)] == []


def test_the_archive_holds_what_people_need_and_no_more(files: dict[str, bytes]) -> None:
    assert set(NEEDED) <= files.keys()
    code = {name for name in files if name.endswith(".py")}
    assert {name.split("/")[0] for name in code} == {
        "__init__.py",
        "__main__.py",
        "insides.py",
        "nodes",
        "trainer_core",
    }
    assert {name.split("/")[0] for name in files if "/" in name} == {
        "assets",
        "docs",
        "js",
        "locales",
        "nodes",
        "subgraphs",
        "trainer_core",
        "workflows",
    }
    assert sum(map(len, files.values())) < LARGEST


def test_links_in_the_archive_lead_to_files_in_it(files: dict[str, bytes]) -> None:
    links = {}
    for name, data in files.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", data.decode() if name.endswith(".md") else ""):
            path = (ROOT / name).parent / target.partition("#")[0]
            if "://" not in target and not target.startswith("#"):
                links[f"{name}: {target}"] = path.resolve().relative_to(ROOT).as_posix() in files
    assert links
    assert [link for link, there in links.items() if not there] == []


def test_the_registry_finds_all_that_it_asks_for() -> None:
    project, comfy = about()["project"], about()["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", project["name"])
    assert len(project["name"]) < 100 and "comfyui" not in project["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["urls"]["Repository"].startswith("https://github.com/")
    assert project["license"] == {"file": "LICENSE"}
    assert comfy["PublisherId"] and comfy["DisplayName"]


def test_icon_and_banner_are_as_the_registry_wants_them() -> None:
    comfy = about()["tool"]["comfy"]
    for name, address in (("icon.png", comfy["Icon"]), ("banner.png", comfy["Banner"])):
        assert address == f"{about()['project']['urls']['Repository']}/raw/main/assets/{name}"
        with Image.open(ROOT / "assets" / name) as picture:
            width, height = picture.size
            assert picture.format == "PNG"
            assert width == height <= 400 if name == "icon.png" else width * 9 == height * 21
