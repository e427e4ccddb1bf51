"""What services hear of a run, and the card with which a LoRA is published."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from run_folders import PLACE, make_run

from lora_atelier.trainer_core.common.callbacks import Callbacks, StepReport
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.outward import MESSAGES, Attempt, Outward, Sender, ServiceSettings, upload
from lora_atelier.trainer_core.runs import open_run
from lora_atelier.trainer_core.runs.card import published_files_of
from lora_atelier.trainer_core.runs.cli import main
from lora_atelier.trainer_core.runs.export import save_to_export
from lora_atelier.trainer_core.runs.folder import RunFolder
from lora_atelier.trainer_core.runs.news import telling

TOKEN = "hf_5e3cr3t-of-the-hub"


class Heard:
    """A service that keeps what it hears."""

    def __init__(self, tracks: bool) -> None:
        self.name, self.tracks = "a tracker" if tracks else "messages", tracks
        self.events, self.about, self.ended = [], [], []

    def begin(self, about):
        self.about.append(about)

    def take(self, events):
        self.events += events

    def end(self, failed):
        self.ended.append(failed)


def heard(path: Path, do, problem: BaseException | None = None, secrets=()) -> tuple[Heard, Heard, list[str]]:
    """Let services hear of a run that does something, and return them with the notes of its own callbacks."""
    notes: list[str] = []
    services = Heard(False), Heard(True)
    senders = [Sender(service, MESSAGES) for service in services]
    with (
        pytest.raises(type(problem)) if problem else Attempt(),
        telling(Callbacks(note=notes.append), senders, "moss", 60, secrets) as told,
    ):
        do(told)
        if problem:
            raise problem
    return *services, notes


def report(step: int, steps: int = 4) -> StepReport:
    return StepReport(
        step=step, steps=steps, loss=1 / step, grad_norm=float("nan"), learning_rates={"unet": 1e-4}, updated=True,
        seconds=0.5, epoch=step / 2, concepts={"cat": 0.5},
    )  # fmt: skip


def whole(run: RunFolder, last: int = 4):
    def do(told: Callbacks) -> None:
        told.run(run.path, True)
        for step in range(1, last + 1):
            told.step(report(step))
        told.saved(2)
        told.validation(last, 0.25)
        told.best(last, 0.25)
        told.samples(last, [run.path / "samples" / "step-00000004-1.png"])

    return do


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "runs", "moss", saves=(2, 4), logged=4, finished=4, steps=4)
    write_json(run.path / "run.json", {**run.about, "config": {
        "base_model": {"path": f"{PLACE}/base.safetensors"},
        "dataset": {"concepts": [{"folder": f"{PLACE}/cats", "captions": {"prefix": "mossling, "}}]},
        "lora": {"embeddings": [{"token": "<moss>"}]},
        "sample": {"prompts": ["a `moss` | thing: \"x\" --s 3", "two"]},
    }})  # fmt: skip
    (run.path / "samples").mkdir()
    for name in ("step-00000002-1", "step-00000004-1", "step-00000004-2"):
        Image.new("RGB", (8, 8)).save(run.path / "samples" / f"{name}.png")
    return open_run(run.path)


def test_services_hear_of_a_whole_run(run):
    messages, tracker, notes = heard(run.path, whole(run))
    assert notes == []
    assert [each.kind for each in messages.events] == ["start", "save", "best", "sample", "end"]
    assert [each.text for each in messages.events][1:] == [
        "Saved after step 2.",
        "Best so far: validation loss 0.2500 after step 4.",
        "1 sample drawn after 4 steps.",
        "Finished after step 4 of 4, mean loss 0.5208 (last 4 steps).",
    ]
    (about,) = tracker.about
    assert (about.name, about.run) == ("moss", run.path.name) and PLACE not in str(about.settings)
    steps = [each for each in tracker.events if each.kind == "step"]
    assert [each.step for each in steps] == [1, 2, 3, 4]  # without what is no number
    assert steps[1].values == {"loss": 0.5, "epoch": 1.0, "seconds": 0.5, "lr/unet": 1e-4, "concept/cat": 0.5}
    assert [each.values for each in tracker.events if each.kind == "validation"] == [{"validation": 0.25}]
    assert messages.ended == tracker.ended == [False]


def test_an_end_says_what_it_was(run):
    problem = ValueError(f"wrong at {PLACE}/x for {TOKEN}")
    messages, tracker, _ = heard(run.path, whole(run, 3), problem, [TOKEN])
    assert messages.events[-1].kind == "error"
    assert messages.events[-1].text == "Failed after step 3 of 4: wrong at (a path) for ***"
    assert tracker.ended == [True]
    messages, tracker, _ = heard(run.path, lambda told: None, ValueError("no folder"))
    assert [each.text for each in messages.events] == ["Failed before the first step: no folder"]
    assert tracker.about == []  # it knows of no run
    messages, *_ = heard(run.path, whole(run, 3), KeyboardInterrupt())
    assert messages.events[-1].kind == "end" and messages.events[-1].text == "Stopped after step 3 of 4."
    messages, tracker, _ = heard(run.path, lambda told: told.run(run.path, False))  # a result that is reused
    assert messages.events == tracker.events == []


def test_a_card_tells_what_the_lora_is_and_no_place_of_the_machine(run):
    run.rename("My moss / 1")
    files = published_files_of(open_run(run.path), save_to_export(run, None), licence="cc-by-4.0")
    assert list(files) == [
        "README.md", "My_moss_1.safetensors", "embeddings/My_moss_1-moss.safetensors",
        "samples/step-00000004-1.png", "samples/step-00000004-2.png",
    ]  # fmt: skip
    text = files["README.md"].decode()
    assert text.startswith("---\nlicense: cc-by-4.0\ntags:\n- lora-atelier\n")
    assert 'instance_prompt: "mossling, <moss>"\n' in text and "# My moss / 1\n" in text
    assert '- text: "a `moss` | thing: \\"x\\""\n  output: {url: samples/step-00000004-1.png}\n' in text
    assert '![a \\`moss\\` \\| thing: "x"](samples/step-00000004-1.png)' in text
    assert "- base model: base.safetensors\n" in text and "mean loss" in text
    assert "| `dataset.concepts.1.folder` | cats |" in text
    assert PLACE not in text and str(run.path) not in text
    drawn = published_files_of(run, save_to_export(run, 2), licence="mit")
    assert [name for name in drawn if name.startswith("samples")] == ["samples/step-00000002-1.png"]
    early = published_files_of(run, save_to_export(run, 2), licence="mit", samples=False)
    assert not [name for name in early if name.startswith("samples")] and b"mean loss" not in early["README.md"]
    assert early["My_moss_1.safetensors"] == run.path / "checkpoints" / "step-00000002" / "lora.safetensors"


def test_a_shell_publishes_privately_and_once_more_over_its_own(run, library, capsys, tmp_path):
    hub = library("huggingface_hub")
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"services": {"huggingface_hub": {"secret": TOKEN}}}))

    def publish(*more: str) -> int:
        place = ["--folder", str(run.path.parent), "--services", str(file), "--to", "hub"]
        return main(["publish", "moss", *place, "--licence", "mit", *more])

    assert publish("--repo", "cats") == 0
    assert capsys.readouterr().out == "Published privately: https://hub.example/somebody/cats\n"
    made = hub.repositories["somebody/cats"]
    assert made.private and made.token == TOKEN and made.messages == ["Step 4 of moss"]
    assert made.files["moss.safetensors"] == (run.path / "checkpoints/step-00000004/lora.safetensors").read_bytes()
    assert publish("--repo", "somebody/cats", "--step", "2") == 0 and made.messages[-1] == "Step 2 of moss"
    made.private = False
    assert publish("--repo", "somebody/cats") == 2
    assert "exists and is public" in capsys.readouterr().err
    made.tags = []
    assert publish("--repo", "somebody/cats", "--public") == 2
    assert "did not publish" in capsys.readouterr().err
    hub.problem = RuntimeError(f"401 for {TOKEN}")
    assert publish("--repo", "new") == 2
    assert capsys.readouterr().err == "huggingface_hub could not publish the LoRA: 401 for ***.\n"
    assert publish("--repo", "../new") == 2 and "no name of a repository" in capsys.readouterr().err
    sys.modules["huggingface_hub"] = None
    with pytest.raises(ValueError, match="is not installed"):
        upload({}, "a/b", public=False, token="", message="")
    assert TOKEN not in "".join(path.read_text("utf-8", "replace") for path in run.path.rglob("*") if path.is_file())
    assert Outward(services={"huggingface_hub": ServiceSettings(secret=TOKEN)}).secrets == [TOKEN]
