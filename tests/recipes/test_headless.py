"""A run without a page: the same steps and files as the core's own, shown, stopped and resumed in a shell."""

import csv
import io
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from durable import equal
from safetensors.torch import load_file
from tiny_runs import tiny_config

from lora_atelier.trainer_core.commands import main
from lora_atelier.trainer_core.runs import asked, find_runs
from lora_atelier.trainer_core.train import train_lora
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.run_file import read_run

pytestmark = pytest.mark.usefixtures("no_estimates")


@pytest.fixture(scope="module")
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint, pictures, existing={"on_existing": "resume"}, train={"log": "csv"}, saves={"save_every": 0}
    )


@pytest.fixture(scope="module")
def first(config, tmp_path_factory):
    """A finished run of the core itself, in the folders of an output folder."""
    output = tmp_path_factory.mktemp("first") / "output"
    atelier = output / "atelier"
    (output / "loras" / "atelier").mkdir(parents=True)
    result = train_lora(
        config,
        output / "loras" / "atelier" / "cat.safetensors",
        atelier / "cache",
        logs=atelier / "logs",
        runs=atelier / "runs",
    )
    return result


@pytest.fixture
def copied(first, tmp_path):
    """A copy of that output folder, and the run's folder in it."""
    shutil.copytree(first.run.parents[2], tmp_path / "output")
    return tmp_path / "output" / "atelier" / "runs" / first.run.name


def same_tensors(one: Path, other: Path) -> bool:
    """Tell whether two files hold the same tensors; the dates in them differ."""
    return equal(load_file(one), load_file(other))


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_json_trains_the_same_run_elsewhere(first, tmp_path, capsys):
    shutil.copy(first.run / "run.json", tmp_path / "run.json")
    arguments = ["train", str(tmp_path / "run.json"), "--output", str(tmp_path / "out"), "--device", "cpu", "--json"]
    assert main(arguments) == 0
    told = events(capsys.readouterr().out)
    assert [event["loss"] for event in told if event["event"] == "step"] == first.losses
    result = told[-1]
    assert result["event"] == "result" and result["finished"] and result["steps"] == 4
    assert Path(result["lora"]) == tmp_path / "out" / "loras" / "atelier" / "cat.safetensors"
    assert Path(result["run"]) == tmp_path / "out" / "atelier" / "runs" / first.run.name
    assert same_tensors(Path(result["lora"]), first.path)
    notes = [event["text"] for event in told if event["event"] == "note"]
    (run,) = find_runs(tmp_path / "out" / "atelier" / "runs")
    assert [event["text"] for event in run.events() if event["event"] == "note"] == notes
    assert (tmp_path / "out" / "atelier" / "logs" / first.run.name / "log.csv").is_file()


def test_services_are_told_only_where_a_person_asks_for_it(copied, tmp_path, capsys, library):
    apprise, trackio = library("apprise"), library("trackio")
    secret = "discord://4711471147/tok_5e3cr3t-of-the-hook"
    services = {"apprise": {"on": True, "secret": secret}, "trackio": {"on": True}}
    file = tmp_path / "services.json"
    file.write_text(json.dumps({"services": services, "events": ["start", "save", "end"]}), encoding="utf-8")
    more = ["--set", "train.steps=6", "--device", "cpu", "--json"]
    asked = ["train", str(copied), *more, "--notify", "--services", str(file)]
    assert main(["train", str(copied), *more[:1], "train.steps=5", *more[2:], "--services", str(file)]) == 0
    assert apprise.taken == trackio.taken == []
    capsys.readouterr()
    assert main(asked) == 0
    told = events(capsys.readouterr().out)  # each line is JSON, whatever a library prints
    steps = [(event["step"], event["loss"]) for event in told if event["event"] == "step"]
    assert [each["body"].partition(",")[0] for each in apprise.taken] == [
        "Training begins.",
        "Finished after step 6 of 6",
    ]
    logged = [each for each in trackio.taken if each[0] == "log"]
    assert [(step, numbers["loss"]) for _, numbers, step in logged] == steps and steps
    assert trackio.taken[0][1]["config"]["train.steps"] == 6
    output = [path for path in copied.parents[2].rglob("*") if path.is_file()]
    assert not [path for path in output if b"tok_5e3cr3t" in path.read_bytes()]
    assert main([*asked[:-1], str(tmp_path / "none.json")]) == 2
    assert "There are no settings of services" in capsys.readouterr().err


def test_a_runs_folder_is_reused_and_continued_where_it_lies(copied, capsys):
    assert main(["train", str(copied), "--device", "cpu"]) == 0
    assert f"Already trained in {copied.name}" in capsys.readouterr().out
    assert main(["train", str(copied), "--set", "train.steps=6", "--device", "cpu", "--json"]) == 0
    told = events(capsys.readouterr().out)
    assert [event["step"] for event in told if event["event"] == "step"] == [5, 6]
    assert {run.steps for run in find_runs(copied.parent)} == {4, 6}


def test_a_run_gets_another_name_by_set(first, tmp_path, capsys):
    arguments = ["train", str(first.run), "--output", str(tmp_path / "out"), "--device", "cpu", "--json"]
    assert main([*arguments, "--set", "name=another cat", "--set", "train.steps=2"]) == 0
    result = events(capsys.readouterr().out)[-1]
    assert Path(result["lora"]).name == "another cat.safetensors" and Path(result["lora"]).is_file()
    assert json.loads((Path(result["run"]) / "run.json").read_text(encoding="utf-8"))["name"] == "another cat"
    for name, given in {"7": "7", "cat 2": '"cat 2"'}.items():  # a text, though it reads as a number, and as in JSON
        assert read_run(first.run, Folders(None), [f"name={given}"]).name == name


class Acts(io.StringIO):
    """A stream that acts when a text is written, once."""

    def __init__(self, text: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.text, self.act = text, act

    def reconfigure(self, **_: str) -> None:
        """Do as the stream of a shell does."""

    def write(self, text: str) -> int:
        if self.text and self.text in text:
            self.text = ""
            self.act()
        return super().write(text)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM],  # test_terminal.py sends the first
    ids=lambda number: number.name,
)
def test_a_signal_saves_and_the_same_command_resumes(first, tmp_path, monkeypatch, capsys, number):
    arguments = ["train", str(first.run), "--output", str(tmp_path), "--device", "cpu"]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stream = Acts("step 2 of 4", lambda: signal.raise_signal(number))
        patch.setattr("sys.stdout", stream)
        assert main(arguments) == 128 + number
    said = stream.getvalue()
    assert "Stopping: the run is saved first. Press Ctrl+C again to end it at once." in said
    assert "run the command again to resume" in said and "press Run" not in said
    assert signal.getsignal(number) is before
    assert main([*arguments, "--json"]) == 0
    told = events(capsys.readouterr().out)
    assert [event["step"] for event in told if event["event"] == "step"] == [3, 4]
    assert same_tensors(Path(told[-1]["lora"]), first.path)


def test_a_page_saves_stops_and_pauses_a_run_through_its_folder(first, tmp_path, monkeypatch, capsys):
    arguments = ["train", str(first.run), "--output", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(asked, "PAUSE", 0)  # of a test's steps none may pass unseen
    run = tmp_path / "atelier" / "runs" / first.run.name

    def train(after: str, *words: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            stream = Acts(after, lambda: [asked.ask(run, word) for word in words])
            patch.setattr("sys.stdout", stream)
            return main(arguments), stream.getvalue()

    code, said = train("step 1 of 4", "save", "pause")
    assert code == 3 and "Saved after step 1" in said and "Paused after step 1 of 4." in said
    code, said = train("step 2 of 4", "stop")
    assert code == 3 and "Stopped and kept after step 2 of 4; run the command again to resume." in said
    assert (tmp_path / "loras" / "atelier" / "cat-stopped-at-2.safetensors").is_file()
    code, said = train("step 4 of 4", "pause")  # the run ends anyway
    assert code == 0 and same_tensors(tmp_path / "loras" / "atelier" / "cat.safetensors", first.path)


def test_a_run_that_fails_says_so_in_a_sentence(copied, monkeypatch, capsys):
    def fails(*_: object) -> None:
        raise RuntimeError("The card is gone.")

    monkeypatch.setattr("lora_atelier.trainer_core.train.step", fails)
    assert main(["train", str(copied), "--set", "train.seed=5", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "The card is gone.\n"


def test_model_files_of_another_machine_are_named_with_their_hash(first, tmp_path, capsys):
    about = json.loads((first.run / "run.json").read_text(encoding="utf-8"))
    model = about["config"]["base_model"]["path"]
    about["config"]["base_model"] |= {"path": "/elsewhere/base.safetensors", "tokenizer": "/elsewhere"}
    about["config"]["dataset"]["concepts"][0]["folder"] = "/elsewhere/cats"
    run = tmp_path / "run.json"
    run.write_text(json.dumps(about), encoding="utf-8")
    arguments = ["train", str(run), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(arguments) == 2
    digest = about["models"]["path"]
    assert capsys.readouterr().err == (
        f"The base model base.safetensors (sha256 {digest}) is not at /elsewhere/base.safetensors; name the file by "
        "--base-model FILE.\n"
    )
    arguments += ["--base-model", model, "--tokenizer", TOKENIZER]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "The pictures are not at /elsewhere/cats; name their folder by --set dataset.concepts.1.folder=FOLDER.\n"
    )
    arguments += ["--set", f"dataset.concepts.1.folder={first.plan.dataset.concepts[0].folder}"]
    assert main(arguments) == 0
    assert f"Run in {tmp_path / 'out' / 'atelier' / 'runs' / first.run.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["train.stpes=5"], "There is no setting train.stpes; did you mean train.steps?"),
        (["train.steps=many"], "train.steps is 'many' and must be a whole number."),
        (["train.steps"], "--set train.steps is no setting with its value; write it as train.steps=500."),
        (["lora.beneath.2.path=x"], "There is no setting lora.beneath.2.path; 2 must be a number from 1 to 0."),
        (["train.steps=0"], "train.steps is 0; it must be between 1 and 1000000."),
        (
            ["name=a/b"],
            "The name 'a/b' cannot be a file name; use up to 100 letters, digits, spaces and - _ . ( ), without a "
            "folder, for example my_lora.",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(first, tmp_path, capsys, changes, sentence):
    given = [part for change in changes for part in ("--set", change)]
    assert main(["train", str(first.run), "--output", str(tmp_path), *given]) == 2
    said = capsys.readouterr()
    assert said.err == f"run.json cannot be trained: {sentence}\n" and not said.out and not list(tmp_path.iterdir())


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["train", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"There is no run {tmp_path / 'run.json'}; name a run's folder, its run.json, a TOML or a saved workflow.\n"
    )
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    assert main(["train", str(tmp_path)]) == 2
    assert "run.json cannot be trained: not JSON" in capsys.readouterr().err


def test_the_help_says_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "usage: python custom_nodes/lora-atelier train" in said and "130 stopped by Ctrl+C" in said


def test_the_device_is_one_that_there_is(first, tmp_path, capsys):
    assert main(["train", str(first.run), "--output", str(tmp_path), "--device", "toaster"]) == 2
    assert capsys.readouterr().err == "There is no device toaster; set --device to cuda, xpu, mps or cpu.\n"
    if not torch.cuda.is_available():
        assert main(["train", str(first.run), "--output", str(tmp_path), "--device", "cuda"]) == 2
        assert capsys.readouterr().err == "There is no device cuda; set --device to cuda, xpu, mps or cpu.\n"


def test_the_plan_is_that_of_the_run(first, tmp_path, capsys):
    crops = tmp_path / "crops.csv"
    arguments = ["plan", str(first.run), "--output", str(tmp_path), "--device", "cpu", "--json", "--crops", str(crops)]
    arguments += ["--guess"]
    assert main([*arguments, "--set", "train.epochs=2"]) == 0
    told = events(capsys.readouterr().out)
    (plan,) = (event for event in told if event["event"] == "plan")
    assert plan | {"event": "plan", "steps": 6, "epochs": 2.0, "pictures": 6} == plan
    guesses = {event["setting"]: event["value"] for event in told if event["event"] == "guess"}
    assert guesses.keys() >= {"resolution", "batch_size", "steps", "learning_rate"} and guesses["batch_size"] == 1
    assert sum(plan["buckets"].values()) == 6
    (measured,) = (event for event in told if event["event"] == "time")
    assert measured["seconds"] == pytest.approx(6 * measured["seconds_per_step"])
    with crops.open(encoding="utf-8", newline="") as file:
        assert sum(bool(row["bucket"]) for row in csv.DictReader(file)) == 6
    assert not find_runs(tmp_path / "atelier" / "runs")
    assert any("6 pictures, 6 visits and 3 batches per epoch." in event.get("text", "") for event in told)


def test_the_plan_of_a_finished_run_says_so(copied, capsys):
    assert main(["plan", str(copied), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"Already trained in {copied.name}" in said and "About" not in said
    assert main(["plan", str(copied), "--device", "cpu", "--set", "train.steps=0"]) == 2
    sentence = "run.json cannot be trained: train.steps is 0; it must be between 1 and 1000000.\n"
    assert capsys.readouterr().err == sentence


def test_a_toml_and_a_workflow_train_the_same_run(first, config, tmp_path, capsys):
    toml, workflow = tmp_path / "cat.toml", tmp_path / "cat.json"
    assert main(["export", str(first.run), str(toml)]) == 0
    assert main(["export", str(toml), str(workflow)]) == 0
    assert main(["export", str(toml), str(workflow)]) == 2
    assert "exists already" in capsys.readouterr().err
    model = ["--base-model", config.base_model.path, "--tokenizer", TOKENIZER]
    output = ["--output", str(first.run.parents[2]), "--device", "cpu"]
    for file in (toml, workflow):
        capsys.readouterr()
        assert main(["train", str(file), *model, *output]) == 0
        assert f"Already trained in {first.run.name}" in capsys.readouterr().out
