"""What a stranger's workflow may have read: attacks over HTTP, on folders that nobody allowed and by odd prompts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from train_graph import changed, chosen, draw_pictures, masks, node, train_graph

from comfy_client import ComfyClient, ComfyServer, refused, send
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
SECRET = "swordfish"  # in files that no answer may hold
OUTSIDE = "outside ComfyUI's folders"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Give a folder with pictures and a secret that lies outside ComfyUI's folders."""
    folder = draw_pictures(tmp_path / "private")
    (folder / "secret.txt").write_text(f"{SECRET}, {SECRET}-2\n", encoding="utf-8")
    return folder


@pytest.fixture
def allowed(server: ComfyServer) -> Iterator[Path]:
    """Give the list of allowed folders; afterwards it is as before."""
    path = server.base / "user" / "__atelier" / "allowed_folders.txt"
    before = path.read_bytes() if path.exists() else None
    yield path
    path.unlink(missing_ok=True)
    if before is not None:
        path.write_bytes(before)


def everything(server: ComfyServer, since: float) -> bytes:
    """Join all that the server hands out of models and output, and that it has written since a time."""
    files = [path for part in ("models", "output") for path in (server.base / part).rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files if path.stat().st_mtime >= since)


@pytest.mark.parametrize("how", ["absolute", "upwards", "link", "linked folder", "beside"])
def test_no_text_outside_the_allowed_folders_is_read(
    comfy: ComfyClient, server: ComfyServer, pictures: Path, foreign: Path, how: str
) -> None:
    """Not as a table, not as the lines of all pictures, not beside a picture, and not in a message."""
    since = foreign.stat().st_mtime
    named = {"absolute": str(foreign / "secret.txt"), "link": "link.txt", "linked folder": "away/secret.txt"}
    named["upwards"] = "../" * 20 + str(foreign / "secret.txt").lstrip("/")
    (pictures / "link.txt").symlink_to(foreign / "secret.txt")
    (pictures / "away").symlink_to(foreign, target_is_directory=True)
    graph = train_graph(pictures.name, name=f"secret {how}", steps=1)
    if how == "beside":
        (pictures / "0.txt").unlink()
        (pictures / "0.txt").symlink_to(foreign / "secret.txt")
        for link in ("away", "link.txt"):
            (pictures / link).unlink()
        refused(comfy, graph, "error", "1 link leads out of")
    else:
        for source in ("one_file", "table"):
            asked = changed(graph, "data", **chosen("captions_from", source, caption_file=named[how]))
            asked = changed(asked, "pictures", recursive=False)
            refused(comfy, asked, "error", "outside the folders that may be read")
    assert SECRET.encode() not in everything(server, since)


def test_a_caption_file_inside_comfyui_s_folders_is_read(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    """Named by its full path, by the training, or from the folder of the pictures, by a preview."""
    lines = server.base / "input" / f"{pictures.name}-lines.txt"
    lines.write_text("a drawn circle\n", encoding="utf-8")
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    result = comfy.queue(changed(graph, "data", **chosen("captions_from", "one_file", caption_file=str(lines))))
    assert result.ok, result.error
    with safe_open(server.base / "models" / "loras" / "atelier" / f"{pictures.name}.safetensors", "pt") as file:
        assert "a drawn circle" in file.metadata()["ss_tag_frequency"]
    plan = {"resolution": 64, "batch_size": 1, "seed": 1, "epoch": 0, "columns": 3, "limit": 3}
    graph["sheet"] = node("AtelierDatasetPreview", dataset=["data", 0], **plan)
    graph["manifest"] = node("PreviewAny", source=["sheet", 2])
    graph = changed(graph, "data", **chosen("captions_from", "one_file", caption_file=f"../{lines.name}"))
    result = comfy.queue(graph, only="manifest")
    assert result.ok and "a drawn circle" in result.outputs["manifest"]["text"][0], result.error
    lines.unlink()


@pytest.mark.parametrize("node", ["data", "masks"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{foreign}", OUTSIDE),
        ("/", OUTSIDE),
        ("/there/is/none", OUTSIDE),  # whether a folder exists is nobody's business either
        ("~", OUTSIDE),
        ("~nosuchuser/pictures", "There is no folder"),
        ("//server/share", "is a network address"),
        (r"\\server\share", "is a network address"),
        (r"\\?\UNC\server\share", "is a network address"),
        (r"\\.\pipe\x", "is a network address"),
        ("x" * 300, "There is no folder"),
        ("x/" * 600, "has 1200 characters"),
        ("a\0b", "has a character that no path can have"),
        ("a\ud800b", "has a character that no path can have"),
        ("link", OUTSIDE),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_folder_that_nobody_allowed_is_refused_before_anything_runs(
    comfy: ComfyClient, server: ComfyServer, pictures: Path, foreign: Path, node: str, name: str, sentence: str
) -> None:
    link = server.base / "input" / "link"
    link.symlink_to(foreign, target_is_directory=True)
    graph = train_graph(pictures.name)
    graph["masks"] = masks(["data", 0])
    graph = changed(graph, "train", dataset=["masks", 0])
    try:
        refused(comfy, changed(graph, node, folder=name.format(foreign=foreign)), "rejected", sentence)
    finally:
        link.unlink()


def test_a_person_allows_a_folder_once(comfy: ComfyClient, server: ComfyServer, foreign: Path, allowed: Path) -> None:
    graph = train_graph(str(foreign), name="allowed", steps=1)
    refused(comfy, graph, "rejected", OUTSIDE)
    assert send(comfy, "/atelier/folders/check", {"folders": [str(foreign)]})[1] == {"unknown": [str(foreign)]}
    status, answer = send(comfy, "/atelier/folders/allow", {"folder": str(foreign)})
    assert status == 200 and str(foreign) in answer["said"], answer
    assert send(comfy, "/atelier/folders/check", {"folders": [str(foreign)]})[1] == {"unknown": []}
    assert comfy.get("/atelier/folders") == {"folders": [str(foreign)], "may_change": False}  # no page asks here
    result = comfy.queue(graph)
    assert result.ok, result.error
    refused(comfy, changed(graph, "data", folder=str(foreign.parent)), "rejected", OUTSIDE)
    assert send(comfy, "/atelier/folders/forget", {"folder": str(foreign)})[0] == 200
    refused(comfy, graph, "rejected", OUTSIDE)


@pytest.mark.parametrize("folder", ["/", "relative", "/there/is/none", r"\\server\share", "", 5, None, "x" * 5000])
def test_what_is_no_folder_of_pictures_cannot_be_allowed(comfy: ComfyClient, allowed: Path, folder: object) -> None:
    status, answer = send(comfy, "/atelier/folders/allow", {"folder": folder})
    assert status in (400, 409) and answer["error"] and not allowed.exists()


def test_a_folder_that_a_person_allowed_is_only_read(
    comfy: ComfyClient, server: ComfyServer, pictures: Path, foreign: Path, allowed: Path
) -> None:
    """Also where a link inside ComfyUI's own folder leads there."""
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_text(f"{foreign}\n", encoding="utf-8")
    (pictures / "away").symlink_to(foreign, target_is_directory=True)
    before = sorted(foreign.iterdir())
    picture = next(each.name for each in before if each.suffix == ".png")
    for folder, name in ((str(foreign), picture), (pictures.name, f"away/{picture}")):
        for what, asked in (("own", {"read": "", "pictures": {name: {"repeats": 2}}}), ("paint", {"picture": name})):
            status, answer = send(comfy, f"/atelier/pictures/{what}", {"folder": folder} | asked)
            assert status in (400, 409) and answer["error"]
    assert sorted(foreign.iterdir()) == before


def test_a_damaged_list_of_folders_is_named(comfy: ComfyClient, pictures: Path, allowed: Path) -> None:
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_bytes(b"/x\n\xff\xfe")
    refused(comfy, train_graph(pictures.name), "rejected", "The list of allowed folders")


@pytest.mark.parametrize(
    ("where", "values", "sentence"),
    [
        ("train", {"dataset": "text"}, "dataset of Train LoRA is 'text'; link Concept Dataset into it."),
        ("train", {"lora_config": {"rank": 4}}, "lora_config of Train LoRA is an object; link LoRA Config into it."),
        ("train", {"base_model": 3}, "base_model of Train LoRA is 3; link Load Base Model into it."),
        ("train", {"saves": "text"}, "saves of Train LoRA is 'text'; link Saves & Samples into it."),
        ("train", {"strength": "1e400"}, "Value inf bigger than max"),
        ("train", {"seed": "9" * 400}, "Value 9999"),
        ("train", {"strength": "nan"}, "strength of Train LoRA is nan; set it to a number from"),
        ("optimizer", {"name": "sgdd"}, "name of Optimizer is missing; set it to"),
        ("optimizer", {"name.beta1": None}, "Required input is missing: beta1"),
        ("train", {"on_existing": "burn"}, None),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_no_editor_sends_gets_one_sentence(
    comfy: ComfyClient, pictures: Path, where: str, values: dict[str, Any], sentence: str | None
) -> None:
    graph = changed(train_graph(pictures.name, name=pictures.name, steps=1), where, **values)
    for name in [name for name, value in values.items() if value is None]:
        del graph[where]["inputs"][name]
    if sentence is None:  # an unknown choice of an optional input counts as none
        assert comfy.queue(graph).ok
    else:
        result = comfy.queue(graph)
        assert not result.ok and sentence in result.error, result.error


def test_values_that_other_nodes_link_are_checked_like_typed_ones(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    graph["number"] = {"class_type": "PrimitiveInt", "inputs": {"value": -4}}
    graph["text"] = {"class_type": "PrimitiveString", "inputs": {"value": "../../escape"}}
    for where, values, sentence in [
        ("train", {"steps": ["number", 0]}, "steps of Train LoRA is -4; set it to a number from"),
        ("lora", {"rank": ["number", 0]}, "rank of LoRA Config is -4; set it to a number from"),
        ("train", {"name": ["text", 0]}, "cannot be a file name"),
    ]:
        refused(comfy, changed(graph, where, **values), "error", sentence)


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("Int", "4", "a whole number"),
        ("Int", 4.5, "a whole number"),
        ("Int", True, "a whole number"),
        ("Float", "0.5", "a number"),
        ("Float", False, "a number"),
        ("String", 5, "text"),
        ("Boolean", 1, "true or false"),
        ("Combo", 3, "one of its list"),
    ],
)
def test_a_linked_value_of_another_type_is_refused(
    comfy_modules: ModuleType, kind: str, value: object, wanted: str
) -> None:
    """By the check that runs before a node: ComfyUI itself refuses such links where it knows the type."""
    from lora_atelier.nodes.node import check_inputs
    from lora_atelier.nodes.sockets import io

    one = getattr(io, kind).Input("x", **({"options": ["a"]} if kind == "Combo" else {}))
    with pytest.raises(ValueError, match=f"^x of Node is .* and must be {wanted}; set it"):
        check_inputs([one], {"x": value}, "Node")


def test_a_checkpoint_of_any_other_name_is_not_opened(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    """A linked name is not compared with the list by ComfyUI."""
    outside = server.base / "outside.safetensors"
    shutil.copy(TINY_BASE, outside)
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    for name in ("../../outside.safetensors", str(outside)):
        refused(comfy, changed(graph, "base", checkpoint=name), "rejected", "Value not in list")
    outside.unlink()
