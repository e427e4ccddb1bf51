"""Remember the folders outside ComfyUI that a person at the machine allowed workflows to read pictures from."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths
from aiohttp import web

from ...trainer_core.common.files import written_whole
from .askers import at_the_machine
from .server import json_answer

MOST = 1000  # folders in the file
LARGEST = 2**20  # bytes of the file


def list_file() -> Path:
    """The file that lists the folders, one in each line; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "allowed_folders.txt"


def allowed_folders() -> list[str]:
    """List the folders that a person allowed; raises ValueError for a file that cannot be read."""
    path = list_file()
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST)
        lines = data.decode("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The list of allowed folders {path} cannot be read; repair it, or delete it.") from error
    return [line for line in map(str.strip, lines) if os.path.isabs(line)][:MOST]


def allow(folder: Path) -> None:
    """Add a folder to the list; raises ValueError for one that does not exist, or that holds a whole disk."""
    if not folder.is_absolute() or not os.path.isdir(folder):
        raise ValueError(f"There is no folder {folder}; check its spelling.")
    if folder.parent == folder or Path(os.path.realpath(folder)).parent == Path(os.path.realpath(folder)):
        raise ValueError(f"{folder} is a whole disk; allow the folder of your pictures.")
    if any(character in str(folder) for character in "\r\n"):
        raise ValueError(f"The name of {str(folder)!r} has several lines; rename the folder.")
    _write([*allowed_folders(), os.path.abspath(folder)])


def forget(folder: str) -> None:
    """Remove a folder from the list."""
    _write([each for each in allowed_folders() if each != folder])


def _write(folders: list[str]) -> None:
    with written_whole(list_file()) as temporary:
        temporary.write_text("".join(f"{folder}\n" for folder in dict.fromkeys(folders)), encoding="utf-8")


def only_at_the_machine(request: web.Request) -> web.Response | None:
    """Refuse all but pages that were opened on the machine itself."""
    if at_the_machine(request):
        return None
    sentence = (
        "Folders can be allowed only on the machine that runs ComfyUI, at its address 127.0.0.1. Elsewhere add "
        f"them to datasets in extra_model_paths.yaml, or as lines of user/__atelier/{list_file().name}."
    )
    return json_answer({"error": sentence}, status=403)
