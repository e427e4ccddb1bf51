"""A run as a workflow for the canvas: read again, it is the same run."""

import json
from pathlib import Path

import pytest

from lora_atelier.dev import FLOW, ROOT
from lora_atelier.trainer_core.commands.convert import linked
from lora_atelier.trainer_core.commands.train import kept_workflow
from lora_atelier.trainer_core.config import (
    OPTIMIZERS,
    AugmentConfig,
    BaseModelConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    ExistingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
)
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.workflow.canvas import prompt_of
from lora_atelier.trainer_core.workflow.connecting import connector
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.read import read_workflow
from lora_atelier.trainer_core.workflow.run_file import OPEN, RunFile, read_run
from lora_atelier.trainer_core.workflow.write import listed, workflow_of

BASE = BaseModelConfig(path="/m/checkpoints/sub/base.safetensors", vae="/m/vae/a.safetensors", clip_skip=2)
TOP = Path("/").absolute()  # with the drive, on Windows
CATS = ConceptConfig(folder=f"{TOP}cats", captions=CaptionConfig(dropout=-1))
PLAIN = OPEN.replace(base_model=BASE, dataset=DatasetConfig(concepts=(CATS,)))
MASKS, AUGMENT = MaskConfig(invert=True, suffixes=("-a.png", "-b.png")), AugmentConfig(rotation=5)
WORD = EmbeddingConfig(token="moss", init="a cat", stop=0.5, stop_unit="share")
CHANGES = {
    "plain": {},
    "concepts": {
        "dataset": DatasetConfig(
            concepts=(
                CATS.replace(masks=MASKS, augment=AUGMENT),
                ConceptConfig(
                    folder=f"{TOP}dogs", resolutions=("512", "640x384"), min_side=32, masks=MASKS, augment=AUGMENT,
                    captions=CaptionConfig(protected=("a", "b c"), extensions=(".txt", ".tags"), prefix="moss")
                ),
                ConceptConfig(folder=f"{TOP}held", role="validation", masks=MaskConfig()),
            )
        )
    },
    "controls": {
        "dataset": DatasetConfig(
            concepts=(
                CATS.replace(controls=ControlConfig(folders=(f"{TOP}before", f"{TOP}pose"), fit="whole"), masks=MASKS),
                ConceptConfig(folder=f"{TOP}dogs", controls=ControlConfig(folders=(f"{TOP}a", f"{TOP}b", f"{TOP}c"))),
            )
        ),
        "sample": SampleConfig(prompts=("a cat --ci /x/1.png --ci 2.png",), width=0, height=0),
    },
    "slider of pairs": {
        "dataset": DatasetConfig(
            concepts=(
                ConceptConfig(folder=f"{TOP}circles", role="regularisation"),
                CATS.replace(controls=ControlConfig(folders=(f"{TOP}less",), use="slider")),
                ConceptConfig(folder=f"{TOP}dogs", role="prior_prediction"),
            )
        )
    },
    "buckets": {"train": OPEN.train.replace(buckets=BucketConfig(resolutions=("512", "640x384")), bucket_step=32)},
    "train": {"train": OPEN.train.replace(epochs=3, batch_size=2, accumulate=4, resolution=768, seed=2**64 - 1)},
    "validation": {"train": OPEN.train.replace(validate_every=5, keep_best=True, validation_share=0.1)},
    "scheduler": {"scheduler": SchedulerConfig(name="rex_restarts", cycles=3, d=0.5, gamma=0.8, warmup_steps=5)},
    "points": {"scheduler": SchedulerConfig(name="points", points="0:1, 0.5:0.2, 1:0")},
    "lokr": {"lora": LoraConfig(rank=8, alpha=4, algorithm="lokr", factor=8, tucker=True, preset="full", conv_rank=4)},
    "blocks": {"lora": LoraConfig(block_ranks=(4,) * 25, block_weights=(0.5,) * 25, include=("a*", "b"), names="peft")},
    "words": {"lora": LoraConfig(embeddings=(WORD, WORD.replace(token="fern", stop=0)))},
    "huber": {"objective": ObjectiveConfig(min_snr_gamma=5, loss="huber", huber_c=0.2, pyramid_iterations=6)},
    "p2": {"objective": ObjectiveConfig(weighting="p2", p2_gamma=0.5, timestep_distribution="beta", beta_a=3)},
    "memory": {"memory": MemoryConfig(checkpointing="2", compile=True)},
    "saves": {
        "saves": SavesConfig(folder="", file_name="{name}-{step}", save_every=0),
        "sample": SampleConfig(prompts=("a cat --d 5", "a dog"), negative="bad", width=640, height=0),
        "train": OPEN.train.replace(log="none", save_dtype="float32"),
    },
    "fork": {"existing": ExistingConfig(on_existing="fork", fork_run="cat-ab", fork_step=5)},
}  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_workflow_gives_its_run_again(changes):
    config = PLAIN.replace(**changes)
    document = json.loads(json.dumps(workflow_of(RunFile(name="cat", config=config))))
    name, again, _ = read_workflow(document, Folders(tokenizer=ROOT), "", connector())
    paths = {"path": BASE.path, "vae": BASE.vae, "tokenizer": ""}
    assert name == "cat" and again.replace(base_model=again.base_model.replace(**paths)) == config


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_written(name):
    assert workflow_of(RunFile(name="cat", config=PLAIN.replace(optimizer=OptimizerConfig(name=name))))


def test_only_nodes_that_are_needed_are_there():
    nodes = workflow_of(RunFile(name="cat", config=PLAIN))["nodes"]
    assert [node["type"] for node in nodes] == ["AtelierLoadBaseModel", "AtelierConceptDataset", "AtelierTrain"]
    assert len({tuple(node["pos"]) for node in nodes}) == 3


def test_what_no_nodes_make_is_refused_by_name():
    later = CATS.replace(folder=f"{TOP}dogs", masks=MASKS)
    config = PLAIN.replace(dataset=DatasetConfig(concepts=(CATS, later)))
    with pytest.raises(ValueError, match=r"^No workflow has the setting dataset\.concepts\.1\.masks of cat beside"):
        workflow_of(RunFile(name="cat", config=config))


def test_models_are_named_as_comfyui_lists_them():
    assert listed("/a/models/checkpoints/sd/base.safetensors", ("checkpoints",)) == "sd/base.safetensors"
    assert listed("D:\\models\\diffusers\\sdxl", ("checkpoints",)) == "diffusers/sdxl"
    assert listed("/tmp/base.safetensors", ("checkpoints",)) == "base.safetensors"


def of_flow():
    workflow = json.loads(FLOW.read_text(encoding="utf-8"))
    connect = next(node for node in workflow["nodes"] if node["type"] == "AtelierConnectModel")
    connect["widgets_values"][:3] = [2.5, True, True]  # guidance, weights in prompts, and to train what is distilled
    return workflow, connect


def written(workflow, tmp_path, *changes):
    (tmp_path / "flow.json").write_text(json.dumps(workflow), encoding="utf-8")
    run = read_run(tmp_path / "flow.json", Folders(), changes, connect=linked)
    return run, kept_workflow(run)


def test_a_linked_run_keeps_its_loaders_and_has_its_own_settings(tmp_path):
    workflow, connect = of_flow()
    same, kept = written(workflow, tmp_path)
    assert kept == workflow and not same.changed
    changes = ("train.steps=77", "optimizer.max_grad_norm=0.5", "base_model.connected.edit_text=single", "name=other")
    run, kept = written(workflow, tmp_path, *changes)
    prompts = [prompt_of(each, FORMS) for each in (workflow, kept)]
    connects = [next(node for node in each.values() if node["class_type"] == connect["type"]) for each in prompts]
    assert connects[1]["inputs"]["edit_text"] == "single" and connects[0]["inputs"]["edit_text"] == "plus"
    assert all(each["inputs"]["guidance"] == 2.5 and each["inputs"]["train_distilled"] for each in connects)
    loaders = [
        {name: each[node["inputs"][name][0]]["class_type"] for name in ("model", "clip", "vae")}
        for each, node in zip(prompts, connects, strict=True)
    ]
    assert loaders[0] == loaders[1]
    stored = [
        {n["type"]: n.get("widgets_values") for n in each["nodes"] if n["type"].startswith("Checkpoint")}
        for each in (workflow, kept)
    ]
    assert stored[0] == stored[1] and stored[0]
    again = read_workflow(kept, Folders(), "", linked)
    assert (again.name, again.config) == ("other", run.config) and again.config.train.steps == 77


def test_a_linked_run_keeps_its_load_clip_vision(tmp_path):
    workflow, connect = of_flow()
    loader = {"id": 90, "type": "CLIPVisionLoader", "widgets_values": ["b/seen.safetensors"], "inputs": []}
    loader["outputs"] = [{"name": "CLIP_VISION", "type": "CLIP_VISION", "links": [90]}]
    workflow["nodes"].append(loader)
    slot = next(
        (n for n, each in enumerate(connect["inputs"]) if each["name"] == "clip_vision"), len(connect["inputs"])
    )
    connect["inputs"][slot:] = [{"name": "clip_vision", "type": "CLIP_VISION", "link": 90}]
    workflow["links"].append([90, 90, 0, connect["id"], slot, "CLIP_VISION"])
    run, kept = written(workflow, tmp_path, "train.steps=77")
    for document in (kept, workflow_of(run)):
        prompt = prompt_of(document, FORMS)
        (inputs,) = (node["inputs"] for node in prompt.values() if node["class_type"] == connect["type"])
        (node,) = (each for each in document["nodes"] if str(each["id"]) == inputs["clip_vision"][0])
        assert (node["type"], node["widgets_values"]) == ("CLIPVisionLoader", ["b/seen.safetensors"])


@pytest.mark.parametrize("how", ["bypassed", "a setting"])
def test_loaders_that_more_than_links_lead_to_stay_in_their_workflow(how, tmp_path):
    workflow, connect = of_flow()
    loader = next(node for node in workflow["nodes"] if node["type"].startswith("Checkpoint"))
    if how == "a setting":
        node = {
            "id": 90,
            "type": "PrimitiveFloat",
            "widgets_values": [2.5],
            "outputs": [{"name": "FLOAT", "links": [90]}],
        }
        workflow["nodes"].append(node)
        workflow["links"].append([90, 90, 0, connect["id"], len(connect["inputs"]), "FLOAT"])
        connect["inputs"].append({"name": "guidance", "widget": {"name": "guidance"}, "link": 90})
    else:
        loader["mode"] = 4
    run, kept = written(workflow, tmp_path, "train.steps=77")
    assert kept == workflow and run.config.train.steps == 77
    with pytest.raises(ValueError, match="trains on a model that more than plain nodes load"):
        workflow_of(run)
