"""What a page sets for single pictures is written into their folder, undone, and never over another change."""

import base64
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from train_graph import train_graph

from comfy_client import ComfyClient, ComfyServer, send


@pytest.fixture
def folder(server: ComfyServer, request: pytest.FixtureRequest) -> Path:
    place = server.base / "input" / f"single-{request.node.name[:20]}"
    (place / "sub").mkdir(parents=True, exist_ok=True)
    for name, size in (("a.png", (64, 64)), ("sub/b.png", (128, 64))):
        Image.new("RGB", size, (20, 90, 160)).save(place / name)
        (place / name).with_suffix(".txt").write_text("a thing", encoding="utf-8")
    return place


def png(value: int, size: tuple[int, int] = (64, 64)) -> str:
    data = io.BytesIO()
    Image.new("L", size, value).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_settings_are_written_undone_and_seen_by_a_run(comfy: ComfyClient, folder: Path) -> None:
    def ask(what: str, **question: Any) -> tuple[int, dict[str, Any]]:
        return send(comfy, f"/atelier/pictures/{what}", {"folder": folder.name, **question})

    assert ask("names")[1] == {"names": ["a.png", "sub/b.png"]}
    status, first = ask("one", picture="sub/b.png", resolution="64x64")
    assert (status, first["own"], first["read"], first["width"]) == (200, {}, "", 128)
    assert first["before"] is None
    assert first["frame"] == [0.25, 0, 0.75, 1]
    status, set_ = ask("own", read="", pictures={"sub/b.png": {"focus": [1, 0.5]}, "a.png": {"leave_out": True}})
    assert status == 200 and set_["before"] == {"sub/b.png": {}, "a.png": {}}
    assert ask("one", picture="sub/b.png", resolution="64x64")[1]["frame"] == [0.5, 0, 1, 1]
    assert ask("one", picture="sub/b.png")[1]["before"] == {} and ask("one", picture="a.png")[1]["before"] == {}
    written = json.loads((folder / "lora_atelier.json").read_text(encoding="utf-8"))
    assert written == {"pictures": {"a.png": {"leave_out": True}, "sub/b.png": {"focus": [1.0, 0.5]}}}
    graph = train_graph(folder.name, name=folder.name, steps=1)
    result = comfy.queue(graph)
    assert result.ok, result.error
    assert "lora_atelier.json leaves out 1 picture: a.png." in str(result.outputs)
    status, answer = ask("own", read="", pictures={"a.png": {}})
    assert status == 409 and "lora_atelier.json was changed meanwhile" in answer["error"]
    assert ask("own", read=set_["read"], pictures=set_["before"])[1]["read"] == ""
    assert not (folder / "lora_atelier.json").exists()
    again = comfy.queue(graph)
    assert again.ok and "leaves out" not in str(again.outputs) and again.did_run("train")


def test_a_mask_is_painted_undone_and_never_over_another(comfy: ComfyClient, server: ComfyServer, folder: Path) -> None:
    def ask(what: str, **question: Any) -> tuple[int, dict[str, Any]]:
        return send(comfy, f"/atelier/pictures/{what}", {"folder": folder.name, "picture": "a.png", **question})

    mask = folder / "a-masklabel.png"
    place = ask("paint")[1]
    assert place["was"] == "" and place["type"] == "temp"
    with Image.open(server.base / "temp" / place["subfolder"] / place["filename"]) as copy:
        assert copy.mode == "RGBA" and copy.getextrema()[3] == (255, 255)
    status, kept = ask("mask", mask=png(200), was="")
    assert status == 200 and Image.open(mask).getextrema() == (200, 200)
    place = ask("paint")[1]
    assert place["was"] == kept["mask"] == ask("one")[1]["mask"]
    with Image.open(server.base / "temp" / place["subfolder"] / place["filename"]) as copy:
        assert copy.getextrema()[3] == (55, 55)  # what is trained is painted, thus transparent
    assert ask("mask", mask=png(9), was="")[0] == 409 and Image.open(mask).getextrema() == (200, 200)
    status, answer = ask("mask", mask=png(9, (32, 64)), was=kept["mask"])
    assert status == 409 and "The mask has 32x64 pixels and a.png 64x64" in answer["error"]
    assert ask("mask", mask=base64.b64encode(b"\x89PNG broken").decode(), was=kept["mask"])[0] == 409
    black = ask("mask", mask=png(0), was=kept["mask"])[1]
    assert black["mask"] == "" and not mask.exists()  # nothing painted: no mask
    assert ask("mask/undo", was="")[1]["mask"] == kept["mask"]
    assert ask("mask/undo", was=kept["mask"])[1]["mask"] == "" and not mask.exists()
    view = comfy.request(f"/atelier/pictures/view?folder={folder.name}&picture=a.png")
    assert Image.open(io.BytesIO(view)).format == "JPEG"


def test_a_mask_of_another_ending_is_removed_and_undone(comfy: ComfyClient, folder: Path) -> None:
    def ask(what: str, **question: Any) -> tuple[int, dict[str, Any]]:
        return send(comfy, f"/atelier/pictures/{what}", {"folder": folder.name, "picture": "a.png", **question})

    mask = folder / "a-masklabel.webp"
    Image.new("RGB", (64, 64), (200, 200, 200)).save(mask, lossless=True)
    was = ask("one")[1]["mask"]
    assert was and ask("mask", mask=png(0), was=was)[1]["mask"] == "" and not mask.exists()
    assert ask("mask/undo", was="")[1]["mask"] == was
    assert ask("mask", mask=png(7), was=was)[0] == 200 and ask("one")[1]["mask"] != was
    assert [path.name for path in folder.glob("a-mask*")] == ["a-masklabel.png"]


def test_a_link_to_elsewhere_is_neither_shown_nor_read(comfy: ComfyClient, folder: Path, tmp_path: Path) -> None:
    Image.new("L", (64, 64), 9).save(tmp_path / "mask.png")
    (tmp_path / "own.json").write_text('{"pictures": {}}', encoding="utf-8")
    view = f"/atelier/pictures/view?folder={folder.name}&picture=a.png"
    before, question = comfy.request(view), {"folder": folder.name, "picture": "a.png"}
    (folder / "a-masklabel.png").symlink_to(tmp_path / "mask.png")
    assert comfy.request(view) == before and send(comfy, "/atelier/pictures/one", question)[1]["mask"] == ""
    (folder / "lora_atelier.json").symlink_to(tmp_path / "own.json")
    status, answer = send(comfy, "/atelier/pictures/one", question)
    assert status == 409 and "is a link to a place that may not be read" in answer["error"]


def test_nothing_is_written_through_a_link_to_elsewhere(
    comfy: ComfyClient, server: ComfyServer, folder: Path, tmp_path: Path
) -> None:
    """A folder of input, one inside it, a picture, its caption, its mask and its settings may each be such a link."""
    away, root = tmp_path / "away", server.base / "input"
    away.mkdir()
    for name in ("p.png", "p-masklabel.png"):
        Image.new("L", (64, 64), 9).save(away / name)
    (away / "p.txt").write_text("theirs")
    (away / "own.json").write_text('{"pictures": {}}')
    whole = root / f"{folder.name} away"
    links = {
        whole: away,
        folder / "away": away,
        folder / "p.png": away / "p.png",
        folder / "a-masklabel.png": away / "p-masklabel.png",
        folder / "lora_atelier.json": away / "own.json",
    }
    (folder / "a.txt").unlink()
    for link, to in ({**links, folder / "a.txt": away / "p.txt"}).items():
        link.symlink_to(to)
    before = {path.name: path.read_bytes() for path in away.iterdir()}
    for place, name in ((whole, "p.png"), (folder, "away/p.png"), (folder, "p.png"), (folder, "a.png")):
        asked = {"folder": place.name, "picture": name}
        was = send(comfy, "/atelier/pictures/one", asked)[1].get("mask", "")
        answers = [
            send(comfy, "/atelier/pictures/own", asked | {"pictures": {name: {"repeats": 2}}, "read": ""}),
            send(comfy, "/atelier/pictures/mask", asked | {"mask": png(255), "was": was}),
            send(comfy, "/atelier/pictures/mask/undo", asked | {"was": ""}),
        ]
        texts = {
            "prompt": train_graph(place.name, name=folder.name, steps=1),
            "node": "data",
            "plan": "",
            "pictures": [[0, name, ""]],
            "operation": {"kind": "text", "text": "ours"},
        }
        answers.append(send(comfy, "/atelier/dataset/edit", texts))
        refused = [status >= 400 and bool(answer["error"]) for status, answer in answers]
        if name == "a.png":  # its own mask takes the place of the link
            refused = [refused[0]]
        assert all(refused[:2]), (place, name, answers)
        assert {path.name: path.read_bytes() for path in away.iterdir()} == before, (place, name)
    status, new = send(comfy, "/atelier/folders/new", {"name": whole.name, "files": ["away/p.png"]})
    assert status == 200 and new["folder"] != whole.name and not (root / new["folder"] / "away").exists()
    for link in (whole, folder / "away"):
        link.unlink()


@pytest.mark.parametrize("kept", [0.1, 0.9, 1.0])
def test_an_upload_whose_client_leaves_writes_no_file(comfy: ComfyClient, folder: Path, kept: float) -> None:
    """ComfyUI writes a file when all of it is there: what is sent of one, and the end of the form, decides nothing."""
    edge, data = b"--edge", (folder / "a.png").read_bytes() * 50
    head = b"\r\nContent-Disposition: form-data; name="
    form = edge + head + b'"subfolder"\r\n\r\n' + folder.name.encode() + b"\r\n"
    form += edge + head + b'"image"; filename="new.png"\r\n\r\n' + data + b"\r\n" + edge + b"--\r\n"
    host, _, port = comfy.url.partition("//")[2].rpartition(":")
    lines = [
        "POST /upload/image HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: multipart/form-data; boundary=edge",
        f"Content-Length: {len(form)}",
    ]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + form[: round(len(form) * kept)])
        if kept == 1:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert comfy.request("/system_stats")  # the server has read what was sent
    assert [path.read_bytes() for path in folder.glob("new*")] == ([data] if kept == 1 else [])


@pytest.mark.parametrize(
    "name",
    ["../a.png", "/etc/passwd", "sub/../../x.png", "a.txt", "gone.png", 5, None, "x" * 2000, "a\0.png", "\ud800.png"],
)
def test_a_name_that_is_no_picture_of_the_folder_is_refused(comfy: ComfyClient, folder: Path, name: object) -> None:
    for what in ("one", "paint", "mask", "mask/undo"):
        status, answer = send(comfy, f"/atelier/pictures/{what}", {"folder": folder.name, "picture": name})
        assert status in (400, 404) and answer["error"]
    for own in ({"repeats": 2}, {}) if isinstance(name, str) else ():
        question = {"folder": folder.name, "read": "", "pictures": {name: own}}
        gone = not own and name in ("a.txt", "gone.png")  # what was set for a picture that is no longer there
        assert send(comfy, "/atelier/pictures/own", question)[0] in ((200,) if gone else (400, 404))
    assert not (folder / "lora_atelier.json").exists()


@pytest.mark.parametrize("folder_name", ["atelier:concept_example", "/etc", "../input", ""])
def test_no_folder_is_changed_that_is_not_of_the_person(comfy: ComfyClient, folder_name: str) -> None:
    for what in ("names", "own"):
        status, answer = send(
            comfy, f"/atelier/pictures/{what}", {"folder": folder_name, "read": "", "pictures": {"a.png": {}}}
        )
        assert status == 409 and answer["error"]
    own = {"folder": folder_name, "read": "", "pictures": {"a.png": {}}}
    assert send(comfy, "/atelier/pictures/own", own, **{"Atelier-Token": None})[0] == 403
