"""Each reader of strangers' files keeps within its budget, whatever they hold; one without a row fails the test."""

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import forked
import hostile_files
import pytest
from hostile_files import READERS
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
OPENS = {
    "open",
    "open_file",
    "read_file",
    "read_text",
    "read_bytes",
    "read_json",
    "read_object",
    "safe_open",
    "load_file",
}
# Modules and functions that open files -> the row of READERS by which strangers' files are tried, or why none is:
OURS = "a file that this pack or this run has just written, or one of its own folder, whose content is checked"
PERSON = "a file that the person who runs ComfyUI has made or installed"
NOT = "no file: a function of this name"
KNOWN = {
    "nodes/comfyui/allowed.py": {"allowed_folders": PERSON},
    "nodes/comfyui/comparing.py": {"read_kept": OURS},
    "nodes/comfyui/folders.py": {"_settings": PERSON},
    "nodes/comfyui/models.py": {"_load_clip": "checkpoint", "check_lora": OURS, "check_loads": OURS},
    "nodes/comfyui/offline.py": {"_tensors": PERSON},
    "nodes/comfyui/pending.py": {"cut_off": OURS},
    "nodes/comfyui/shown.py": {"runs": OURS, "_nodes_of": "workflow"},
    "nodes/help_pages.py": {"help_page": OURS, "_read": OURS},
    "nodes/run_routes.py": {"drawn_small": "picture"},
    "trainer_core/commands/doctor.py": {"_project": OURS, "places": PERSON},
    "trainer_core/commands/plan.py": {"tell_plan": NOT},
    "trainer_core/commands/train.py": {"train_run": NOT},
    "trainer_core/common/files.py": dict.fromkeys(
        ("open_file", "read_file", "file_digest", "short_hash", "_to_disk"), NOT
    ),
    "trainer_core/common/json_files.py": {"read_json": "prompt"},
    "trainer_core/common/leftovers.py": {"_machine": PERSON},
    "trainer_core/common/tensor_tree.py": {"load_state": "state of a save"},
    "trainer_core/common/values.py": {"read_object": "run"},
    "trainer_core/data/cache.py": {"_read_header": OURS, "_map_file": OURS},
    "trainer_core/data/edits.py": {"content_of": "caption", "_append": OURS, "_header": OURS, "_contents": OURS},
    "trainer_core/data/films.py": {"_opened": "clip", "load_shown": "clip", "draw_playing": "clip", "film_of": NOT},
    "trainer_core/data/images.py": {"opened_picture": "picture"},
    "trainer_core/data/masks.py": {"read_mask": "clip of masks", "load_shown_masks": "clip of masks"},
    "trainer_core/data/painted.py": {"_content": "mask"},
    "trainer_core/data/scan/caption_files.py": {"read_text": "caption", "read_bytes": "caption"},
    "trainer_core/data/scan/caption_sources.py": {"_same_for_all": "caption"},
    "trainer_core/data/scan/caption_tables.py": {"read_caption": "caption", "read_table": "table"},
    "trainer_core/data/scan/index.py": {"read_whole": "picture", "_load": OURS},
    "trainer_core/data/scan/own_file.py": {"read_own": "settings of single pictures", "_kept": OURS},
    "trainer_core/data/written.py": {"__init__": OURS, "add": OURS, "put_text": "caption"},
    "trainer_core/lora_files/read.py": {"_adapter": "LoRA"},
    "trainer_core/lora_files/write.py": {
        **dict.fromkeys(("_write_ordered", "save_embeddings", "verify_lora", "file_hashes"), OURS),
        **dict.fromkeys(("copy_lora", "has_layers", "is_copy", "run_of"), "state of a save"),
    },
    "trainer_core/models/__init__.py": {"source": NOT},
    "trainer_core/models/files/safetensors_file.py": dict.fromkeys(
        ("read_header", "opened", "read_whole", "read"), "checkpoint"
    ),
    "trainer_core/models/files/tensors.py": {"hash_folder": "checkpoint"},
    "trainer_core/models/sd/folder.py": {"read_config": "prompt"},
    "trainer_core/models/sd/load.py": dict.fromkeys(("_load_file", "_load_folder"), "checkpoint"),
    "trainer_core/outward/settings.py": {"read_outward": PERSON},
    "trainer_core/runs/asked.py": {"ask": OURS},
    "trainer_core/runs/catalogue.py": {"published_files": "run"},
    "trainer_core/runs/clean.py": {"clear": "save"},
    "trainer_core/runs/folder.py": {
        **dict.fromkeys(("at_work", "owner", "owned_since", "log", "seconds", "result", "workflow", "title"), "run"),
        **dict.fromkeys(("open_run", "_tail", "_last_byte"), "run"),
        "odd_pictures": "pictures of a run",
        **dict.fromkeys(("lora_files", "_read_checkpoint"), "save"),
    },
    "trainer_core/runs/follow.py": {"_tail": "run"},
    "trainer_core/runs/log.py": {**dict.fromkeys(("__init__", "_write", "_rows"), OURS), "samples": "picture"},
    "trainer_core/runs/publish.py": dict.fromkeys(
        ("_published_or_copied", "_remove_stopped", "remember_copies"), "run"
    ),
    "trainer_core/training/pixels.py": {"_bytes": "picture", "_frames_of": "clip"},
    "trainer_core/training/result.py": {"_read": "state of a save"},
    "trainer_core/training/sample_files.py": dict.fromkeys(
        ("put_preview", "_run_of_preview", "_numbers", "_frames"), "picture"
    ),
    "trainer_core/workflow/foreign/__init__.py": {"read_foreign": "settings of other programs"},
    "trainer_core/workflow/foreign/texts.py": {"beside": "settings of other programs"},
    "trainer_core/workflow/places.py": {"_extra_folders": PERSON},
    "trainer_core/workflow/run_file.py": {"_read": "workflow", "_of_run": "workflow", "_of_toml": "run as TOML"},
}


def opening(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the names of functions that open a file; "" for a module's top."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in OPENS:
                yield inner
        yield from opening(node, inner)


def test_every_reader_has_a_row() -> None:
    found: dict[str, set[str]] = {}
    for room in ("nodes", "trainer_core"):
        for path in (ROOT / room).rglob("*.py"):
            if functions := set(opening(ast.parse(path.read_text(encoding="utf-8")))):
                found[path.relative_to(ROOT).as_posix()] = functions
    assert found == {module: set(functions) for module, functions in KNOWN.items()}
    rows = {row for functions in KNOWN.values() for row in functions.values()} - {OURS, PERSON, NOT}
    assert rows <= READERS.keys(), "no such reader"
    others = {"LoRA", "mask", "names of an upload", "prompt", "prompt file"}
    assert READERS.keys() - rows == others - rows, "these read by way of the others"


def test_a_function_that_opens_a_file_is_found() -> None:
    source = "def f(p):\n    def g(): return Image.open(p)\n    return p.name\ndef h(p): return p.read_text()\nopen(1)"
    assert list(opening(ast.parse(source))) == ["g", "h", ""]


@pytest.fixture(scope="module")
def driven(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Drive all readers in a process of their own; with --thorough without asserts, so that nothing rests on one."""
    if not pytestconfig.getoption("thorough"):
        with ProcessPoolExecutor(1, forked.context()) as pool:
            return pool.submit(hostile_files.drive_all, 8, 1).result(900)
    program = Path(hostile_files.__file__)
    done = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", str(program), "1000", "1"],
        env={**os.environ, "PYTHONPATH": str(program.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["asserts"]
    return found


@pytest.mark.parametrize("name", READERS)
def test_hostile_files_stay_within_the_budget_of_their_reader(name: str, driven: dict[str, Any]) -> None:
    assert not driven["readers"][name]["faults"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["workflow", "prompt", "run", "save"])
@settings(max_examples=1000, deadline=None)
@given(draw=st.randoms(use_true_random=True))
def test_canvas_files_and_run_folders_of_a_grammar_stay_within_their_budget(name: str, draw: random.Random) -> None:
    """Each by itself, drawn by hypothesis, which tells the seed of one that does not."""
    assert not hostile_files.read_one(name, draw)[0]


def only_tells_types(test: ast.expr) -> bool:
    """Tell whether a condition says no more than that a value exists, or of which class it is."""
    if isinstance(test, ast.BoolOp):
        return all(map(only_tells_types, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def test_no_check_rests_on_an_assert() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ("nodes", "trainer_core")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and not only_tells_types(node.test)
    ]
    assert not found


LIMIT = re.compile(
    r"(?m)^((?:\w*(?:MOST|LARGEST|LONGEST|DEEPEST|LIMIT|PATIENCE|AT_ONCE)\w*(?:, )?)+) = (.*?)(?:  # (.*))?$"
)
COUNTED = [  # beside the modules of KNOWN: what a question, a node or a tool may hold
    *("nodes/dataset_routes.py", "nodes/picture_routes.py", "trainer_core/common/held.py"),
    *("trainer_core/data/film_boxes.py", "trainer_core/data/scan/sent.py"),
    *("nodes/compare.py", "nodes/importing.py", "nodes/node.py", "nodes/routes.py", "nodes/sweep.py"),
    *("nodes/comfyui/server.py", "trainer_core/common/in_pieces.py", "trainer_core/config/prompt_lines.py"),
    *("trainer_core/lora_files/room.py", "trainer_core/runs/detail.py", "trainer_core/runs/export.py"),
    *("trainer_core/workflow/canvas.py", "trainer_core/workflow/foreign/texts.py"),
]


def limits() -> Iterator[str]:
    """Yield a row of docs/reliability.md for the limits of each module that reads what strangers have made."""
    strangers = [module for module, readers in KNOWN.items() if not {*readers.values()} <= {OURS, PERSON, NOT}]
    for module in sorted({*strangers, *COUNTED}):
        cells = []
        for names, code, words in LIMIT.findall((ROOT / module).read_text(encoding="utf-8")):
            values = eval(f"[{code}]", {"MEBIBYTE": 2**20})
            pairs = zip(names.lower().replace("_", " ").split(", "), values, strict=True)
            said = ", ".join(f"{name} {value:,}" for name, value in pairs)
            cells.append(f"{said} ({words})" if words else said)
        if cells:
            yield f"| `{module}` | {'; '.join(cells)} |"


def test_every_limit_stands_in_the_table() -> None:
    """What changes or comes is to be changed there, too."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    _, _, table = text.partition("## The limits\n")
    assert [line for line in table.splitlines() if line.startswith("| `")] == list(limits())
