"""Write Captions and Write Masks: each answer is written as it comes, kept at Cancel, and never asked for twice."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image
from train_graph import concept, node

from comfy_client import ComfyClient, ComfyServer


@pytest.fixture
def greys(server: ComfyServer, tmp_path: Path) -> Path:
    """Four pictures that tell themselves apart by their grey, one of them in a sub-folder."""
    folder = server.base / "input" / tmp_path.name
    (folder / "more").mkdir(parents=True)
    for i, name in enumerate(("a.png", "b.png", "c.webp", "more/d.png")):
        Image.new("RGB", (96, 64), (150 + 20 * i,) * 3).save(folder / name, lossless=True)
    return folder


def graph(folder: Path, kind: str = "AtelierWriteCaptions", word: str = "grey", **inputs: object) -> dict:
    captions = kind == "AtelierWriteCaptions"
    usual = {"existing": "keep"} | ({"prefix": ""} if captions else {})
    return {
        "data": concept(folder.name),
        "see": node("AtelierDatasetPictures", dataset=["data", 0], longest_side=64, show="picture"),
        "ask": node("Describe", image=["see", 0], word=word),
        "write": node(
            kind,
            dataset=["data", 0],
            **({"texts": ["ask", 0]} if captions else {"masks": ["ask", 1]}),
            **(usual | inputs),
        ),
    }


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.txt"))}


def report(comfy: ComfyClient, prompt: dict) -> str:
    result = comfy.queue(prompt)
    assert result.ok, result.error
    (said,) = [each["text"][0] for each in result.outputs.values() if "text" in each]
    return said


def test_each_text_stands_beside_its_picture(comfy: ComfyClient, greys: Path) -> None:
    (greys / "b.txt").write_text("mine")
    prompt = graph(greys, prefix=" photo of ")
    result = comfy.queue(prompt)
    assert result.ok, result.error
    found = {"a.txt": "photo of grey 150\n", "b.txt": "mine", "c.txt": "photo of grey 190\n"}
    assert texts(greys) == found | {"more/d.txt": "photo of grey 210\n"}
    assert sum(data.get("display_node") == "ask" for kind, data in result.events if kind == "executing") == 3
    assert report(comfy, prompt) == "0 texts written, 3 written before, 1 kept."
    (greys / "a.txt").unlink()
    assert report(comfy, prompt) == "1 text written, 2 written before, 1 kept."


def test_what_follows_waits_for_all_texts(comfy: ComfyClient, greys: Path) -> None:
    after = {"resolution": 64, "batch_size": 2, "seed": 1, "epoch": 0, "columns": 3, "limit": 9}
    sheet = node("AtelierDatasetPreview", dataset=["write", 0], **after)
    result = comfy.queue(graph(greys) | {"sheet": sheet, "table": node("PreviewAny", source=["sheet", 2])})
    assert result.ok, result.error
    said = result.outputs["table"]["text"][0]
    assert all(f"grey {level}" in said for level in (150, 170, 190, 210))


def test_an_edit_pair_is_seen_side_by_side(comfy: ComfyClient, server: ComfyServer, greys: Path) -> None:
    before = greys.with_name(f"{greys.name}-before")
    (before / "more").mkdir(parents=True)
    for path in (each for each in greys.rglob("*.*")):
        Image.new("RGB", (96, 64)).save(before / path.relative_to(greys))
    prompt = graph(greys)
    values = {"fit": "as_picture", "use": "edit", "folder_2": "", "folder_3": ""}
    prompt["pairs"] = node("AtelierControlPictures", dataset=["data", 0], folder=before.name, **values)
    prompt["see"]["inputs"] |= {"dataset": ["pairs", 0], "show": "before and after"}
    prompt["write"]["inputs"]["dataset"] = ["pairs", 0]
    assert report(comfy, prompt) == "4 texts written."
    assert texts(greys)["a.txt"] == "grey 75\n"  # half black
    prompt["see"]["inputs"]["dataset"] = prompt["write"]["inputs"]["dataset"] = ["data", 0]
    (greys / "a.txt").unlink()
    assert "a.png has no control picture; link Control Pictures" in str(comfy.queue(prompt).error)


def test_what_happens_to_a_text_that_is_there(comfy: ComfyClient, greys: Path) -> None:
    (greys / "a.txt").write_text("A wall.\n")
    (greys / "b.caption").write_text("tag")
    appending = graph(greys, existing="append")
    assert report(comfy, appending) == "4 texts written."
    assert texts(greys)["a.txt"] == "A wall. grey 150\n" and texts(greys)["b.txt"] == "grey 170\n"
    assert report(comfy, appending) == "0 texts written, 4 written before."  # nothing is put there twice
    (greys / "c.txt").write_text("mine")
    assert report(comfy, appending) == "1 text written, 3 written before."
    assert texts(greys)["c.txt"] == "mine, grey 190\n"
    assert report(comfy, graph(greys, existing="replace", word="light")) == "4 texts written."  # asked for anew
    assert texts(greys)["c.txt"] == "light 190\n" and (greys / "b.caption").read_text() == "tag"
    said = report(comfy, graph(greys, existing="replace", word=""))
    assert said == "0 texts written. Nothing came for 4 pictures: a.png, b.png, c.webp, more/d.png."
    assert texts(greys)["c.txt"] == "light 190\n"


@pytest.mark.parametrize("kind", ["AtelierWriteCaptions", "AtelierWriteMasks"])
def test_cancel_keeps_what_is_written_and_the_next_run_goes_on(
    comfy: ComfyClient, server: ComfyServer, greys: Path, kind: str
) -> None:
    prompt, replaced = graph(greys, kind, existing="replace"), greys / "a.txt"
    if kind == "AtelierWriteMasks":
        replaced = greys / "a-masklabel.png"
        Image.new("L", (96, 64), 7).save(replaced)
    else:
        replaced.write_text("mine")
    asked = []

    def cancel_at_the_third(event: str, data: dict, result: object) -> None:
        if event == "executing" and data.get("display_node") == "ask":
            asked.append(data["node"])
            if len(asked) == 3:
                comfy.interrupt(result.prompt_id)

    with server.unhurried():
        assert comfy.queue(prompt, cancel_at_the_third).status == "interrupted"
    what = "text" if kind == "AtelierWriteCaptions" else "mask"
    assert len(list(greys.glob("*.txt" if what == "text" else "*-masklabel.png"))) == 2
    first = replaced.stat().st_mtime_ns
    said = report(comfy, prompt)
    assert said == f"2 {what}s written, 2 written before."
    assert replaced.stat().st_mtime_ns == first


def test_masks_have_the_size_of_their_pictures(comfy: ComfyClient, greys: Path) -> None:
    Image.new("L", (96, 64), 9).save(greys / "more" / "d-masklabel.png")  # a person's
    half = Image.new("RGB", (96, 64))
    half.save(greys / "b.png")
    half.paste((255, 255, 255), (48, 0, 96, 64))
    half.save(greys / "a.png")
    said = report(comfy, graph(greys, "AtelierWriteMasks"))
    assert said == "2 masks written, 1 kept. Nothing came for 1 picture: b.png."  # all black
    with Image.open(greys / "a-masklabel.png") as mask, Image.open(greys / "more" / "d-masklabel.png") as kept:
        assert mask.size == (96, 64) and mask.mode == "L"
        assert np.asarray(mask)[:, :42].max() == 0 and np.asarray(mask)[:, 54:].min() == 255
        assert kept.getextrema() == (9, 9)


def test_what_cannot_be_written_gets_one_sentence(comfy: ComfyClient, greys: Path) -> None:
    def said(prompt: dict) -> str:
        return str(comfy.queue(prompt).error)

    unlinked = graph(greys)
    del unlinked["write"]["inputs"]["texts"]
    assert "Nothing is linked into texts of Write Captions; link" in said(unlinked)
    blind = graph(greys)
    blind["write"]["inputs"]["texts"] = ["other", 0]
    blind["other"] = node("PrimitiveString", value="a wall")
    assert "texts of Write Captions sees no picture of Dataset Pictures; link" in said(blind)
    example = graph(greys)
    example["data"] = concept("atelier:concept_example")
    assert "are only read. Copy the folder into input, and set folder of Concept Dataset to the copy." in said(example)
    named = graph(greys)
    named["data"] = concept(greys.name, captions_from="file_name")
    assert "Concept 1 takes its captions from file_name, not from texts beside its pictures; set captions_from" in said(
        named
    )
    by_hand = {"x": node("LoraAtelierNext", run="1"), "see": node("PreviewAny", source=["x", 0])}
    assert "only works inside of Write Captions and Write Masks" in said(by_hand)


def test_ways_that_fork_and_meet_again_are_looked_at_once(comfy_modules: ModuleType) -> None:
    from lora_atelier.nodes.comfyui.writing import digest_of_way  # ComfyUI's modules are there by now

    graph = {"0": node("AtelierDatasetPictures", dataset=["data", 0], longest_side=64, show="picture")}
    for number in range(40):
        graph[str(number + 1)] = node("Join", a=[str(number), 0], b=[str(number), 0])
    prompt = SimpleNamespace(get_node=graph.__getitem__)
    before = digest_of_way(prompt, ("40", 0))
    graph["1"]["inputs"]["word"] = "light"
    assert digest_of_way(prompt, ("40", 0)) != before


@pytest.mark.thorough
def test_many_pictures_are_asked_for_in_parts(comfy: ComfyClient, server: ComfyServer, tmp_path: Path) -> None:
    """In their order, in the memory of one: kept, these would take 720 MB."""
    folder, count = server.base / "input" / f"{tmp_path.name}-many", 230
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (512, 512), (i, i, i)).save(folder / f"{i:03}.png")
    prompt, memory = graph(folder), psutil.Process(server.process.pid).memory_info
    prompt["see"]["inputs"]["longest_side"] = 512
    taken: list[int] = []

    def measure(event: str, data: dict, result: object) -> None:
        if event == "executing":
            taken.append(memory().rss)

    result = comfy.queue(prompt, measure)
    assert result.ok, result.error
    assert max(taken) - taken[0] < 200e6
    asked = [data["node"] for kind, data in result.events if kind == "executing" and data.get("display_node") == "ask"]
    assert [int(each.split(".")[1]) for each in asked] == list(range(count))
    assert texts(folder) == {f"{i:03}.txt": f"grey {i}\n" for i in range(count)}
    most = max(len(data["nodes"]) for kind, data in result.events if kind == "progress_state")
    assert most < 20  # each event tells of few nodes, however many have run
