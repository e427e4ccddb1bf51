"""Files appear whole, and leave nothing beside them."""

import ast
from contextlib import suppress
from pathlib import Path

from lora_atelier.trainer_core.common.files import written_whole
from lora_atelier.trainer_core.common.leftovers import leftovers


def test_what_a_library_writes_under_names_of_its_own_goes_with_what_it_writes(tmp_path: Path) -> None:
    """Whether it ends well, in an error, or with the process, whose leftovers the next one deletes."""
    path = tmp_path / "lora.safetensors"
    for ends_well in (True, False):
        with suppress(KeyError), written_whole(path, apart=True) as temporary:
            temporary.with_name(".tmpAbCdEf").write_bytes(b"half")
            assert [*leftovers(tmp_path)] == [temporary.parent] and temporary.suffix == ".tmp"
            temporary.write_bytes(b"whole")
            if not ends_well:
                raise KeyError
        assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"whole"


WITHIN = {  # modules that write files under their own names -> in what, that goes or is renamed as a whole
    ("common/files.py", "temporary"): "written_whole itself",
    ("common/files.py", "place"): "a probe, under a name of the sweep",
    ("runs/folder.py", "folder / CHECKPOINT"): "a save's unfinished folder",
    ("images.py", "new / file"): "a hidden folder, which make_room deletes",
    ("importing.py", "paths[-1]"): "ComfyUI's folder of temporary files",
}


def test_nothing_is_written_under_its_own_name_before_it_is_whole() -> None:
    root, found = Path(__file__).resolve().parents[3], set()
    for room in ("nodes", "trainer_core"):
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in ("write_text", "write_bytes"):
                    found.add((path.relative_to(root / room).as_posix(), ast.unparse(node.value)))
    assert {each for each in found if each[1] != "temporary"} | {("common/files.py", "temporary")} == WITHIN.keys()
