"""Answer the page's question what a file of another trainer makes: a workflow, and what became of its settings."""

from __future__ import annotations

import base64
import binascii
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web

from ..trainer_core.common.wording import say
from .comfyui import folders, server
from .routes import answering

LARGEST = 2**22  # bytes of a question
MOST = 20  # files: settings, and those that they name
PLAIN = str.maketrans({letter: "_" for letter in '<>:"/\\|?*'})  # no folder, on no system


def register_import() -> None:
    """Add the route to the server."""
    server.add_question("/atelier/import", answering(answer_import), LARGEST)


def answer_import(question: Any) -> web.Response:
    """Answer {files: [{name, content in base 64}]}, the settings first, then what they name.

    With {name, workflow, open: {id of a node: what to choose there}, note: what its note says, in parts}, or
    {error: a sentence}.
    """
    given = question.get("files") if isinstance(question, dict) else None
    try:
        files = {str(each["name"]): base64.b64decode(each["content"], validate=True) for each in given or ()}
    except (KeyError, TypeError, binascii.Error, ValueError):
        files = {}
    if not 0 < len(files) <= MOST:
        return server.json_answer(
            {"error": f"files must be 1 to {MOST} files, each with a name and content."}, status=400
        )
    return server.json_answer(_bring(files))


def _bring(files: dict[str, bytes]) -> dict[str, Any]:
    """Read the first of some files; the others lie beside it, as in its folder."""
    from ..trainer_core.workflow.importing import bring  # here, so that ComfyUI starts fast

    with tempfile.TemporaryDirectory(dir=folders.temp_folder(), prefix="atelier-import-") as folder:
        paths = []
        for name, content in files.items():
            plain = name.replace("\\", "/").rpartition("/")[2].translate(PLAIN).strip(". ") or "settings"
            paths.append(Path(folder) / plain)
            paths[-1].write_bytes(content)
        try:
            found = bring(paths[0], hidden=Path(folder))
        except ValueError as problem:
            sentence = str(problem)
            end = "" if sentence.endswith((".", "?")) else "."
            return {"error": say("{0} cannot be imported: {1}", paths[0].name, f"{sentence}{end}")}
    title, parts, end = found.told
    note = {"title": title, "parts": [part._asdict() for part in parts], "end": end}
    return {"name": found.name, "workflow": found.workflow, "open": found.open, "note": note}
