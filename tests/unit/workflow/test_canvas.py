"""From a workflow as the editor saves it to a prompt as the HTTP API takes it."""

import pytest
from bounded import bounded
from prompts import to_prompt

from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.workflow import canvas

SCHEMAS = {
    "Loader": {
        "display_name": "Load",
        "input": {"required": {"ckpt_name": [["a.safetensors", "b.safetensors"], {}]}},
        "input_order": {"required": ["ckpt_name"]},
    },
    "Sampler": {
        "display_name": "Sample",
        "input": {
            "optional": {"note": ["STRING", {"default": ""}], "mask": ["MASK", {}]},
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"control_after_generate": True}],
                "steps": ["INT", {}],
                "forced": ["FLOAT", {"forceInput": True}],
                "mode": ["COMBO", {"options": ["x", "y"]}],
            },
        },
        "input_order": {"required": ["model", "seed", "steps", "forced", "mode"], "optional": ["note", "mask"]},
    },
    "Optimizer": {
        "input": {
            "required": {
                "opt": [
                    "COMFY_DYNAMICCOMBO_V3",
                    {
                        "options": [
                            {"key": "adamw", "inputs": {"required": {"decay": ["FLOAT", {}]}}},
                            {
                                "key": "prodigy",
                                "inputs": {
                                    "required": {"d_coef": ["FLOAT", {}]},
                                    "optional": {"extra": ["MODEL", {}], "safe": ["BOOLEAN", {}]},
                                },
                            },
                        ]
                    },
                ],
                "lr": ["FLOAT", {}],
                "sizes": ["STRING", {}],
            }
        },
        "input_order": {"required": ["opt", "lr", "sizes"]},
    },
    "Stack": {
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "loras": [
                    "COMFY_DYNAMICGROUP_V3",
                    {
                        "template": {
                            "required": {"file": ["COMBO", {"options": ["a", "b"]}], "strength": ["FLOAT", {}]}
                        },
                        "min": 1,
                        "max": 20,
                    },
                ],
                "end": ["STRING", {"default": ""}],
            }
        },
        "input_order": {"required": ["model", "loras", "end"]},
    },
}


def node(number: int, kind: str, values: list | dict, inputs: list | None = None, **more: object) -> dict:
    """Build one node of a workflow file."""
    return {"id": number, "type": kind, "mode": 0, "inputs": inputs or [], "widgets_values": values, **more}


def convert(*nodes: dict, links: list | None = None) -> dict:
    """Convert a workflow of these nodes and return the inputs by node id."""
    prompt = to_prompt({"nodes": list(nodes), "links": links or []}, SCHEMAS)
    return {number: entry["inputs"] for number, entry in prompt.items()}


def test_widgets_take_values_in_schema_order_and_links_win() -> None:
    sampler = node(
        7,
        "Sampler",
        [42, "randomize", 20, "y", "hello"],
        [{"name": "model", "link": 1}, {"name": "steps", "link": None, "widget": {"name": "steps"}}],
    )
    inputs = convert(node(3, "Loader", ["b.safetensors"]), sampler, links=[[1, 3, 0, 7, 0, "MODEL"]])
    assert inputs["3"] == {"ckpt_name": "b.safetensors"}
    assert inputs["7"] == {"model": ["3", 0], "seed": 42, "steps": 20, "mode": "y", "note": "hello"}


def test_a_widget_that_became_a_socket_keeps_its_place() -> None:
    sampler = node(7, "Sampler", [42, "fixed", 20, "y", ""], [{"name": "seed", "link": 5, "widget": {"name": "seed"}}])
    inputs = convert(node(3, "Loader", ["a.safetensors"]), sampler, links=[[5, 3, 2, 7, 0, "INT"]])
    assert inputs["7"] == {"seed": ["3", 2], "steps": 20, "mode": "y", "note": ""}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["adamw", 0.01, 1e-4, "512"], {"opt": "adamw", "opt.decay": 0.01, "lr": 1e-4, "sizes": "512"}),
        (
            ["prodigy", 1.0, True, 1.0, "512"],
            {"opt": "prodigy", "opt.d_coef": 1.0, "opt.safe": True, "lr": 1.0, "sizes": "512"},
        ),
    ],
)
def test_a_dynamic_combo_takes_the_chosen_options_values(values: list, expected: dict) -> None:
    assert convert(node(1, "Optimizer", values))["1"] == expected


def test_a_group_of_rows_takes_as_many_values_as_it_has_rows() -> None:
    """As Load LoRA (Model) of newer ComfyUIs saves them: the number of rows, then each row's values."""
    rows = {"loras.0.file": "a", "loras.0.strength": 1.0, "loras.1.file": "b", "loras.1.strength": -0.5}
    listed = [2, *rows.values(), "the end"]
    named = {"end": "the end", **rows, "loras": 2}
    for values in (node(5, "Stack", listed), node(5, "Stack", listed[::-1], widgets_values_named=named)):
        assert convert(values)["5"] == {**rows, "end": "the end"}
    linked = node(5, "Stack", [1, "a", 1.0], [{"name": "loras.0.strength", "link": 1, "widget": {"name": "x"}}])
    found = convert(node(3, "Loader", ["a.safetensors"]), linked, links=[[1, 3, 0, 5, 0, "FLOAT"]])["5"]
    assert found == {"loras.0.file": "a", "loras.0.strength": ["3", 0], "end": ""}
    assert convert(node(5, "Stack", ["x", "the end"]))["5"] == {"end": "the end"}


def test_rows_and_choices_are_handed_on_as_comfyui_does() -> None:
    rows = {"loras.0.lora_name": "a", "loras.0.strength": 1.0, "loras.1.lora_name": "b", "loras.10.lora_name": "c"}
    found = canvas.nested_inputs({"model": 1, **rows, "mode": "large", "mode.size": 2})
    assert found == {
        "model": 1,
        "loras": [{"lora_name": "a", "strength": 1.0}, {"lora_name": "b"}, {"lora_name": "c"}],
        "mode": {"mode": "large", "size": 2},
    }
    assert canvas.nested_inputs({"lr": 2}) == {"lr": 2}


def test_values_by_name_and_lists_pass_through() -> None:
    assert convert(node(1, "Optimizer", {"lr": 2, "sizes": [1, 2]}))["1"] == {"lr": 2, "sizes": {"__value__": [1, 2]}}


def test_values_by_name_beside_the_list_win_over_its_order() -> None:
    """As frontends since 1.58 save them: widgets that were moved, added or renamed since do not shift the others."""
    named = {"lr": 1e-4, "opt": "prodigy", "opt.safe": False, "opt.d_coef": 2.0, "sizes": [1, 2], "a button": None}
    found = convert(node(1, "Optimizer", [9, 9, 9], widgets_values_named=named))["1"]
    sizes = {"__value__": [1, 2]}
    assert found == {"opt": "prodigy", "opt.d_coef": 2.0, "opt.safe": False, "lr": 1e-4, "sizes": sizes}
    sampler = node(7, "Sampler", [42, "fixed", 20, "y", "x"], widgets_values_named={"seed": 5, "steps": 3, "mode": "x"})
    assert convert(sampler)["7"] == {"seed": 5, "steps": 3, "mode": "x", "note": ""}  # the default of what it lacks
    for odd in (None, [], {}, "x", 3):
        assert convert(node(1, "Optimizer", ["adamw", 1, 2, "3"], widgets_values_named=odd))["1"]["lr"] == 2


def test_titles_are_kept_for_people() -> None:
    workflow = {"nodes": [node(1, "Loader", ["a.safetensors"]), node(2, "Loader", ["a.safetensors"], title="Base")]}
    prompt = to_prompt(workflow, SCHEMAS)
    assert [entry["_meta"]["title"] for entry in prompt.values()] == ["Load", "Base"]


def test_notes_and_muted_nodes_vanish_with_their_links() -> None:
    inputs = convert(
        node(1, "MarkdownNote", ["# words"]),
        node(3, "Loader", ["a.safetensors"], mode=2),
        node(7, "Sampler", [1, "fixed", 2, "x"], [{"name": "model", "link": 1}]),
        links=[[1, 3, 0, 7, 0, "MODEL"]],
    )
    assert inputs == {"7": {"seed": 1, "steps": 2, "mode": "x", "note": ""}}


def socket(name: str, kind: str, link: int | None = None) -> dict:
    """Build an input of a node."""
    return {"name": name, "type": kind, "link": link}


def test_wires_of_other_packs_are_followed():
    loader = node(1, "Loader", ["a.safetensors"], outputs=[{"name": "MODEL", "type": "MODEL"}])
    sender = node(2, "SetNode", ["m"], [socket("MODEL", "MODEL", 1)])
    getter = node(3, "GetNode", ["m"])
    reroute = node(4, "Reroute (rgthree)", [], [socket("", "*", 2)])
    switch = node(5, "Any Switch (rgthree)", [], [socket("any_01", "MODEL"), socket("any_02", "MODEL", 3)])
    sampler = node(6, "Sampler", [3, "fixed", 20, "x", ""], [socket("model", "MODEL", 4)])
    links = [[1, 1, 0, 2, 0, "MODEL"], [2, 3, 0, 4, 0, "MODEL"], [3, 4, 0, 5, 1, "MODEL"], [4, 5, 0, 6, 0, "MODEL"]]
    found = convert(loader, sender, getter, reroute, switch, sampler, links=links)
    assert found["6"]["model"] == ["1", 0] and not {"2", "3", "4"} & found.keys()


def test_what_is_sent_everywhere_reaches_open_inputs_of_its_type():
    loader = node(1, "Loader", ["a.safetensors"], outputs=[{"name": "MODEL", "type": "MODEL"}])
    everywhere = node(2, "Anything Everywhere", [], [socket("anything", "MODEL", 1)])
    named = node(3, "Anything Everywhere?", ["Other", ".*", ".*"], [socket("anything", "MASK", 2)])
    sampler = node(4, "Sampler", [3, "fixed", 20, "x", ""], [socket("model", "MODEL"), socket("mask", "MASK")])
    links = [[1, 1, 0, 2, 0, "MODEL"], [2, 1, 0, 3, 0, "MASK"]]
    found = convert(loader, everywhere, named, sampler, links=links)
    assert found["4"]["model"] == ["1", 0] and "mask" not in found["4"] and found.keys() == {"1", "4"}


@pytest.mark.parametrize(
    ("pattern", "reached"),
    [
        ({"input_regex": "^mo.*l$"}, True),
        ({"input_regex": "clip|vae"}, False),
        ({"title_regex": "Sample", "title_regex_invert": True}, False),
        ({"title_regex": "(a+)+$"}, False),  # a plain word, as it may take for ever
        ({"group_regex": "faces"}, False),
        ({"color_restricted": 1}, False),
        ({}, True),
    ],
)
def test_newer_senders_have_their_patterns_among_their_properties(pattern, reached):
    loader = node(1, "Loader", ["a.safetensors"], outputs=[{"name": "MODEL", "type": "MODEL"}])
    sender = node(2, "Anything Everywhere", [], [socket("model", "MODEL", 1)], properties={"ue_properties": pattern})
    sampler = node(4, "Sampler", [3, "fixed", 20, "x", ""], [socket("model", "MODEL")], title="Sample aaaaaaaaaa!")
    found = convert(loader, sender, sampler, links=[[1, 1, 0, 2, 0, "MODEL"]])
    assert (found["4"].get("model") == ["1", 0]) == reached


def test_a_muted_sender_is_named():
    loader = node(1, "Loader", ["a.safetensors"], outputs=[{"name": "MODEL", "type": "MODEL"}])
    sender = node(2, "SetNode", ["m"], [socket("MODEL", "MODEL", 1)], mode=2, title="Set m")
    sampler = node(4, "Sampler", [3, "fixed", 20, "x", ""], [socket("model", "MODEL", 2)])
    document = {"nodes": [loader, sender, node(3, "GetNode", ["m"]), sampler]}
    document["links"] = [[1, 1, 0, 2, 0, "MODEL"], [2, 3, 0, 4, 0, "MODEL"]]
    assert to_prompt(document, SCHEMAS)["4"]["_meta"][canvas.MUTED_INPUTS] == {"model": "Set m"}


def test_concept_dataset_is_read_as_it_was_saved_before_captions_and_pictures():
    values = ["cats", "a cat,", "text_file", 2, *canvas.ELSEWHERE.values(), "blurred.png"]
    role = values.index("train")
    found = canvas.prompt_of({"nodes": [node(1, "AtelierConceptDataset", values)]}, FORMS)["1"]["inputs"]
    wanted = {"folder": "cats", "trigger_word": "a cat,", "captions_from": "text_file", "repeats": 2, "role": "train"}
    assert found.items() >= (wanted | {"leave_out": "blurred.png"}).items() and "flip" not in found
    values[role] = "validation"
    assert (
        canvas.prompt_of({"nodes": [node(1, "AtelierConceptDataset", values)]}, FORMS)["1"]["inputs"]["role"]
        == "validation"
    )
    values[4] = True
    with pytest.raises(ValueError, match="of an older version has flip; set it anew"):
        canvas.prompt_of({"nodes": [node(1, "AtelierConceptDataset", values)]}, FORMS)


def test_a_group_node_is_refused_by_its_name():
    with pytest.raises(ValueError, match="it holds the group node My group"):
        convert(node(1, "workflow>My group", []))


MANY = 9000
WIDE = {
    "id": "wide",
    "inputs": [{"name": f"a{i}"} for i in range(MANY)],
    "nodes": [node(i, "X", [], [{"name": "v", "link": i}]) for i in range(MANY)],
    "links": [[i, -10, i, i, 0, "T"] for i in range(MANY)],
}
OUTSIDE = [{"name": f"a{i}", "link": None, "widget": {"name": f"a{i}"}} for i in range(MANY)]
LINKED = {"id": "linked", "nodes": [], "links": [[i, 1, 0, 2, 0, "T"] for i in range(MANY)]}


@pytest.mark.parametrize(
    ("nodes", "definition"),
    [
        ([node(1, "wide", list(range(MANY)), OUTSIDE)], WIDE),
        ([node(i, "linked", []) for i in range(MANY)], LINKED),
        (
            [node(i, "SetNode", ["a"]) for i in range(MANY)] + [node(MANY + i, "GetNode", ["b"]) for i in range(MANY)],
            {},
        ),
    ],
    ids=["inputs of a subgraph", "links of each use", "names that are sent"],
)
def test_a_large_workflow_takes_no_more_than_its_size(nodes: list, definition: dict) -> None:
    nodes = [*nodes, *(node(2 * MANY + i, "X", [], [socket("v", "T", i)]) for i in range(1000))]
    links = [[i, MANY + i, 0, 2 * MANY + i, 0, "T"] for i in range(1000)]
    document = {"nodes": nodes, "links": links, "definitions": {"subgraphs": [definition] if definition else []}}
    with bounded(20):  # a second; where each of many looks at all others, minutes
        assert len(to_prompt(document, {})) >= 1000


def test_a_workflow_that_would_take_for_ever_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(canvas, "MOST_STEPS", 5000)
    muted = {**node(0, "Reroute", []), "mode": 2}
    switches = [
        node(i, "Any Switch (rgthree)", [], [socket("a", "T", 2 * i), socket("b", "T", 2 * i + 1)])
        for i in range(1, 40)
    ]
    links = [[2 * i + j, i - 1, 0, i, j, "T"] for i in range(1, 40) for j in (0, 1)]
    document = {"nodes": [muted, *switches, node(50, "X", [], [socket("v", "T", 99)])], "links": links}
    with pytest.raises(ValueError, match=r"its links take more than \d+ steps to follow"):
        to_prompt({**document, "links": [*links, [99, 39, 0, 50, 0, "T"]]}, {})
    senders = [node(i, "Anything Everywhere", [], [socket("v", "Q", 1)]) for i in range(100)]
    open_inputs = [node(1000 + i, "X", [], [socket("v", "Z")]) for i in range(100)]
    with pytest.raises(ValueError, match="steps to follow"):
        to_prompt({"nodes": senders + open_inputs, "links": []}, {})
    with pytest.raises(ValueError, match="begins at an input of a subgraph, outside of any"):
        to_prompt({"nodes": [node(1, "X", [], [socket("v", "T", 1)])], "links": [[1, -10, 0, 1, 0, "T"]]}, {})
