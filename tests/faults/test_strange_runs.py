"""Run folders with damaged or foreign files: the list of runs names each in a sentence, and no other run suffers."""

import copy
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bounded import bounded
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_run

from lora_atelier.trainer_core.config import ExistingConfig
from lora_atelier.trainer_core.runs import Join, Keys, choose_run, describe, find_runs, list_runs, open_run
from lora_atelier.trainer_core.runs.catalogue import describe_in_detail
from lora_atelier.trainer_core.runs.folder import LOG_TAIL
from lora_atelier.trainer_core.runs.follow import follow

KEYS = Keys(run="d" * 64, course="d" * 64)
DEEP = "[" * 100_000 + "]" * 100_000
ODD = [  # texts in place of a value
    *("null", "true", "-1", "1e400", "NaN", "-Infinity", "9" * 5000, "9" * 300, '"text"', '"\\ud800"', "[]", "{}"),
    *('[{"a": []}]', '{"a": {"b": 1}}', "0.5", "1e308", '"../../x"', '"a\\u0000b"', "[" * 70 + "]" * 70, DEEP),
]
JSONS = ("run.json", "result.json", "published.json", "owner.json", "checkpoints/step-00000004/checkpoint.json")


def choose(runs: Path, steps: int = 4, notes: list[str] | None = None) -> Any:
    collect = [].append if notes is None else notes.append
    return choose_run(runs, KEYS, steps, ExistingConfig(), lambda run, step: Join(), collect)


@pytest.fixture
def runs(tmp_path):
    """Return a folder with a finished run, and one that is to be damaged."""
    make_run(tmp_path / "runs", "good", "a", saves=(2, 4), finished=4, steps=4)
    make_run(tmp_path / "runs", "odd", "d", saves=(2, 4), logged=4, finished=4, steps=4)
    (odd,) = (tmp_path / "runs").glob("odd-*")
    (odd / "owner.json").write_text('{"pid": 7, "host": "h", "since": 5}', encoding="utf-8")
    (odd / "published.json").write_text('{"a": [["/models/x.safetensors", "0"]]}', encoding="utf-8")
    return tmp_path / "runs"


def odd_run(runs: Path) -> Path:
    (path,) = runs.glob("odd-*")
    return path


def places(value: Any, path: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def replaced(value: Any, place: tuple, text: str) -> str:
    """Write a value as JSON with a text at one place of it."""
    if not place:
        return text
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = "@here@"
    return json.dumps(value).replace('"@here@"', text)


def is_described(runs: Path) -> None:
    """Fail unless every run is described in numbers and sentences, and the sound one as ever."""
    listed = {run["run"].partition("-")[0]: run for run in list_runs(runs)}
    json.dumps(list(listed.values()), allow_nan=False)
    assert listed["good"]["status"] == "finished"
    assert listed["odd"]["sentence"].endswith(".") and len(listed["odd"]["sentence"]) < 300
    json.dumps(describe_in_detail(odd_run(runs)), allow_nan=False)
    describe(odd_run(runs), verify=True)
    for steps in (4, 8):
        choose(runs, steps)


@pytest.mark.parametrize("name", JSONS)
def test_a_value_of_any_kind_at_any_place_is_described_and_stops_no_other_run(runs, name, pytestconfig):
    file = odd_run(runs) / name
    whole = json.loads(file.read_text(encoding="utf-8"))
    share = 1 if pytestconfig.getoption("thorough") else 6  # else each place gets every sixth of them
    for number, place in enumerate(places(whole)):
        if len(place) > 1 and place[0] == "files" and place[1] != "files.json":  # the entries are alike
            continue
        for text in ODD[number % share :: share]:
            file.write_text(replaced(whole, place, text), encoding="utf-8")
            is_described(runs)


@examples(180)
@given(
    name=st.sampled_from(["run.json", "result.json", "log.jsonl", JSONS[-1]]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4),
)
@bounded(20)
def test_changed_bytes_are_described_and_stop_no_other_run(tmp_path_factory, name, changes):
    runs = tmp_path_factory.mktemp("fuzz") / "runs"
    make_run(runs, "good", "a", saves=(2,), finished=2, steps=2)
    odd = make_run(runs, "odd", "d", saves=(4,), logged=4, finished=4, steps=4).path
    content = bytearray((odd / name).read_bytes())
    for share, length, new in changes:
        start = int(share * len(content))
        content[start : start + length] = new
    (odd / name).write_bytes(content)
    is_described(runs)
    shutil.rmtree(runs)


@pytest.mark.parametrize("name", [*JSONS, "log.jsonl", "checkpoints", "samples"])
def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(runs, name):
    place = odd_run(runs) / name
    if place.is_dir():
        shutil.rmtree(place)
        place.write_text("", encoding="utf-8")
    else:
        place.unlink(missing_ok=True)
        place.mkdir(parents=True)
    is_described(runs)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
@pytest.mark.parametrize("name", [*JSONS, "log.jsonl", "summary.txt", "workflow.json", "checkpoints/step-00000004"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(runs, name):
    place = odd_run(runs) / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    ended: list[str] = []

    def look() -> None:
        is_described(runs)
        ended.append("described")
        if name != "run.json":
            follow(odd_run(runs), 0)
            with suppress(OSError):
                open_run(odd_run(runs)).log("step", step=5, loss=0.5)
        ended.append("followed")

    at_work = threading.Thread(target=look, daemon=True)  # whoever waits for a pipe never ends
    at_work.start()
    at_work.join(60)
    assert ended == ["described", "followed"]


def test_runs_that_cannot_be_read_are_named_once_and_skipped_in_training(runs):
    (odd_run(runs) / "run.json").write_text(DEEP, encoding="utf-8")
    notes: list[str] = []
    assert choose(runs, notes=notes).run is None
    (note,) = notes
    assert odd_run(runs).name in note and "good" not in note and str(runs) in note
    assert describe(odd_run(runs))["sentence"] == (
        f"run.json of {odd_run(runs).name} is damaged: nested more than 64 levels deep; restore the file, or delete "
        "the folder."
    )
    shutil.rmtree(odd_run(runs))
    choose(runs, notes=notes)
    assert len(notes) == 1


def test_the_list_of_a_saves_lora_files_leads_to_no_other_file(runs):
    run = open_run(odd_run(runs))
    save = run.checkpoints()[0]
    for files in (
        [{"path": "/etc/passwd", "words": {}, "steps": 1}],
        [{"path": "../step-00000002/lora.safetensors", "words": {}, "steps": 1}],
        [{"path": "lora.safetensors", "words": {"../x": "words/lora-moss.safetensors"}, "steps": 1}],
        [{"path": "lora.safetensors", "words": {}, "steps": True}],
        {"path": "lora.safetensors"},
        None,
    ):
        text = json.dumps({"files": files})
        (save.path / "files.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"^files\.json (is damaged|names other files than those of the save)$"):
            save.lora_files()
    assert find_runs(runs)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "C:a", "a\u202eb", "x" * 300, "words/a\tb"])
def test_a_save_whose_files_no_system_names_so_is_none(runs, name):
    save = open_run(odd_run(runs)).checkpoints()[0]
    about = json.loads((save.path / "checkpoint.json").read_text(encoding="utf-8"))
    about["files"][f"{name}.safetensors"] = about["files"]["files.json"]
    (save.path / "checkpoint.json").write_text(json.dumps(about), encoding="utf-8")
    assert save.path not in [each.path for each in open_run(odd_run(runs)).checkpoints()]
    is_described(runs)


def test_a_save_of_more_files_than_any_has_is_none(runs):
    save = open_run(odd_run(runs)).checkpoints()[0]
    about = json.loads((save.path / "checkpoint.json").read_text(encoding="utf-8"))
    about["files"] |= {f"{number}": about["files"]["files.json"] for number in range(100_000)}
    (save.path / "checkpoint.json").write_text(json.dumps(about), encoding="utf-8")
    assert save.path not in [each.path for each in open_run(odd_run(runs)).checkpoints()]


def test_only_the_end_of_a_long_log_is_read(runs):
    run = open_run(odd_run(runs))
    line = b'{"event": "step", "time": 5, "step": 3, "loss": 1.0}\n'
    with (run.path / "log.jsonl").open("wb") as file:
        file.write(b'{"event": "first"}\n' + b"x" * (LOG_TAIL - 10 * len(line)) + b"\n" + line * 10)
        file.write(b'{"event": "step", "text": "' + b"x" * 2**16 + b'"}\n' + line)
    assert [event["event"] for event in run.events()] == ["step"] * 11
    assert [event["step"] for event in run.events(newest=5)] == [3] * 4  # the long line is one of the five
