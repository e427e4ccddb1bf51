"""Files appear whole, and leave nothing beside them."""

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
