"""Workflows are read without a server: subgraphs, bypassed nodes, links of values, and what cannot be read."""

import json
from typing import Any

import pytest

from lora_atelier.dev import FLOW, QUICKSTART, ROOT, TINY_BASE, TOUR
from lora_atelier.trainer_core.config import OPTIMIZERS, BaseModelConfig, ConnectedConfig
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.models import Chosen, source_of
from lora_atelier.trainer_core.workflow.canvas import prompt_of
from lora_atelier.trainer_core.workflow.connecting import connector
from lora_atelier.trainer_core.workflow.places import ASSETS, Folders
from lora_atelier.trainer_core.workflow.read import read_workflow

PLACES = Folders(tokenizer=ROOT)
SUBGRAPH = ROOT / "subgraphs" / "Train a LoRA (Atelier).json"


def loaded(path=QUICKSTART) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def find(workflow: dict, kind: str) -> dict:
    return next(node for node in workflow["nodes"] if node["type"] == kind)


def read(document: Any, node: str = "") -> Any:
    return read_workflow(document, PLACES, node, connector())[:2]


def set_value(node: dict, name: str, value: Any) -> None:
    """Set a widget of a node whose choices have no inputs of their own before it."""
    names: list[str] = []
    for each in FORMS[node["type"]].inputs:
        if each.widget:
            names += [each.input, *(["control"] if each.controlled else [])]
    node["widgets_values"][names.index(name)] = value


def add(workflow: dict, node: dict, origin: int, target: dict, name: str, kind: str) -> None:
    """Add a node, and link its first output into an input of another one."""
    if node:
        workflow["nodes"].append(node)
    number = 1000 + len(workflow["links"])
    slot = next((i for i, each in enumerate(target["inputs"]) if each["name"] == name), len(target["inputs"]))
    if slot == len(target["inputs"]):
        target["inputs"].append({"name": name, "type": kind, "widget": {"name": name}})
    target["inputs"][slot]["link"] = number
    workflow["links"].append([number, origin, 0, target["id"], slot, kind])


def test_the_linked_model_of_train_lora_is_handed_on_and_not_another_ones():
    prompt = prompt_of(loaded(TOUR), FORMS)
    train = next(each for each in prompt.values() if each["class_type"] == "AtelierTrain")
    config = next(each for each in prompt.values() if each["class_type"] == "AtelierLoraConfig")
    for name, node in (("trained", train), ("beside", config)):
        prompt[name] = {"class_type": "AtelierConnectModel", "inputs": {}}
        node["inputs"]["base_model"] = [name, 0]
    chosen: dict[str, Any] = {}

    def connect(_: Any, key: str) -> Chosen:
        base = BaseModelConfig(path=key, connected=ConnectedConfig())
        return chosen.setdefault(key, Chosen(base, lambda config: config.path))

    _, config, opened = read_workflow(prompt, PLACES, "", connect)
    assert chosen.keys() == {"trained", "beside"}
    assert config.base_model is chosen["trained"].config and opened is chosen["trained"].open
    with pytest.raises(ValueError, match="which needs ComfyUI"):
        source_of(config.base_model)


def test_a_train_lora_without_a_base_model_is_refused():
    prompt = prompt_of(loaded(), FORMS)
    train = next(each for each in prompt.values() if each["class_type"] == "AtelierTrain")
    train["inputs"]["base_model"] = train["inputs"]["dataset"]
    with pytest.raises(ValueError, match="gives no base model"):
        read(prompt)


def test_the_quickstart_is_read():
    name, config = read(loaded())
    assert name == "mossling" and config.base_model.path == str(ASSETS / TINY_BASE.name)
    assert [concept.folder for concept in config.dataset.concepts] == [str(ASSETS / "concept_example")]


def test_a_base_model_that_lora_config_only_looks_at_changes_nothing():
    workflow = loaded(TOUR)
    lora, base = find(workflow, "AtelierLoraConfig"), find(workflow, "AtelierLoadBaseModel")
    before = read(workflow)
    add(workflow, {}, base["id"], lora, "base_model", "ATELIER_BASE_MODEL")
    assert read(workflow) == before


def test_the_prompt_of_a_workflow_is_read_alike():
    prompt = prompt_of(loaded(TOUR), FORMS)
    assert read(prompt) == read({"prompt": prompt}) == read(loaded(TOUR))


def test_a_subgraph_is_opened():
    workflow = loaded(SUBGRAPH)
    (outer,) = workflow["nodes"]
    outer["widgets_values"][1] = "atelier:concept_example"  # the value that the subgraph's node shows
    _, config = read(workflow)
    assert config.train.steps == 1000 and config.dataset.concepts[0].folder == str(ASSETS / "concept_example")
    outer["widgets_values"][4] = 77
    assert read(workflow)[1].train.steps == 77
    constant = {"id": 90, "type": "PrimitiveInt", "widgets_values": [88, "fixed"], "outputs": [{"type": "INT"}]}
    add(workflow, constant, 90, outer, "steps", "INT")
    assert read(workflow)[1].train.steps == 88


@pytest.mark.parametrize("kind", ["PrimitiveInt", "PrimitiveNode"])
def test_a_linked_value_is_read(kind):
    workflow = loaded()
    node = {"id": 90, "type": kind, "widgets_values": [33, "fixed"], "outputs": [{"type": "INT"}]}
    add(workflow, node, 90, find(workflow, "AtelierTrain"), "steps", "INT")
    assert read(workflow)[1].train.steps == 33


def test_a_reroute_is_followed():
    workflow = loaded()
    train = find(workflow, "AtelierTrain")
    slot = next(each for each in train["inputs"] if each["name"] == "dataset")
    reroute = {"id": 91, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": slot["link"]}]}
    add(workflow, reroute, 91, train, "dataset", "*")
    assert read(workflow) == read(loaded())


def test_what_is_written_beside_the_pictures_is_trained_without_the_model_that_wrote_it():
    prompt = prompt_of(loaded(), FORMS)
    train = next(each for each in prompt.values() if each["class_type"] == "AtelierTrain")
    for name, kind in (("masks", "AtelierWriteMasks"), ("texts", "AtelierWriteCaptions")):
        inputs = {"dataset": train["inputs"]["dataset"], name: ["model", 0], "existing": "keep"}
        prompt[name] = {"class_type": kind, "inputs": inputs}
        train["inputs"]["dataset"] = [name, 0]
    assert read(prompt) == read(loaded())


def masked(mode: int) -> dict:
    workflow = loaded()
    train, data = find(workflow, "AtelierTrain"), find(workflow, "AtelierConceptDataset")
    values = [each.shown for each in FORMS["AtelierMaskLoader"].inputs if each.widget]
    sockets = [{"name": "dataset", "type": "ATELIER_DATASET", "link": None}]
    mask = {"id": 92, "type": "AtelierMaskLoader", "mode": mode, "inputs": sockets, "widgets_values": values}
    mask["outputs"] = [{"name": "DATASET", "type": "ATELIER_DATASET"}]
    add(workflow, mask, 92, train, "dataset", "ATELIER_DATASET")
    add(workflow, {}, data["id"], mask, "dataset", "ATELIER_DATASET")
    return workflow


def test_bypassed_nodes_are_passed_through_and_muted_ones_are_none():
    assert read(masked(0))[1].dataset.concepts[0].masks is not None
    assert read(masked(4)) == read(loaded())
    with pytest.raises(ValueError, match="dataset of Train LoRA is linked to Mask Loader, which is muted; unmute it"):
        read(masked(2))
    behind = masked(4)  # bypassed, behind a muted one
    find(behind, "AtelierConceptDataset")["mode"] = 2
    with pytest.raises(ValueError, match=r"dataset of Train LoRA is linked to .*, which is muted"):
        read(behind)
    prompt = {"1": {"class_type": "AtelierTrain", "inputs": {"name": "a"}, "_meta": [1]}}
    with pytest.raises(ValueError, match="is missing"):
        read(prompt)


def test_every_optimizer_has_its_own_values():
    for name, kind in OPTIMIZERS.items():
        if name == "custom":
            continue
        workflow = loaded(TOUR)
        node = find(workflow, "AtelierOptimizer")
        rows = FORMS["AtelierOptimizer"].inputs
        own = [each.shown for each in rows[0].options[name]]
        node["widgets_values"] = [name, *own, *(each.shown for each in rows[1:])]
        optimizer = read(workflow)[1].optimizer
        assert optimizer.name == name
        assert optimizer.options == {each.name: each.default for each in kind.settings}


def test_widgets_that_an_older_file_lacks_have_their_defaults():
    workflow = loaded()
    data = find(workflow, "AtelierConceptDataset")
    wanted = read(workflow)
    data["widgets_values"] = data["widgets_values"][:-4]
    assert read(workflow) == wanted


def test_two_training_parts_are_asked_about():
    workflow = loaded()
    train = find(workflow, "AtelierTrain")
    other = json.loads(json.dumps(train)) | {"id": 95}
    set_value(other, "name", "other")
    set_value(other, "steps", 3)
    workflow["nodes"].append(other)
    with pytest.raises(ValueError, match=rf"^it has 2 Train LoRA nodes: {train['id']} \(mossling\), 95 \(other\)"):
        read(workflow)
    assert read(workflow, "95")[0] == "other" and read(workflow, "95")[1].train.steps == 3
    with pytest.raises(ValueError, match=f"node 7 is no Train LoRA; set --node to {train['id']} or 95"):
        read(workflow, "7")
    other["mode"] = 2
    assert read(workflow) == read(loaded())


def test_a_workflow_without_training_is_refused():
    workflow = loaded()
    workflow["nodes"] = [node for node in workflow["nodes"] if node["type"] != "AtelierTrain"]
    with pytest.raises(ValueError, match="it has no training part"):
        read(workflow)


def test_values_of_nodes_that_run_only_in_comfyui_are_refused():
    workflow = loaded()
    node = {"id": 90, "type": "AtelierSweep", "widgets_values": ["1, 2"], "outputs": [{"type": "*"}]}
    add(workflow, node, 90, find(workflow, "AtelierTrain"), "steps", "INT")
    with pytest.raises(ValueError, match="steps of Train LoRA comes from the node AtelierSweep, which runs only in"):
        read(workflow)
    with pytest.raises(ValueError, match="it trains on a model that ComfyUI's own nodes load"):
        read(loaded(FLOW))


def test_a_loop_before_a_model_is_refused_by_its_name():
    workflow = loaded(FLOW)
    connect = find(workflow, "AtelierConnectModel")
    loop = {"id": 91, "type": "StartLoop", "widgets_values": ["for", 3], "outputs": [{"type": "STRING"}]}
    add(workflow, loop, 91, connect, "guidance", "FLOAT")
    with pytest.raises(ValueError, match="base_model of Train LoRA comes through StartLoop, and a loop runs only in"):
        read(workflow)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"steps": "many"}, "steps of Train LoRA is 'many' and must be a whole number"),
        ({"dataset": 5}, "dataset of Train LoRA is 5; link a node into it"),
        ({"dataset": ["99", 0]}, "dataset of Train LoRA is linked to node 99, which does not run"),
        ({"on_existing": "never"}, "on_existing of Train LoRA is 'never', which is not in its list"),
        ({"name": "../x"}, "The name '../x' cannot be a file name"),
    ],
)
def test_wrong_values_of_a_prompt_are_refused(inputs, sentence):
    prompt = prompt_of(loaded(), FORMS)
    train = next(node for node in prompt.values() if node["class_type"] == "AtelierTrain")
    train["inputs"] |= inputs
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        read(prompt)


def test_a_circle_of_links_is_refused():
    prompt = prompt_of(loaded(), FORMS)
    key = next(key for key, node in prompt.items() if node["class_type"] == "AtelierConceptDataset")
    prompt[key]["inputs"]["dataset"] = [key, 0]
    with pytest.raises(ValueError, match="the links of dataset of Concept Dataset form a circle"):
        read(prompt)


@pytest.mark.parametrize(
    "damage",
    [
        lambda workflow: workflow.update(links=[[1]]),
        lambda workflow: workflow["nodes"][0].pop("id"),
        lambda workflow: workflow.update(nodes=[5]),
        lambda workflow: workflow.update(definitions={"subgraphs": [5]}),
    ],
)
def test_a_damaged_workflow_is_refused(damage):
    workflow = loaded()
    damage(workflow)
    with pytest.raises(ValueError, match=r"^it is damaged: "):
        read(workflow)


def test_a_workflow_without_end_is_refused():
    circle = {"type": "Reroute", "inputs": [{"name": "", "type": "*", "link": 1}], "outputs": [{"type": "*"}]}
    workflow = loaded()
    workflow["nodes"] += [{**circle, "id": 901}, {**circle, "id": 902, "inputs": [{**circle["inputs"][0], "link": 2}]}]
    workflow["links"] += [[1, 902, 0, 901, 0, "*"], [2, 901, 0, 902, 0, "*"]]
    find(workflow, "AtelierTrain")["inputs"][0]["link"] = 1
    with pytest.raises(ValueError, match="its links form a circle"):
        read(workflow)

    def level(number: int) -> dict:  # each holds the next one ten times: 10^15 nodes
        inner = [{"id": i, "type": f"level {number + 1}", "inputs": [], "outputs": []} for i in range(10)]
        return {"id": f"level {number}", "nodes": inner, "links": [], "inputs": [], "outputs": []}

    workflow = {**level(0), "definitions": {"subgraphs": [level(number) for number in range(15)]}}
    with pytest.raises(ValueError, match="it has more than 20000 nodes"):
        read(workflow)
