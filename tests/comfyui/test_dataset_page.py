"""What the page of a dataset asks the server: its pictures as they are trained, changes of captions, and undo."""

import io
import json
import re
from pathlib import Path
from urllib.parse import urlencode

import pytest
from films import film
from PIL import Image
from train_graph import changed, concept, node, train_graph

from comfy_client import ComfyClient, ComfyServer, send
from lora_atelier.dev import TINY_BASE, TINY_CLIP

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def ask(comfy: ComfyClient, name: str, graph: dict, of: str = "data", plan: str = "train", **more: object) -> dict:
    """Ask as the page does; the status of the answer is in it."""
    status, answer = send(comfy, f"/atelier/dataset/{name}", {"prompt": graph, "node": of, "plan": plan, **more})
    return {"status": status, **answer}


def linked_to(model: str, text: str) -> dict:
    """Build the nodes of a linked model, by the names of two checkpoints."""
    loaders = {name: node("CheckpointLoaderSimple", ckpt_name=file) for name, file in (("of", model), ("clip", text))}
    return {**loaders, "base": node("AtelierConnectModel", model=["of", 0], clip=["clip", 1], vae=["of", 2])}


def test_captions_are_changed_undone_and_never_overwritten_unasked(comfy: ComfyClient, pictures: Path) -> None:
    (pictures / "2.txt").unlink()
    graph = changed(train_graph(pictures.name, steps=2), "data", trigger_word="sks", repeats=3.0)
    opened = ask(comfy, "open", graph)
    assert opened["status"] == 200 and opened["remark"] == "" and opened["last"] is None, opened
    first, _, third = opened["pictures"]
    assert (first["bucket"], first["repeats"], first["file"]) == ([64, 64], 3.0, "0.txt")
    assert 0 < first["cut"] < 1 and len(first["corners"]) == 4 and third["file"] == "2.txt" and third["seen"] == ""
    told = ask(comfy, "caption", graph, concept=0, text="a circle")
    assert told["caption"] == "sks a circle" and told["tokens"] == 3 and told["cut"] == "" and told["remark"] == ""
    long = ask(comfy, "caption", graph, concept=0, text="circle " * 3000)
    assert long["cut"] and long["caption"].endswith(long["cut"])

    every = [[each["concept"], each["name"], each["seen"]] for each in opened["pictures"]]
    replace = {"kind": "find", "find": "circle", "text": "disc"}
    dry = ask(comfy, "edit", graph, pictures=every, operation=replace, dry=True)
    assert (dry["count"], dry["of"]) == (2, 3) and (pictures / "0.txt").read_text() == first["text"]
    assert dry["shown"][0] == [0, "0.png", first["text"], first["text"].replace("circle", "disc")]
    done = ask(comfy, "edit", graph, pictures=every, operation=replace)
    assert done["count"] == 2 and done["last"]["what"] == "find" and "disc" in (pictures / "1.txt").read_text()
    new = ask(comfy, "edit", graph, pictures=[every[2]], operation={"kind": "text", "text": "third"})
    assert new["now"][0][:3] == [0, "2.png", "third"] and (pictures / "2.txt").read_text() == "third"

    (pictures / "0.txt").write_text("theirs")
    seen = {each[1]: each[3] for each in done["now"]}
    mine = [[0, "0.png", seen["0.png"]], [0, "1.png", seen["1.png"]]]
    refused = ask(comfy, "edit", graph, pictures=mine, operation={"kind": "text", "text": "mine"})
    assert refused["status"] == 409 and "Another program" in refused["error"]
    assert [each[:4] for each in refused["meanwhile"]] == [[0, "0.png", "theirs", "mine"]]
    assert "disc" in (pictures / "1.txt").read_text()
    mine[0][2] = refused["meanwhile"][0][4]
    assert ask(comfy, "edit", graph, pictures=mine, operation={"kind": "text", "text": "mine"})["count"] == 2

    for left in ("theirs", "theirs"):  # the second undo takes the third caption back
        last = ask(comfy, "open", graph)["last"]
        assert ask(comfy, "undo", graph, number=last["number"], pictures=[])["status"] == 200
        assert (pictures / "0.txt").read_text() == left
    assert not (pictures / "2.txt").exists()
    again = ask(comfy, "redo", graph, number=ask(comfy, "open", graph)["next"]["number"], pictures=[])
    assert again["now"][0][:3] == [0, "2.png", "third"] and (pictures / "2.txt").read_text() == "third"
    assert again["next"]["what"] == "text" and ask(comfy, "undo", graph, **again["last"], pictures=[])["count"] == 1
    last = ask(comfy, "open", graph)["last"]
    refused = ask(comfy, "undo", graph, number=last["number"], pictures=[])
    assert refused["status"] == 409 and refused["meanwhile"][0][2:4] == ["theirs", first["text"]]
    seen = [[0, "0.png", refused["meanwhile"][0][4]]]
    assert ask(comfy, "undo", graph, number=last["number"], pictures=seen)["last"] is None
    assert (pictures / "0.txt").read_text() == first["text"]


def test_without_its_sub_folders_a_folder_undoes_no_change_in_them(comfy: ComfyClient, pictures: Path) -> None:
    (pictures / "sub").mkdir()
    (pictures / "0.png").rename(pictures / "sub" / "0.png")
    whole = train_graph(pictures.name, steps=2)
    flat = changed(whole, "pictures", recursive=False)
    ours = {"kind": "text", "text": "ours"}
    for graph, name in ((flat, "1.png"), (whole, "sub/0.png")):
        shown = {each["name"]: each["seen"] for each in ask(comfy, "open", graph)["pictures"]}
        assert ask(comfy, "edit", graph, pictures=[[0, name, shown[name]]], operation=ours)["count"] == 1
    last = ask(comfy, "open", whole)["last"]
    refused = ask(comfy, "undo", flat, number=last["number"], pictures=[])
    assert refused["status"] == 409 and (pictures / "sub" / "0.txt").read_text() == "ours"
    own = ask(comfy, "open", flat)["last"]
    assert ask(comfy, "undo", flat, number=own["number"], pictures=[])["count"] == 1
    assert (pictures / "1.txt").read_text() != "ours" == (pictures / "sub" / "0.txt").read_text()
    assert ask(comfy, "undo", whole, number=last["number"], pictures=[])["count"] == 1


def test_pictures_of_a_role_of_their_own_are_shown_too(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name, steps=2)
    own = {"pictures": {"0.png": {"role": "regularisation"}, "1.png": {"role": "validation"}}}
    (pictures / "lora_atelier.json").write_text(json.dumps(own), encoding="utf-8")
    opened = ask(comfy, "open", graph)
    assert opened["status"] == 200, opened
    assert [(each["concept"], each["name"], each["file"]) for each in opened["pictures"]] == [
        (0, f"{i}.png", f"{i}.txt") for i in range(3)
    ]
    assert opened["pictures"][1]["repeats"] == 0


def test_a_changed_caption_trains_anew_and_says_so(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name, name=pictures.name, steps=2)
    assert comfy.queue(graph).ok
    seen = [[0, "1.png", ask(comfy, "open", graph)["pictures"][1]["seen"]]]
    assert ask(comfy, "edit", graph, pictures=seen, operation={"kind": "add", "text": "new"})["count"] == 1
    again = comfy.queue(graph)
    assert again.ok and again.did_run("data") and again.did_run("train")
    said = json.dumps([data for _, data in again.custom()])
    assert re.search(r"Trained anew[^\"]*captions", said), said


def test_a_preview_opens_all_its_folders_and_odd_places_say_why(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    graph = train_graph(pictures.name)
    graph["second"] = concept("atelier:concept_example", dataset=["data", 0])
    values = {"batch_size": 1, "seed": 0, "epoch": 0, "columns": 3, "limit": 9}
    graph["sheet"] = node("AtelierDatasetPreview", dataset=["second", 0], resolution=64, **values)
    opened = ask(comfy, "open", graph, of="sheet", plan="sheet")
    assert {each["concept"] for each in opened["pictures"]} == {0, 1}
    assert opened["concepts"]["0"]["elsewhere"] == "" and "are only read" in opened["concepts"]["1"]["elsewhere"]
    example = next(each for each in opened["pictures"] if each["concept"] == 1)
    asked = [[1, example["name"], example["seen"]]]
    refused = ask(comfy, "edit", graph, "sheet", "sheet", pictures=asked, operation={"kind": "text", "text": "x"})
    assert refused["status"] == 409 and "are only read" in refused["error"]

    alone = {"data": concept(pictures.name)}
    assert "No Train LoRA is linked" in ask(comfy, "open", alone, plan="")["remark"]
    named = changed(graph, "data", captions_from="file_name")
    opened = ask(comfy, "open", named, plan="train")
    assert opened["pictures"][0]["file"] == "" and "names of files" in opened["concepts"]["0"]["elsewhere"]
    asked = [[0, "0.png", ""]]
    refused = ask(comfy, "edit", named, pictures=asked, operation={"kind": "text", "text": "x"})
    assert refused["status"] == 409 and "no caption file" in refused["error"]
    made = changed(graph, "data", dataset=["drawn", 0])
    made["drawn"] = node("AtelierImageConcept", images=["x", 0])
    opened = ask(comfy, "open", made)
    assert "Shown without the nodes behind it" in opened["remark"] and len(opened["pictures"]) == 3
    for wrong in ([["0", "0.png", ""]], [[5, "0.png", ""]], "all", None):
        assert ask(comfy, "edit", graph, pictures=wrong, operation={"kind": "sort"})["status"] == 400
    assert ask(comfy, "edit", graph, pictures=[], operation={"kind": 5})["status"] == 400
    assert send(comfy, "/atelier/dataset/edit", {"prompt": 1})[0] == 400

    folder = str(server.base / "input" / pictures.name)
    drawn = comfy.request("/atelier/pictures/view?" + urlencode({"folder": folder, "picture": "0.png", "as": "small"}))
    assert Image.open(io.BytesIO(drawn)).size == (80, 64)
    (pictures / "moving.mp4").write_bytes(film(5))
    for kind, form, frames in (("large", "WEBP", 5), ("still", "JPEG", 1)):
        shown = comfy.request(
            "/atelier/pictures/view?" + urlencode({"folder": folder, "picture": "moving.mp4", "as": kind})
        )
        image = Image.open(io.BytesIO(shown))
        assert (image.format, getattr(image, "n_frames", 1), image.size) == (form, frames, (64, 48))
    linked = {**graph, **linked_to(TINY_CLIP.name, TINY_BASE.name)}
    assert [each["name"] for each in ask(comfy, "open", linked)["pictures"]][-1] == "moving.mp4"
    assert ask(comfy, "open", graph)["pictures"][-1]["name"] == "2.png"  # a model of pictures takes no clip
    for prompt, left_out in ((linked, False), (graph, True), ({}, False)):
        trained = {"prompt": prompt, "node": "data", "plan": "train"}
        asked = {
            "prompt": {name: graph[name] for name in ("data", "captions", "pictures")},
            "node": "data",
            "trained": trained,
        }
        _, answer = send(comfy, "/atelier/folders/look", asked)
        films = {"films": 1, "uncaptioned": int(not left_out), "left_out": left_out}
        assert answer == {"pictures": 3, **films}, answer
    (pictures / "moving.mp4").write_bytes(b"no film")
    asked = urlencode({"folder": folder, "picture": "moving.mp4", "as": "large"})
    status, answer = send(comfy, f"/atelier/pictures/view?{asked}")
    assert status == 415 and "moving.mp4 cannot be shown" in answer["error"]
    for odd in ({"folder": "/etc", "picture": "x.png"}, {"folder": folder, "picture": "../../x.png"}, {"as": "x"}):
        asked = urlencode({"folder": folder, "picture": "0.png"} | odd)
        status, answer = send(comfy, f"/atelier/pictures/view?{asked}")
        assert status in (400, 409) and answer["error"], odd


def test_a_folder_of_more_pictures_than_a_page_shows_is_not_listed(comfy: ComfyClient, pictures: Path) -> None:
    for number in range(20_001):
        (pictures / f"x{number}.png").touch()
    graph, written = train_graph(pictures.name), {"kind": "text", "text": "x"}
    for name, more in (
        ("open", {}),
        ("edit", {"pictures": [[0, "0.png", ""]], "operation": written, "dry": True}),
        ("undo", {"number": "1", "pictures": []}),
    ):
        refused = ask(comfy, name, graph, **more)
        assert refused["status"] == 409 and "holds more than 20000 files" in refused["error"], refused
    assert send(comfy, "/atelier/pictures/names", {"folder": pictures.name})[0] == 409
