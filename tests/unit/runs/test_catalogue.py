"""What is told of runs, and the shell that lists, verifies, exports and cleans them."""

import json
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from PIL import Image
from run_folders import PLACE, make_run

from lora_atelier.dev import ROOT
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.common.leftovers import TEMPORARY
from lora_atelier.trainer_core.common.smooth import say_loss
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    ExistingConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.config.defaults import Defaults, fill
from lora_atelier.trainer_core.config.rows import rows_of
from lora_atelier.trainer_core.data.images import draw_small
from lora_atelier.trainer_core.runs import (
    Keys,
    catalogue,
    clean,
    describe_in_detail,
    export,
    finished_checkpoint,
    folder,
    list_runs,
    open_run,
)
from lora_atelier.trainer_core.runs.catalogue import describe, thin
from lora_atelier.trainer_core.runs.choose import find_fork
from lora_atelier.trainer_core.runs.cli import main
from lora_atelier.trainer_core.runs.detail import names_left_open
from lora_atelier.trainer_core.runs.folder import new_run

COMMAND = [sys.executable, str(ROOT), "runs"]


@pytest.fixture
def runs(tmp_path):
    """Return a folder with a run of each kind, and things that are none."""
    folder = tmp_path / "runs"
    done = make_run(folder, "done", "d", saves=(2, 4, 8), logged=8, finished=8)
    write_json(done.path / "published.json", {"x|{name}|8": [[f"{PLACE}/loras/own/done.safetensors", "0"]]})
    make_run(folder, "cut", "c", saves=(2, 4), logged=6)
    make_run(folder, "none", "e", logged=1)
    write_json(make_run(folder, "newer", "n", saves=(2,)).path / "run.json", {"format": 99})
    make_run(folder, "broken", "b", saves=(2,)).path.joinpath("run.json").write_text(
        '{"format": 1, "ke', encoding="utf-8"
    )
    (folder / "holiday").mkdir()
    (folder / "holiday" / "beach.jpg").write_bytes(b"picture")
    return folder


def named(runs: Path, name: str) -> Path:
    (path,) = runs.glob(f"{name}-*")
    return path


def test_every_run_is_listed_and_no_path_of_the_machine(runs):
    found = {run["name"] or run["run"].partition("-")[0]: run for run in list_runs(runs, [Path(PLACE) / "loras"])}
    told = {name: (run["status"], run["step"], run["steps"]) for name, run in found.items()}
    assert told == {
        "done": ("finished", 8, 8),
        "cut": ("stopped", 4, 8),
        "none": ("empty", 0, 8),
        "newer": ("unreadable", None, None),
        "broken": ("unreadable", None, None),
    }
    assert "newer format (99" in found["newer"]["sentence"] and "run.json of broken" in found["broken"]["sentence"]
    done = found["done"]
    assert done["published"] == ["own/done.safetensors"] and done["base_model"] == "base.safetensors"
    assert [(save["step"], save["stays"]) for save in done["saves"]] == [(2, True), (4, False), (8, False)]
    assert done["size"] == sum(file.stat().st_size for file in named(runs, "done").rglob("*") if file.is_file())
    assert 0 < done["clearable"] == done["saves"][1]["size"] < done["size"]  # the first one was marked to stay
    assert done["loss"] == pytest.approx(sum(1 / step for step in range(1, 9)) / 8)
    text = json.dumps(list(found.values()), allow_nan=False)
    assert PLACE not in text and str(runs) not in text
    assert describe(named(runs, "done"))["published"] == ["done.safetensors"]


def test_a_run_at_work_is_told_from_one_that_was_cut_off(runs):
    run = open_run(named(runs, "cut"))
    write_json(run.path / "owner.json", {"pid": 1, "host": platform.node(), "since": 0})  # as after a kill
    assert describe(run.path)["status"] == "stopped" and not run.busy()
    with run.locked():
        told = describe_in_detail(run.path)
        assert (told["status"], told["step"]) == ("running", 4)  # steps 5 and 6 are of who was cut off
        run.log("step", step=5, loss=0.125)
        told = describe_in_detail(run.path)
        assert told["step"] == 5 and told["curves"]["loss"][-1] == [5, 0.125] and len(told["curves"]["loss"]) == 5
    assert describe(run.path)["status"] == "stopped"
    asking = FileLock(run.path / "lock", thread_local=False)  # as who asks whether the run is at work, for a moment
    asking.acquire()
    threading.Timer(0.1, asking.release).start()
    with run.locked():
        assert run.busy()


def test_a_run_says_how_its_last_process_ended(runs):
    """In a list without the reason, which may name a path of the machine."""
    run = open_run(named(runs, "cut"))
    reason = f"The disk is full at {run.path}; free some of it."
    run.log("failed", text=reason)
    run.log("note", text="Stopped after step 4 of 8.")
    told, listed = describe_in_detail(run.path), describe(run.path)
    assert told["failed"] and told["sentence"] == reason and told["status"] == "stopped"
    assert listed["failed"] and listed["sentence"].startswith("An error stopped it after step 4 of 8")
    run.log("begun")
    told = describe_in_detail(run.path)
    assert not told["failed"] and told["sentence"].startswith("Stopped after step 4 of 8")
    run.log("paused")
    assert describe_in_detail(run.path)["sentence"] == describe(run.path)["sentence"] == "Paused after step 4 of 8."
    for strange in (5, None, "", ["x"]):
        run.log("failed", text=strange)
        assert not describe_in_detail(run.path)["failed"]


def test_curves_go_back_where_the_run_did_and_begin_where_it_began(tmp_path):
    run = make_run(tmp_path, "forked", saves=(4,), steps=6)
    for step, loss in ((3, 3.0), (4, 4.0), (5, 5.0), (3, 3.5), (4, float("nan"))):  # cut off after 5, gone on after 2
        run.log("step", step=step, loss=loss)
        run.log("validation", step=step, loss=loss / 2)
    curves = describe_in_detail(run.path)["curves"]
    assert curves["loss"] == [[1, 10.0], [2, 20.0], [3, 3.5], [4, None]]
    assert curves["validation"] == [[0, 2.0], [3, 1.75], [4, None]]
    (run.path / "log.jsonl").unlink()
    assert describe_in_detail(run.path)["curves"]["loss"] == [[step, 10.0 * step] for step in range(1, 5)]


def test_long_curves_are_thinned_to_means():
    points = thin({step: float(step) for step in range(1, 10_001)}, 100)
    assert len(points) == 100 and points[0] == [100, 50.5] and points[-1] == [10_000, 9950.5]
    assert thin({3: 1.0, 1: float("inf")}) == [[1, None], [3, 1.0]]
    values = {1: 4.0, 2: 2.0, 3: float("nan"), 4: float("nan"), 5: 1.0}
    assert thin(values, 3, spread=True) == [[2, 3.0, 2.0, 4.0], [4, None], [5, 1.0, 1.0, 1.0]]


def test_the_detail_of_a_run_has_what_a_graph_draws_and_the_notes_since_it_was_last_begun(tmp_path):
    run = make_run(tmp_path, "told", saves=(4,))
    run.log("begun")
    run.log("note", text="old")
    for step in range(1, 5):
        concepts = {"cat": 1.0 * step} | ({"dog": 2.0} if step > 2 else {})
        run.log("step", step=step, loss=0.5, lr={"unet": 0.1, "odd": "x"}, concepts=concepts)
    run.log("validation", step=0, loss=3.0)
    run.log("validation", step=2, loss=float("nan"))
    run.log("validation", step=4, loss=2.5, levels={"62": 0.5, "187": 1.5, "odd": "x"})
    run.log("begun")
    run.log("note", text="new")
    run.log("note", text=5)
    detail = describe_in_detail(run.path)
    assert detail["notes"] == ["new"] and detail["best"] == 4 and detail["prompts"] == []
    assert detail["curves"] == {
        "loss": [[step, 0.5] for step in range(1, 5)],
        "validation": [[0, 3.0], [2, None], [4, 2.5]],
        "rate": {"unet": [[step, 0.1] for step in range(1, 5)]},
        "concepts": {"cat": [[step, 1.0 * step] for step in range(1, 5)], "dog": [[3, 2.0], [4, 2.0]]},
        "levels": {"62": [[4, 0.5]], "187": [[4, 1.5]]},
    }


def shell(runs: Path, *arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run the command line as a person does, by the pack's folder."""
    command = [COMMAND[0], *python, *COMMAND[1:], *arguments, "--folder", str(runs)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


@pytest.mark.parametrize("command", [("list",), ("show", "done"), ("clean",)], ids=" ".join)
def test_what_people_look_at_often_starts_without_torch(runs, command):
    done = shell(runs, *command, python=("-X", "importtime"))
    assert done.returncode == 0 and "done-dddddddddddd" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lora_atelier.trainer_core.runs.catalogue" in imported and not imported & {
        "torch",
        "numpy",
        "PIL",
        "transformers",
    }


def test_a_table_and_the_details(runs, capsys):
    assert main(["list", "--folder", str(runs)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert rows["cut-cccccccccccc"][1:4] == ["stopped", "4/8", "0.5208"]
    assert "5 runs, " in out and "holiday" not in out and "newer format (99" in out
    assert main(["show", "done", "--folder", str(runs)]) == 0
    out = capsys.readouterr().out
    assert f"{PLACE}/loras/own/done.safetensors (deleted)" in out and "step 2: " in out and "kept" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "d"), None),
        (("show", "nothing"), "There is no run nothing"),
        (("show", ".."), "There is no run .."),
        (("show", ""), "There is no run"),
        (("show", "twin"), "may be twin-"),
        (("clean", "newer"), "newer format (99"),
        (("clean", "--whole"), "--whole needs the names"),
        (("export", "none", "--to", "x.safetensors"), "has no LoRA to export"),
        (
            ("export", "cut", "--step", "3", "--to", "x.safetensors"),
            "no LoRA of step 3; it has LoRAs of the steps 2, 4",
        ),
        (("export", "cut", "--to", "x.ckpt"), "end its name in .safetensors"),
        (("verify", "cut"), None),
    ],
)
def test_wrong_words_are_answered_by_one_sentence(runs, capsys, arguments, sentence):
    make_run(runs, "twin", "1")
    make_run(runs, "twin", "2")
    assert main([*arguments, "--folder", str(runs)]) == (2 if sentence else 0)
    said = capsys.readouterr()
    assert (sentence or "") in said.err and said.err.count("\n") == bool(sentence)


def test_where_runs_are_looked_for(tmp_path):
    make_run(tmp_path / "output" / "atelier" / "runs", "usual")
    answers = []
    for place in ("custom_nodes", "elsewhere"):
        pack = tmp_path / place / "a-pack"
        shutil.copytree(ROOT / "trainer_core", pack / "trainer_core", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "__main__.py", pack)
        command = [sys.executable, str(pack.relative_to(tmp_path)), "runs", "list"]
        answers.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
    assert "usual-aaaaaaaaaaaa" in answers[0].stdout, answers[0].stderr
    assert answers[1].returncode == 2 and "is not in ComfyUI's custom_nodes; name the folder" in answers[1].stderr
    assert "There is no folder" in shell(tmp_path / "none", "list").stderr


def test_verify_finds_every_damage(runs, capsys):
    assert main(["verify", "done", "--folder", str(runs)]) == 0 and "All sound." in capsys.readouterr().out
    saves = named(runs, "done") / "checkpoints"
    weights = saves / "step-00000002" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (saves / "step-00000004" / "checkpoint.json").write_text("{", encoding="utf-8")
    damaged = shell(runs, "verify", "done")
    assert damaged.returncode == 1 and "Traceback" not in damaged.stderr
    for line in ("step 2: weights.safetensors is damaged", "step 4: checkpoint.json is missing", "step 8: sound"):
        assert line in damaged.stdout
    assert main(["verify", "--folder", str(runs)]) == 1
    assert "4 damaged." in capsys.readouterr().out  # and the two that cannot be read


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_clean_deletes_what_results_do_not_need_and_only_with_yes(runs, capsys, monkeypatch):
    done, cut = open_run(named(runs, "done")), named(runs, "cut")
    (cut / "checkpoints" / f".1{TEMPORARY}").mkdir()
    (cut / "samples").mkdir()
    (cut / "samples" / f".2{TEMPORARY}").write_bytes(b"half")
    doomed = runs / f".3{TEMPORARY}"  # somebody is deleting it, or was
    doomed.mkdir()
    before = files(runs)
    freed = describe(done.path)["clearable"]
    assert main(["clean", "--folder", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "save step-00000004" in out and "save step-00000002" not in out and "Nothing is deleted yet" in out
    assert files(runs) == before
    assert main(["clean", "--yes", "--folder", str(runs)]) == 0
    gone = {name for name in before if name not in files(runs)}
    assert gone and all(
        name.startswith(f"{done.path.name}/checkpoints/step-00000004") or TEMPORARY in name for name in gone
    )
    assert not any("step-00000008" in name or name.startswith(f"{cut.name}/checkpoints/step") for name in gone)
    assert not list(cut.rglob(f".*{TEMPORARY}")) and doomed.is_dir()
    assert describe(done.path)["clearable"] == 0 < freed and (end := finished_checkpoint(done)) and end.step == 8

    monkeypatch.setattr(clean, "OLD", 0.0)
    assert main(["clean", "--yes", "--folder", str(runs)]) == 0 and not doomed.exists()

    assert main(["clean", "--states", "--folder", str(runs)]) == 0 and "fresh optimizer" in capsys.readouterr().out
    assert shell(runs, "clean", "--states", "--yes").returncode == 0
    assert (
        not (end.path / "optimizer.safetensors").exists()
        and (cut / "checkpoints/step-00000004/optimizer.safetensors").exists()
    )
    assert finished_checkpoint(done) is not None  # its result can still be taken, and forked
    fork = ExistingConfig(on_existing="fork", fork_run=done.path.name)
    assert find_fork(runs, fork)[1].problem("optimizer.safetensors") == "optimizer.safetensors is missing"
    assert (
        main(["clean", "--states", "--yes", "--folder", str(runs)]) == 0
        and "nothing to delete" in capsys.readouterr().out
    )

    assert main(["clean", cut.name[:5], "broken", "--whole", "--yes", "--folder", str(runs)]) == 0
    assert sorted(path.name.partition("-")[0] for path in runs.glob("[!.]*")) == ["done", "holiday", "newer", "none"]


def test_clean_leaves_what_is_at_work_what_may_be_needed_and_what_lies_elsewhere(runs, tmp_path, capsys):
    done = open_run(named(runs, "done"))
    command = ["clean", "--yes", "--folder", str(runs)]
    before = files(runs)
    with done.locked():
        for words in (["done"], ["done", "--whole"]):
            assert main([*command, *words]) == 2 and "is in training" in capsys.readouterr().err
        assert main(command) == 0 and "is in training" in capsys.readouterr().out
        assert before.keys() <= files(runs).keys()
    weights = done.path / "checkpoints" / "step-00000008" / "weights.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(b"!")
    assert main([*command, "done"]) == 2 and "may be needed" in capsys.readouterr().err
    weights.write_bytes(sound)

    outside = tmp_path / "outside"
    done.path.rename(outside)
    done.path.symlink_to(outside)
    for words in (["done"], ["done", "--whole"]):
        assert main([*command, *words]) == 2 and "is a link to another folder" in capsys.readouterr().err
    done.path.unlink()
    outside.rename(done.path)
    (done.path / "checkpoints").rename(outside)
    (done.path / "checkpoints").symlink_to(outside)
    (outside / f".1{TEMPORARY}").write_bytes(b"of another program")
    before = files(outside)
    assert main([*command, "done"]) == 2 and "checkpoints of done" in capsys.readouterr().err
    assert main([*command, "done", "--whole"]) == 0 and not done.path.exists() and files(outside) == before


def test_one_mean_loss_stands_for_a_run_wherever_it_is_shown(tmp_path):
    """Also where the log goes back to a save, or does not reach back far enough; lists read its newest lines alone."""
    run = make_run(tmp_path, "cut", saves=(4,), steps=200)
    for step in range(1, 101):
        run.log("step", step=step, loss=float(step))
    listed, told = describe(run.path), describe_in_detail(run.path)
    assert listed["loss"] == told["loss"] == 2.5  # of the steps up to the save
    assert listed["loss_words"] == told["loss_words"] == "mean loss 2.5000 (last 4 steps)"

    run.finish({"step": 100, "samples": {}})
    for described in (describe(run.path), describe_in_detail(run.path)):
        assert described["loss"] == sum(range(51, 101)) / 50
        assert described["loss_words"] == "mean loss 75.5000 (last 50 steps)"
        assert described["loss_words"] == say_loss(list(map(float, range(1, 101))))

    other = make_run(tmp_path, "begun", "b", saves=(4,), finished=4, steps=4)  # its log begins later
    other.log("step", step=4, loss=1.0)
    assert describe(other.path)["loss_words"] == describe_in_detail(other.path)["loss_words"]
    assert describe(other.path)["loss"] == (10 + 20 + 30 + 1) / 4
    assert say_loss([]) == "" and say_loss([float("nan")] * 2) == "mean loss not finite (last 2 steps)"


def test_the_time_of_a_run_is_that_of_its_processes(tmp_path):
    run = make_run(tmp_path, "twice", steps=8)
    created = run.about["created"]
    times = [("begun", 1), ("step", 3), ("step", 5), ("paused", 6), ("begun", 1000), ("step", 1004)]
    lines = [json.dumps({"event": event, "time": created + after, "step": 1}) for event, after in times]
    (run.path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert describe(run.path)["seconds"] == pytest.approx(6 + 4)
    (run.path / "log.jsonl").unlink()
    assert describe(run.path)["seconds"] is None


def test_a_run_without_samples_has_a_picture_that_it_was_trained_on(tmp_path):
    run = make_run(tmp_path, "moss", saves=(2,))
    assert describe(run.path)["thumbnail"] is None
    Image.new("RGB", (4000, 20), "red").save(tmp_path / "photo.jpg")
    run.keep_picture(lambda path: draw_small(tmp_path / "photo.jpg", path))
    run.keep_picture(lambda path: path.write_bytes(b"another one"))  # of a later process
    with Image.open(run.path / "picture.png") as picture:
        assert picture.size == (256, 1) and describe(run.path)["thumbnail"] == "picture.png"
    (run.path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(run.path / "samples" / "step-00000002-1.png")
    assert describe(run.path)["thumbnail"] == "step-00000002-1.png"


def test_settings_are_grouped_by_node_and_those_that_differ_are_marked(tmp_path):
    concepts = (ConceptConfig(folder="a"), ConceptConfig(folder="b", repeats=3))
    asked = RunConfig(
        base_model=BaseModelConfig(path="/models/base.safetensors", tokenizer="/comfyui/sd1_tokenizer"),
        dataset=DatasetConfig(concepts=concepts),
        lora=LoraConfig(rank=0, dropout=0.1),
        optimizer=OptimizerConfig(options={"weight_decay": 0.2}),
        sample=SampleConfig(prompts=("a cat", "D: a dog")),
    )
    config = fill(asked, Defaults(rank=8))
    about = {"config": config.to_dict(), "open": names_left_open(asked.to_dict(), config.to_dict())}
    run = new_run(tmp_path, Keys(run="a" * 64, course="a" * 64), "moss", 4, **about)
    described = describe_in_detail(run.path)
    changed = {
        (group["node"], group["number"], each["input"]): described["settings"][each["name"]]
        for group in described["nodes"]
        for each in group["settings"]
        if each["changed"]
    }
    assert changed == {
        ("AtelierLoadBaseModel", "", "checkpoint"): "base.safetensors",
        ("AtelierConceptDataset", "1", "folder"): "a",
        ("AtelierConceptDataset", "2", "folder"): "b",
        ("AtelierConceptDataset", "2", "repeats"): 3,
        ("AtelierLoraConfig", "", "algorithm.dropout"): 0.1,
        ("AtelierOptimizer", "", "name.weight_decay"): 0.2,
        ("AtelierSaves", "", "sample_prompts"): "D: a dog",
    }
    every = [each["name"] for group in described["nodes"] for each in group["settings"]]
    assert sorted(every) == sorted(described["settings"])
    words = {each["name"]: each["words"] for group in described["nodes"] for each in group["settings"]}
    assert words["lora.dropout"] == rows_of(LoraConfig)["dropout"].words


def test_of_many_saves_only_the_newest_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's run may have a hundred thousand."""
    run = make_run(tmp_path, "many", saves=range(1, 9), steps=9)
    read, looked = [], []
    monkeypatch.setattr(catalogue, "MOST_SAVES", 3)
    for module, name, seen in ((folder, "read_object", read), (catalogue, "folder_size", looked)):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda path, *most, seen=seen, f=function: seen.append(path.name) or f(path, *most)
        )
    told = describe_in_detail(run.path)
    assert [save["step"] for save in told["saves"]] == [6, 7, 8] and told["step"] == 8
    assert read.count("checkpoint.json") == 3 and len(looked) == 1 + 3
    with pytest.raises(ValueError, match=r"it has LoRAs of the steps 1, 2, .* and 5 more\.$"):
        monkeypatch.setattr(export, "MOST_NAMED", 3)
        export.save_to_export(run, 9)
