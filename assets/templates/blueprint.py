"""The blueprint: a training as one node, with a subgraph inside; and the first template, which holds it."""

from __future__ import annotations

import uuid
from typing import Any

from .canvas import TINY, Graph, Node
from .pictures import EXAMPLE, of_stable_diffusion

BLUEPRINT = "Train a LoRA (Atelier)"
ABOUT = (
    "Trains a LoRA on a checkpoint and a folder of pictures, and draws with it. Everything else suits the model; open "
    "the subgraph to change it."
)
ALIASES = ["lora trainer", "train lora", "finetune", "dreambooth", "kohya", "atelier"]
INPUT, OUTPUT = -10, -20  # the ends of a subgraph, as ids of nodes in its links
SPACE = uuid.UUID("5fab2fc1-bd75-517c-8ba5-b4bab7bb90b5")  # the blueprint's id, and what others are made from


def blueprint(
    graph: Graph,
    at: tuple[int, int],
    size: tuple[int, int],
    base: dict,
    concept: dict,
    train: dict,
    drawn: dict,
    sample_every: int = 250,
) -> Node:
    """Add the blueprint: five inputs, the state of the run and its samples on its outside, five nodes inside."""
    inside = Graph(graph.forms, first=11)  # apart from those outside: the editor would number them anew
    loaded = inside.add("AtelierLoadBaseModel", (0, 0), (340, 358), **base)
    data = inside.add("AtelierConceptDataset", (0, 440), (340, 290), **concept)
    saves = inside.add("AtelierSaves", (0, 810), (340, 250), sample_prompts="{caption}", sample_every=sample_every)
    trained = inside.add(
        "AtelierTrain",
        (400, 150),
        (400, 610),
        linked={"base_model": (loaded, "BASE_MODEL"), "dataset": (data, "DATASET"), "saves": (saves, "SAVES")},
        **train,
    )
    sample = inside.add(
        "AtelierSample",
        (860, 0),
        (340, 570),
        linked={
            "model": (trained, "MODEL"),
            "clip": (trained, "CLIP"),
            "vae": (loaded, "VAE"),
            "before_model": (loaded, "MODEL"),
            "before_clip": (loaded, "CLIP"),
        },
        **drawn,
    )
    shown = [(loaded, "checkpoint"), (data, "folder"), (data, "trigger_word"), (trained, "name"), (trained, "steps")]
    given = [(trained, "MODEL"), (trained, "CLIP"), (loaded, "VAE"), (trained, "LORA"), (trained, "LORA_PATH")]
    graph.subgraphs.append(definition(graph, inside, shown, [*given, (sample, "IMAGE")]))
    widgets = [outer_input(graph, node, name) for node, name in shown]
    return graph.put(
        Node(
            graph.first + len(graph.nodes),
            str(SPACE),
            BLUEPRINT,
            at,
            size,
            [],
            {name: source.outputs[name] for source, name in [*given, (sample, "IMAGE")]},
            [value_of(graph, node, name) for node, name in shown],
            {},
            {},
            widgets=widgets,
        )
    )


def value_of(graph: Graph, node: Node, name: str) -> Any:
    """Return the value of a widget before which no choice opens others."""
    names = []
    for row in graph.forms[node.type]["rows"]:
        names += [row.name] * row.widget + [""] * row.controlled
    return node.values[names.index(name)]


def outer_input(graph: Graph, node: Node, name: str) -> dict[str, Any]:
    """Return the input by which a widget of an inner node is seen on the outside, in words."""
    words = {"label": name.replace("_", " ")} if "_" in name else {}
    return {"name": name, "type": graph.forms[node.type]["types"][name], "widget": {"name": name}, "link": None} | words


def definition(
    graph: Graph, inside: Graph, shown: list[tuple[Node, str]], given: list[tuple[Node, str]]
) -> dict[str, Any]:
    """Return the definition of a subgraph. shown: the widgets, given: the outputs that it has on its outside."""
    nodes = {node.id: saved for node, saved in zip(inside.nodes, inside.written(), strict=True)}
    links = [
        {"id": n, "origin_id": a.id, "origin_slot": out, "target_id": b.id, "target_slot": into, "type": kind}
        for n, a, out, b, into, kind in inside.links()
    ]
    ends: dict[str, list[dict[str, Any]]] = {"inputs": [], "outputs": []}

    def join(side: str, slot: int, about: dict[str, Any], x: int, **link: Any) -> int:
        number = len(links) + 1
        links.append({"id": number, **link, "type": about["type"]})
        place = {"id": str(uuid.uuid5(SPACE, about["name"])), "linkIds": [number], "pos": [x, 20 * (slot + 1)]}
        ends[side].append({"localized_name": about["name"], **about, **place})
        return number

    for slot, (node, name) in enumerate(shown):
        about, taken = outer_input(graph, node, name), nodes[node.id]["inputs"]
        widget = about.pop("widget")
        del about["link"]
        into = {"target_id": node.id, "target_slot": len(taken)}
        number = join("inputs", slot, about, -80, origin_id=INPUT, origin_slot=slot, **into)
        taken.append({"name": name, "type": about["type"], "widget": widget, "link": number})
    for slot, (node, name) in enumerate(given):
        about, at = {"name": name, "type": node.outputs[name]}, list(node.outputs).index(name)
        start = {"origin_id": node.id, "origin_slot": at}
        number = join("outputs", slot, about, 1300, **start, target_id=OUTPUT, target_slot=slot)
        nodes[node.id]["outputs"][at]["links"].append(number)
    return {
        "id": str(SPACE),
        "version": 1,
        "state": {
            "lastGroupId": 0,
            "lastNodeId": inside.nodes[-1].id,
            "lastLinkId": len(links),
            "lastRerouteId": 0,
        },
        "revision": 0,
        "config": {},
        "name": BLUEPRINT,
        "inputNode": {"id": INPUT, "bounding": [-180, 0, 120, 140]},
        "outputNode": {"id": OUTPUT, "bounding": [1260, 0, 120, 160]},
        **ends,
        "widgets": [],
        "nodes": list(nodes.values()),
        "groups": [],
        "links": links,
        "extra": {},
        "category": "training/lora",
        "description": ABOUT,
    }


def shipped_blueprint(graph: Graph) -> dict[str, Any]:
    """Write the file of the blueprint, which the editor offers beside its own."""
    blueprint(graph, (0, 0), (400, 300), {"checkpoint": TINY}, {}, {}, {})
    return graph.workflow(BlueprintDescription=ABOUT, BlueprintSearchAliases=ALIASES)


TOY_TRAIN = {"name": "my_first_lora", "steps": 400, "batch_size": 4}


def start(graph: Graph) -> dict[str, Any]:
    """Write the first template: the blueprint, and the picture that it draws."""
    node = blueprint(graph, (280, 0), (420, 290), {"checkpoint": TINY}, EXAMPLE, TOY_TRAIN, {"batch_size": 2}, 100)
    graph.add("SaveImage", (740, 0), (380, 335), linked={"images": (node, "IMAGE")}, **{"0": "atelier/my_first_lora"})
    graph.note(  # at the left, where reading starts; there is room below the node for what it tells of the run
        (0, 0),
        (240, 470),
        "Press **Run**. In a minute or two a toy model learns a *mossling*, and draws it: before at the left, after "
        "at the right.\n\n**Your own pictures**\n\n1. Put 10 to 30 pictures into *input/my_pictures*, each with a "
        "text file of the same name that describes it.\n2. *folder*: write *my_pictures*.\n3. *checkpoint*: choose "
        "yours.\n4. Give it a made-up *trigger word*, a *name*, and 1000 *steps*.\n5. Press **Run**.",
    )
    return graph.workflow()


def start_as_app(graph: Graph) -> dict[str, Any]:
    """Write the same as an app: a form with the five inputs and the state of the run, and the picture.

    Its nodes lie open, since a form shows Train LoRA's own view only for a node that is in no subgraph.
    """
    of_stable_diffusion(graph, None, EXAMPLE, TOY_TRAIN, {"batch_size": 2})
    base, data, trained, _, picture = graph.nodes
    form = [(base, "checkpoint"), (data, "folder"), (data, "trigger_word"), (trained, "name"), (trained, "steps")]
    for node, name in form:
        node.widgets.append(outer_input(graph, node, name))
    inputs = [[node.id, name] for node, name in [*form, (trained, "run")]]
    return graph.workflow(linearMode=True, linearData={"inputs": inputs, "outputs": [picture.id]})
