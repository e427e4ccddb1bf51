"""Pictures of this computer go by a drop on Concept Dataset into a new folder of input; what is hostile does not."""

import io
import json
import stat
import zipfile

import pytest
from PIL import Image

from lora_atelier.dev import QUICKSTART, START

pytestmark = pytest.mark.browser

DROP = """async ([type, files]) => {
    const node = window.app.graph.nodes.find(node => type ? node.comfyClass === type : node.subgraph);
    const transfer = new DataTransfer();
    for (const [name, type, bytes] of files) transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
    const event = new DragEvent("drop", { dataTransfer: transfer });
    return [node.onDragOver(event), await node.onDragDrop(event)];
}"""
CANCEL = DROP.replace(
    "await node.onDragDrop(event)", "node.onDragDrop(event), document.querySelector('.atelier-intake button').click()"
)
FOLDER = """type => window.app.graph.nodes.find(node => type ? node.comfyClass === type : node.subgraph)
    .widgets.find(widget => widget.name === "folder").value"""
KIND = """async bytes => {
    const script = performance.getEntriesByType("resource").find(({ name }) => name.includes("/zip.js"));
    const { entriesOf } = await import(script.name);
    try {
        for (const entry of await entriesOf(new Blob([new Uint8Array(bytes)]))) await entry.read();
        return "";
    } catch (problem) { return problem.kind; }
}"""


def picture(number: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (64, 48), (number, 80, 90)).save(data, "PNG")
    return data.getvalue()


def packed(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def hostile() -> dict[str, bytes]:
    """Give archives by what is wrong with them."""
    plain = packed({"a.png": picture(1)})
    link = zipfile.ZipInfo("a.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    locked = bytearray(plain)
    locked[plain.rindex(b"PK\1\2") + 8] |= 1
    broken = bytearray(plain)
    broken[60] ^= 0xFF
    large = bytearray(plain)
    at = plain.rindex(b"PK\5\6")
    large[at + 10 : at + 12] = b"\xff\xff"
    bomb = bytearray(packed({f"{i}.png": b"" for i in range(3)}))
    at = 0
    while (at := bomb.find(b"PK\1\2", at)) >= 0:
        bomb[at + 24 : at + 28] = b"\xff\xff\xff\x7f"
        at += 4
    more = bytearray(packed({"a.txt": b"a" * 5000}))
    at = more.rindex(b"PK\1\2")
    more[at + 24 : at + 28] = (10).to_bytes(4, "little")
    return {
        "": packed({"a.png": picture(1), "b/c.txt": b"c"}, zipfile.ZIP_STORED), "outside": packed({"../a.png": b""}),
        "outside, from a root": packed({"/a.png": b""}), "outside, of a drive": packed({"C:/a.png": b""}),
        "outside, by a link": data.getvalue(), "encrypted": bytes(locked), "damaged": bytes(broken),
        "large": bytes(large), "unreadable": plain[:-40], "unreadable, empty": b"", "bomb": bytes(bomb),
        "damaged, longer than it says": bytes(more),
    }  # fmt: skip


def test_a_drop_becomes_a_folder_that_the_node_reads(editor, server) -> None:
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    kind = "AtelierConceptDataset"
    files = [[f"{i}.png", "image/png", list(picture(i))] for i in range(30)]
    files += [[f"{i}.txt", "text/plain", [97 + i % 26]] for i in range(29)]
    files += [["0-masklabel.png", "image/png", list(picture(0))], ["notes.exe", "", [1]]]
    assert editor.run(DROP, [kind, [["some.json", "application/json", [123, 125]]]]) == [True, False]
    assert editor.run(DROP, [kind, files]) == [True, True]
    editor.page.get_by_text("60 files are in input/").first.wait_for()
    editor.page.wait_for_function(f"kind => !({FOLDER})(kind).includes(':')", arg=kind)
    folder = editor.run(FOLDER, kind)
    arrived = {path.name: path.read_bytes() for path in (server.base / "input" / folder).iterdir()}
    assert arrived == {name: bytes(data) for name, _, data in files if name != "notes.exe"}
    editor.page.wait_for_function(
        "() => document.querySelector('.atelier-look [role=status]')?.textContent === '30 pictures, 1 without caption'"
    )
    editor.screenshot(f"intake-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    name = f"zip {editor.version} {editor.vue}"
    archive = packed(
        {f"my?cat/{i}.png": picture(i) for i in range(3)} | {"my?cat/0.txt": b"a cat", "__MACOSX/0.png": b""}
    )
    editor.run(DROP, [kind, [[f"{name}.zip", "application/zip", list(archive)]]])
    editor.page.wait_for_function(f"kind => ({FOLDER})(kind) !== '{folder}'", arg=kind)
    made = server.base / "input" / editor.run(FOLDER, kind)
    assert made.name.startswith("my_cat")
    assert sorted(path.name for path in made.iterdir()) == ["0.png", "0.txt", "1.png", "2.png"]
    before = sorted((server.base / "input").iterdir())
    editor.run(DROP, [kind, [[f"{name}.zip", "application/zip", list(hostile()["outside"])]]])
    editor.page.get_by_text(f"{name}.zip holds a path or link that leads out of it").first.wait_for()
    assert sorted((server.base / "input").iterdir()) == before
    for wrong, data in hostile().items():
        assert editor.run(KIND, list(data)) == wrong.partition(",")[0], wrong


def test_the_blueprint_takes_a_drop_and_a_cancel_keeps_what_arrived(editor, server) -> None:
    editor.load(json.loads(START.read_text(encoding="utf-8")))
    assert editor.run(DROP, ["", [["cat.png", "image/png", list(picture(7))]]]) == [True, True]
    editor.page.get_by_text("1 files are in input/").first.wait_for()
    folder = editor.run(FOLDER, "")
    assert [path.name for path in (server.base / "input" / folder).iterdir()] == ["cat.png"]
    editor.page.route(
        "**/upload/image", lambda route: None if "3.png" in str(route.request.post_data_buffer) else route.continue_()
    )
    editor.run(DROP, ["", [[f"{i}.png", "image/png", list(picture(i))] for i in range(4)]])
    editor.page.locator(".atelier-intake").get_by_text("3 of 4 files are in input/").wait_for()
    editor.page.locator(".atelier-intake").get_by_role("button", name="Cancel").click()
    editor.page.get_by_text("Cancelled. What had arrived is in input/").first.wait_for()
    editor.page.unroute("**/upload/image")
    assert editor.run(FOLDER, "") == folder
    before = sorted((server.base / "input").iterdir())
    editor.run(CANCEL, ["", [["late.png", "image/png", list(picture(8))]]])
    editor.page.get_by_text("Cancelled. Nothing was taken.").first.wait_for()
    assert sorted((server.base / "input").iterdir()) == before
    editor.page.route("**/upload/image", lambda route: route.fulfill(status=500))  # as on a full disk
    editor.run(DROP, ["", [["cut.txt", "text/plain", [97]], ["cut.png", "image/png", list(picture(7))]]])
    editor.page.get_by_text("Its folder is not whole: delete it").first.wait_for()
    editor.page.unroute("**/upload/image")
    editor.page.route("**/upload/image", lambda route: route.abort("connectionreset"))  # as of a server that is killed
    editor.run(DROP, ["", [["gone.png", "image/png", list(picture(7))]]])
    editor.page.get_by_text("the connection broke. Its folder is not whole: delete it").first.wait_for()
    editor.page.unroute("**/upload/image")
    assert editor.run(FOLDER, "") == folder, "the node reads what is not whole"
