"""Runs as files: TOML of the same names, changes by name, and what another machine lacks."""

import json
import re

import pytest

from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BeneathConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    ConnectedConfig,
    ControlConfig,
    DatasetConfig,
    LoraConfig,
    MaskConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.run_file import OPEN, RunFile, read_open, read_run, write_run
from lora_atelier.trainer_core.workflow.toml_text import read_toml, write_toml

NOWHERE = Folders()
ODD = 'a "quoted" \\ back\nslash \x7f\t☃'
RUN = RunConfig(
    base_model=BaseModelConfig(path="/models/base.safetensors", clip_skip=2),
    dataset=DatasetConfig(
        concepts=(
            ConceptConfig(folder="/cats", masks=MaskConfig(), captions=CaptionConfig(prefix=ODD, dropout=-1)),
            ConceptConfig(
                folder="/dogs",
                augment=AugmentConfig(rotation=5),
                controls=ControlConfig(folders=("/before", "pose"), fit="whole"),
                captions=CaptionConfig(protected=("a b", "c"), class_prompt="dog"),
            ),
        )
    ),
    lora=LoraConfig(beneath=(BeneathConfig(path="/x.safetensors", strength=0.5),), include=("*attn*",)),
    optimizer=OptimizerConfig(name="lion", options={"weight_decay": 0.5}),
    train=TrainConfig(seed=2**64 - 1, buckets=BucketConfig(resolutions=("512", "640x384"))),
    sample=SampleConfig(prompts=("a cat --d 5", "a dog")),
)
DIGEST = "ab" * 32


def saved(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("config", [RUN, OPEN.replace(base_model=BaseModelConfig(path="m"))], ids=["odd", "open"])
def test_a_run_survives_toml(tmp_path, config):
    run = RunFile(name="cat", config=config, models={"path": DIGEST})
    assert read_run(saved(tmp_path, write_run(run)), NOWHERE) == run


def test_a_toml_says_only_what_is_not_open(tmp_path):
    config = read_open({"base_model": {"path": "m.safetensors"}, "dataset": {"concepts": [{"folder": "cats"}]}})
    text = write_run(RunFile(name="cat", config=config))
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == [
        'name = "cat"',
        "[base_model]",
        'path = "m.safetensors"',
        "[dataset]",
        "[[dataset.concepts]]",
        'folder = "cats"',
    ]
    assert (config.lora.rank, config.train.resolution, config.optimizer.learning_rate) == (0, 0, -1)
    assert config.dataset.concepts[0].captions.dropout == -1 and config.train.log == "csv"


def test_a_hand_written_toml_is_read_with_its_comments(tmp_path):
    path = saved(
        tmp_path,
        """
# a comment
name = "cat"
[base_model]
path = "m.safetensors"
[[dataset.concepts]]
folder = "cats"      # another
captions.shuffle = true
[train]
steps = 500
[optimizer]
name = "prodigy"
learning_rate = 1
""",
    )
    run = read_run(path, NOWHERE, ["train.steps=7", "dataset.concepts.1.repeats=2"])
    assert (run.name, run.config.train.steps, run.config.optimizer.learning_rate) == ("cat", 7, 1.0)
    (concept,) = run.config.dataset.concepts
    assert concept.captions.shuffle and concept.captions.dropout == -1 and concept.repeats == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("lora.algorithm=AlignProp", "choose lora, and train on the pictures that the reward rates highest."),
        ("lora.algorithm=align-prop", "choose lora, and train on the pictures that the reward rates highest."),
        ("objective.align_prop=true", "no setting objective.align_prop; choose lora, and train on the pictures"),
        ("lora.algorithm=dy_lora", "which is not here; choose lora with the highest rank, and lower it with Resize"),
        ("saves.file_name=cat.ckpt", "write cat: files are written as .safetensors, which every program reads."),
        ("name=cat.ckpt", "write cat: files are written as .safetensors, which every program reads."),
    ],
)
def test_what_others_train_by_is_refused_by_name_wherever_it_is_written(tmp_path, change, sentence):
    """In a TOML, by --set, and in a workflow or a prompt, whose nodes set the same."""
    name, _, value = change.partition("=")
    plain = 'base_model.path = "m"\n'
    written = f"{name} = {value if value == 'true' else repr(value)}\n"
    for text, changes in ((plain + written, ()), (plain, (change,))):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            read_run(saved(tmp_path, text), NOWHERE, changes)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train]\nsteps = ", "not TOML: Invalid value"),
        ("[train]\nsteps = 5", "it has no base_model; write [base_model] and path = the model's file."),
        ('base_model.path = "m"\ntrain.steps = "5"', "train.steps is '5' and must be a whole number."),
        ('base_model.path = "m"\ntrian.steps = 5', "There is no setting trian; did you mean train?"),
        ('base_model.path = "m"\ndataset.concepts = [{}]', "The setting dataset.concepts.1.folder is missing."),
        ('base_model.path = "m"\ndataset = 5', "dataset is 5 and must be a table."),
        ('name = 5\nbase_model.path = "m"', "name must be a text, and models a table of sha256."),
        ('name = "../x"\nbase_model.path = "m"', "The name '../x' cannot be a file name"),
        ('base_model.path = "m"\n[lora]\nrank = -3', "rank of LoRA Config is -3; it must be between 1 and 4096"),
    ],
)
def test_a_wrong_toml_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = saved(tmp_path, text)
    with pytest.raises(ValueError, match=f"^run.toml cannot be trained: {re.escape(sentence)}"):
        read_run(path, NOWHERE)


def test_a_toml_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"run.toml cannot be read: it is not text in UTF-8\.$"):
        read_run(path, NOWHERE)


def test_a_connected_model_has_no_toml():
    base = BaseModelConfig(path="flux", connected=ConnectedConfig())
    with pytest.raises(ValueError, match="which a TOML cannot name; train the workflow itself"):
        write_run(RunFile(name="cat", config=RUN.replace(base_model=base)))


def test_toml_values_come_back():
    values = {"a": 1e-05, "b": True, "c": [1, 2.5], "d e": {"f": ODD, "g": []}, "h": [{"i": 1}, {"i": 2}]}
    assert read_toml(write_toml(values)) == values


def test_a_json_that_is_neither_run_nor_workflow_is_refused(tmp_path):
    for text in ("[]", "{}", '{"nodes": 5}', '{"a": {"class_type": 5}}', "5"):
        with pytest.raises(ValueError, match=r"^x.json cannot be trained: it is neither a workflow nor a prompt"):
            read_run(saved(tmp_path, text, "x.json"), NOWHERE)
    with pytest.raises(ValueError, match=r"^x.json cannot be trained: not JSON"):
        read_run(saved(tmp_path, "{", "x.json"), NOWHERE)


def test_a_run_json_to_train_again_resumes(tmp_path):
    again = RUN.replace(existing=RUN.existing.replace(on_existing="train again"))
    path = saved(tmp_path, json.dumps({"config": again.to_dict(), "name": "cat"}), "run.json")
    assert read_run(tmp_path, NOWHERE).config == RUN and read_run(path, NOWHERE).config == RUN
