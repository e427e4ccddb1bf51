"""Answer the page about single pictures of a folder: what is set for them, their masks, and how they look.

Names in questions are those of files inside a folder that may be read; what is written lies in one that may be changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from ..trainer_core.common.access import Access
from ..trainer_core.common.wording import say
from .comfyui import folders, server
from .comfyui.server import Refused

LARGEST_CHANGE = 2**22  # bytes of a question that changes many pictures
LARGEST_MASK = 2**25  # bytes of one that holds a mask
MOST_NAMES = 20_000  # files of a folder whose pictures are listed; pictures that are changed at once
# Pixels: the longest side of a picture, as it is shown. Of a clip the first frame, but where it plays.
SIDES = {"small": 320, "large": 1280, "masked": 1024, "still": 1280}
PLAYED = 640  # pixels of a clip that plays
USUAL = "1024"  # the resolution for which the crop's frame is shown, where none is known
SOON = 5.0  # seconds to wait for another change
_changing = threading.Lock()  # one change at a time, so that a file that was read is the one that is replaced
_drawing = threading.BoundedSemaphore(4)  # pictures that are in memory at once

Answered = Callable[[dict[str, Any], Path], dict[str, Any]]


def register_picture_routes() -> None:
    """Add the routes to the server."""
    server.add_route("/atelier/pictures/view", answer_view)
    server.add_question("/atelier/pictures/names", in_a_folder(names_of, folders.changeable_folder))
    server.add_question("/atelier/pictures/one", of_a_picture(look_at))
    server.add_question("/atelier/pictures/own", in_a_folder(set_own, folders.changeable_folder), LARGEST_CHANGE)
    server.add_question("/atelier/pictures/paint", of_a_picture(paint))
    server.add_question("/atelier/pictures/mask", of_a_picture(keep_mask), LARGEST_MASK)
    server.add_question("/atelier/pictures/mask/undo", of_a_picture(undo_mask))


def in_a_folder(answer: Answered, find: Callable[[str], Path]) -> Callable[[web.Request, Any], web.Response]:
    """Make a route that answers about the folder that a question names as Concept Dataset does, one at a time."""

    def answered(_: web.Request, question: Any) -> web.Response:
        if not isinstance(question, dict) or not isinstance(question.get("folder"), str):
            raise Refused("The question is no JSON object that names a folder.", 400)
        if not _changing.acquire(timeout=SOON):  # not for ever: whoever waits holds a thread
            raise Refused(say("Another picture is being changed; try again after that."), 503)
        try:
            return server.json_answer(answer(question, find(question["folder"])))
        finally:
            _changing.release()

    return answered


def of_a_picture(answer: Answered) -> Callable[[web.Request, Any], web.Response]:
    """Make a route that answers about the picture of a folder that a question names."""
    return in_a_folder(
        lambda question, folder: answer(question, find_picture(folder, question.get("picture"), folders.writable())),
        folders.changeable_folder,
    )


def find_picture(folder: Path, name: Any, allowed: Access, *, clips: bool = False) -> Path:
    """Find a picture by its name within a folder; of a link, the place that it leads to must be allowed as well.

    clips: the name may also be that of a clip.
    """
    from ..trainer_core.data.films import trainable_extensions  # here, so that ComfyUI starts fast
    from ..trainer_core.data.images import picture_extensions
    from ..trainer_core.data.scan.own_file import is_outside

    if not isinstance(name, str) or is_outside(name) or not allowed.allows(folder / name):
        raise Refused("picture must be the name of a picture inside the folder.", 400)
    path = folder / name
    endings = trainable_extensions() if clips else picture_extensions()
    if path.suffix.lower() not in endings or not folders.is_there(path):
        raise Refused(say("There is no picture {0}; it may have been deleted.", name), 404)
    return path


# --- what is set -------------------------------------------------------------------------------------------


def names_of(_: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Answer with {names: of the pictures in a folder and those inside it}; masks are none."""
    from ..trainer_core.data.images import picture_extensions
    from ..trainer_core.data.masks import is_mask_name
    from ..trainer_core.data.scan import list_files

    folders.refuse_many(folder, MOST_NAMES)
    endings = picture_extensions()
    found = (file for file in list_files(folder, True, folders.access()) if not file.ignored)
    names = [file.name for file in found if file.extension in endings and not is_mask_name(file.name, None)]
    return {"names": names}


def look_at(question: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Answer with {own, before, read, width, height, frame, mask, earlier} of a picture.

    own: what the folder's file sets for it. before: what it set before a page's last change, or null. read: sha256 of
    that file. frame: what a crop at `resolution` of the
    question keeps, as shares. mask: its sha256. earlier: whether an earlier mask can be brought back.
    """
    from ..trainer_core.data.images import DECODER_ERRORS, decoder_error, upright_size
    from ..trainer_core.data.painted import frame_of, state_of_mask
    from ..trainer_core.data.scan import OwnSettings, find_own, read_own
    from ..trainer_core.data.scan.own_file import remembered

    folder, name = folders.changeable_folder(question["folder"]), question["picture"]
    settings, read = read_own(folder, folders.access())
    own = settings.get(find_own(settings, [name]).get(name, ""), OwnSettings())
    try:
        width, height = upright_size(picture)
    except DECODER_ERRORS as problem:
        raise Refused(say("{0} cannot be shown: {1}.", name, decoder_error(problem)), 415) from problem
    before, resolution = remembered(_before(folder), name), question.get("resolution") or USUAL
    if not isinstance(resolution, str):
        raise Refused("resolution must be a text.", 400)
    return {
        "own": own.to_dict(),
        "before": None if before is None or before == own else before.to_dict(),
        "read": read,
        "width": width,
        "height": height,
        "frame": frame_of((width, height), resolution, own.focus),
        "mask": state_of_mask(picture, folders.access()),
        "earlier": folders.is_there(_earlier(picture)),
    }


def set_own(question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write {pictures: what is set for each, by name} over the file of the sha256 `read`; answer with {before, read}.

    To write `before` with the new `read` undoes it.
    """
    from ..trainer_core.data.scan import Changed, own_of, write_own
    from ..trainer_core.data.scan.own_file import is_outside, remember

    pictures, read = question.get("pictures"), question.get("read")
    if not isinstance(pictures, dict) or not isinstance(read, str) or not pictures:
        raise Refused("pictures must be an object of pictures, and read the sha256 of the file, or empty.", 400)
    if len(pictures) > MOST_NAMES or any(map(is_outside, pictures)):
        raise Refused(f"pictures must be at most {MOST_NAMES} names of pictures inside the folder.", 400)
    changes = {name: own_of(value, name) for name, value in pictures.items()}
    for name, own in changes.items():
        if own.to_dict():  # what is no longer set may be of a picture that is gone
            find_picture(folder, name, folders.writable())
    try:
        before, now = write_own(folder, changes, read, folders.access(), keep=partial(remember, _before(folder)))
    except Changed as problem:
        raise Refused(str(problem), 409) from problem
    return {"before": before, "read": now}


# --- masks -------------------------------------------------------------------------------------------------


def paint(_: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Copy a picture with its mask to where ComfyUI's mask editor reads it; answer with that place, and {was}."""
    from ..trainer_core.data.images import DECODER_ERRORS, decoder_error
    from ..trainer_core.data.painted import draw_for_painting, state_of_mask

    place = folders.temp_folder() / "atelier-painting" / f"{secrets.token_hex(8)}.png"
    was = state_of_mask(picture, folders.access())
    try:
        with _drawing:
            draw_for_painting(picture, place, folders.access())
    except DECODER_ERRORS as problem:
        raise Refused(say("{0} cannot be shown: {1}.", picture.name, decoder_error(problem)), 415) from problem
    return {"filename": place.name, "subfolder": place.parent.name, "type": "temp", "was": was}


def keep_mask(question: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Write {mask: PNG in base64, white where it trains} beside a picture whose mask is still `was`."""
    from ..trainer_core.data.painted import save_painted

    content = question.get("mask")
    try:
        data = base64.b64decode(content if isinstance(content, str) else "", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data.startswith(b"\x89PNG"):
        raise Refused("mask must be a PNG in base64.", 400)
    save_painted(picture, data, _was(question), _earlier(picture), folders.access())
    return _mask(picture)


def undo_mask(question: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Bring back the mask that was replaced last; the one in its place is kept, so that the same brings that back."""
    from ..trainer_core.data.painted import undo_painted

    undo_painted(picture, _was(question), _earlier(picture), folders.access())
    return _mask(picture)


def _mask(picture: Path) -> dict[str, Any]:
    from ..trainer_core.data.painted import state_of_mask

    return {"mask": state_of_mask(picture, folders.access()), "earlier": True}


def _was(question: dict[str, Any]) -> str:
    was = question.get("was")
    if not isinstance(was, str):
        raise Refused("was must be the sha256 of the mask, or empty.", 400)
    return was


def _earlier(picture: Path) -> Path:
    """The file that keeps the mask of a picture that was replaced last."""
    return folders.earlier_folder() / "masks" / f"{_digest(picture)}.png"


def _before(folder: Path) -> Path:
    """The file that keeps what was set for a folder's pictures before their last change."""
    return folders.earlier_folder() / "settings" / f"{_digest(folder)}.json"


def _digest(place: Path) -> str:
    return hashlib.sha256(str(place).encode(errors="replace")).hexdigest()


# --- how it looks ------------------------------------------------------------------------------------------


def answer_view(request: web.Request) -> web.Response:
    """Answer with a picture of a folder, upright; as `masked`, what its mask leaves out is red.

    A film plays as `large`: its beginning is an animated WebP.
    """
    from ..trainer_core.data.films import FilmError, draw_playing, is_film
    from ..trainer_core.data.images import DECODER_ERRORS, decoder_error
    from ..trainer_core.data.painted import draw_for_page

    folder = folders.find_folder(request.query.get("folder", ""), "Concept Dataset")
    path, data = find_picture(folder, request.query.get("picture"), folders.access(), clips=True), io.BytesIO()
    kind = request.query.get("as", "masked")
    if kind not in SIDES:
        raise Refused(f"as must be {', '.join(SIDES)}.", 400)
    try:
        with _drawing:
            if plays := kind == "large" and is_film(path):
                data.write(draw_playing(path, PLAYED))
            else:
                drawn = draw_for_page(path, SIDES[kind], folders.access() if kind == "masked" else None)
                drawn.save(data, format="JPEG", quality=85)
    except FilmError as problem:
        raise Refused(say("{0} cannot be shown: {1}.", path.name, str(problem)), 415) from problem
    except DECODER_ERRORS as problem:
        raise Refused(say("{0} cannot be shown: {1}.", path.name, decoder_error(problem)), 415) from problem
    # An address that carries the picture's digest is another one for another content.
    cache = "private, max-age=604800" if request.query.get("v") else "no-cache"
    form = "image/webp" if plays else "image/jpeg"
    return web.Response(body=data.getvalue(), content_type=form, headers={"Cache-Control": cache})
