"""Write the workflows that come with the pack, workflows/*.json, and the blueprint in subgraphs/.

python assets/write_workflows.py [FOLDER]

A workflow is one function here: its nodes, what links them, and where they stand. A template opens fitted into three
quarters of the window, so each stays small: then it opens at 0.6 or more of its size, where words are read. The
editor's minimap lies over the lower right of the window, so nothing of a template stands there.
Values that are not given are the defaults of the nodes. The shipped files are what this script writes; a test compares.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCREEN, CLEAR = (1280, 720), (75, 115)  # pixels: of a small screen, and of the editor's menus left and above
READABLE, LARGEST = 0.62, 0.85  # the scales at which files open; a run makes its node taller
TINY = "atelier-tiny.safetensors"
HUB = "https://huggingface.co"
NOTE = "MarkdownNote"
GAP = 60  # between two columns
TITLE = 30  # a node's title stands above its position
DARK = {"color": "#2f3440", "bgcolor": "#1b1e25"}  # of notes: their text stays legible in both renderers
BLUEPRINT = "Train a LoRA (Atelier)"

# Inputs of the nodes of ComfyUI's that are used here: sockets, widgets with their values, outputs.
COMFYUI: dict[str, tuple[dict[str, str], tuple[Any, ...], dict[str, str]]] = {
    "UNETLoader": ({}, ("", "default"), {"MODEL": "MODEL"}),
    "CLIPLoader": ({}, ("", "", "default"), {"CLIP": "CLIP"}),
    "DualCLIPLoader": ({}, ("", "", "", "default"), {"CLIP": "CLIP"}),
    "VAELoader": ({}, ("",), {"VAE": "VAE"}),
    "SaveImage": ({"images": "IMAGE"}, ("ComfyUI",), {}),
    "CheckpointLoaderSimple": ({}, ("",), {"MODEL": "MODEL", "CLIP": "CLIP", "VAE": "VAE"}),
    "CLIPTextEncode": ({"clip": "CLIP"}, ("",), {"CONDITIONING": "CONDITIONING"}),
    "LTXAVTextEncoderLoader": ({}, ("", "", "default"), {"CLIP": "CLIP"}),
    "TextGenerate": (
        {"clip": "CLIP", "image": "IMAGE", "prompt": "STRING"},
        ("", 256, "off", False, True),
        {"generated_text": "STRING"},
    ),
    "SAM3_Detect": (
        {"model": "MODEL", "image": "IMAGE", "conditioning": "CONDITIONING"},
        (0.5, 2, False),
        {"masks": "MASK", "bboxes": "BOUNDING_BOX"},
    ),
    NOTE: ({}, ("",), {}),
}


@dataclass(frozen=True)
class File:
    """A model's file: its name, the folder of models/ it belongs to, and where ComfyUI offers to fetch it."""

    name: str
    directory: str
    source: str

    def as_property(self) -> dict[str, str]:
        """Return the entry of a node's property `models`."""
        return {"name": self.name, "url": f"{HUB}/{self.source}/{self.name}", "directory": self.directory}


@dataclass
class Node:
    """A node on the canvas. inputs: the node and output that each linked input takes from."""

    id: int
    type: str
    title: str | None
    at: tuple[int, int]
    size: tuple[int, int]
    sockets: list[tuple[str, str, bool]]  # name, type, whether it may stay open
    outputs: dict[str, str]
    values: list[Any]
    inputs: Mapping[str, tuple[Node, str]]
    properties: dict[str, Any] = field(default_factory=dict)
    collapsed: bool = False
    widgets: list[dict[str, Any]] = field(default_factory=list)  # those of inner nodes, seen on a subgraph's outside


class Graph:
    """The nodes of a workflow, in the order in which they are added."""

    def __init__(self, forms: Mapping[str, Any], first: int = 1) -> None:
        self.forms, self.first = forms, first
        self.nodes: list[Node] = []
        self.subgraphs: list[dict[str, Any]] = []  # their definitions

    def add(
        self,
        kind: str,
        at: tuple[int, int],
        size: tuple[int, int],
        *,
        heading: str | None = None,
        models: list[File] | None = None,
        collapsed: bool = False,
        linked: Mapping[str, tuple[Node, str]] | None = None,
        **values: Any,
    ) -> Node:
        """Add a node. linked: what each linked input takes; values: widgets that differ from their defaults."""
        if kind in COMFYUI:
            sockets, widgets, outputs = COMFYUI[kind]
            wanted = [(name, type_, False) for name, type_ in sockets.items()]
            taken = [values.pop(str(i), usual) for i, usual in enumerate(widgets)]
        else:
            form = self.forms[kind]
            rows, outputs = form["rows"], form["outputs"]
            taken = list(widget_values(rows, values))
            wanted = [(row.name, row.socket, row.optional) for row in rows if not row.widget]
        if values or (linked or {}).keys() - {name for name, *_ in wanted}:
            raise ValueError(f"{kind} has no {[*values, *(linked or {})]}")
        number = self.first + len(self.nodes)
        properties: dict[str, Any] = {"Node name for S&R": kind}
        if models:
            properties["models"] = [file.as_property() for file in models]
        return self.put(
            Node(number, kind, heading, at, size, wanted, outputs, taken, linked or {}, properties, collapsed)
        )

    def put(self, node: Node) -> Node:
        """Add a node that is complete."""
        self.nodes.append(node)
        return node

    def note(self, at: tuple[int, int], size: tuple[int, int], words: str) -> None:
        """Add a note, in letters as large as those on the pack's nodes: js/templates.js."""
        self.add(NOTE, at, size, heading="Read me", **{"0": words}).properties["atelier_note"] = True

    def links(self) -> list[tuple[int, Node, int, Node, int, str]]:
        """Return the links: number, source, slot of its output, target, slot of its input, type."""
        found = []
        for node in self.nodes:
            for slot, (name, type_, _) in enumerate(node.sockets):
                if name in node.inputs:
                    source, output = node.inputs[name]
                    found.append((len(found) + 1, source, list(source.outputs).index(output), node, slot, type_))
        return found

    def written(self) -> list[dict[str, Any]]:
        """Return the nodes as the editor saves them."""
        links = self.links()
        return [written(node, links, order) for order, node in enumerate(self.nodes)]

    def view(self) -> dict[str, Any]:
        """Return the view at which the file opens, clear of the editor's menus: all of it, or what is readable."""
        right, bottom = (max(node.at[axis] + node.size[axis] for node in self.nodes) for axis in (0, 1))
        room = (SCREEN[0] - 2 * CLEAR[0]) / right, (SCREEN[1] - CLEAR[1] - CLEAR[0]) / bottom
        scale = round(max(READABLE, min(LARGEST, *room)), 2)
        return {"scale": scale, "offset": [round(CLEAR[0] / scale), round(CLEAR[1] / scale)]}

    def workflow(self, **extra: Any) -> dict[str, Any]:
        """Return the whole workflow as the editor saves it, without an id: each copy gets one of its own."""
        links = self.links()
        found: dict[str, Any] = {
            "revision": 0,
            "last_node_id": self.first + len(self.nodes) - 1,
            "last_link_id": len(links),
            "nodes": self.written(),
            "links": [[n, a.id, out, b.id, into, kind] for n, a, out, b, into, kind in links],
            "groups": [],
            "config": {},
            "extra": {"ds": self.view()} | extra,
            "version": 0.4,
        }
        return found | ({"definitions": {"subgraphs": self.subgraphs}} if self.subgraphs else {})


def widget_values(rows: Any, values: dict[str, Any], prefix: str = "") -> list[Any]:
    """Return the values of a node's widgets in their order; takes those that it uses out of `values`."""
    taken = []
    for row in rows:
        if row.widget:
            value = values.pop(prefix + row.name, row.default)
            taken.append(value)
            taken += ["fixed"] if row.controlled else []
            taken += widget_values(row.options.get(value, ()), values, f"{prefix}{row.name}.") if row.options else []
    return taken


def written(node: Node, links: list[tuple[int, Node, int, Node, int, str]], order: int) -> dict[str, Any]:
    """Return a node as the editor saves it."""
    into = {slot: number for number, _, _, target, slot, _ in links if target is node}
    inputs = [
        {"name": name, "type": kind, "link": into.get(slot)}
        | ({"shape": 7} if optional else {})
        | ({"widget": {"name": name}} if kind == "STRING" and node.type in COMFYUI else {})
        for slot, (name, kind, optional) in enumerate(node.sockets)
    ]
    outputs = [
        {"name": name, "type": kind, "links": [n for n, source, out, *_ in links if source is node and out == slot]}
        for slot, (name, kind) in enumerate(node.outputs.items())
    ]
    saved = {
        "id": node.id,
        "type": node.type,
        "pos": list(node.at),
        "size": list(node.size),
        "flags": {"collapsed": True} if node.collapsed else {},
        "order": order,
        "mode": 0,
        "inputs": [*inputs, *node.widgets],
        "outputs": outputs,
        "properties": node.properties,
        "widgets_values": node.values,
    }
    return saved | ({"title": node.title} if node.title else {}) | (DARK if node.type == NOTE else {})


# --- the workflows ----------------------------------------------------------------------------------------------------


def of_stable_diffusion(
    graph: Graph,
    checkpoint: File | None,
    concept: dict[str, Any],
    train: dict[str, Any],
    drawn: dict[str, Any],
) -> Node:
    """Add the five nodes of a workflow for Stable Diffusion, which draws before and after; give Train LoRA."""
    base = graph.add(
        "AtelierLoadBaseModel",
        (0, 0),
        (300, 358),
        models=[checkpoint] if checkpoint else [],
        checkpoint=checkpoint.name if checkpoint else TINY,
    )
    data = graph.add("AtelierConceptDataset", (0, 424), (300, 290), **concept)
    # The links from the base to Sample pass above Train LoRA, which stands lower for that.
    trained = graph.add(
        "AtelierTrain",
        (360, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET")},
        **train,
    )
    sample = graph.add(
        "AtelierSample",
        (800, 0),
        (330, 570),
        linked={
            "model": (trained, "MODEL"),
            "clip": (trained, "CLIP"),
            "vae": (base, "VAE"),
            "before_model": (base, "MODEL"),
            "before_clip": (base, "CLIP"),
        },
        **drawn,
    )
    # Below what the editor tells at the upper right, above its minimap.
    graph.add(
        "SaveImage", (1190, 195), (330, 355), linked={"images": (sample, "IMAGE")}, **{"0": f"atelier/{train['name']}"}
    )
    return trained


# A collapsed node stands above Concept Dataset, which grows by a sentence where something is wrong.
BETWEEN, BELOW = (90, 416), (0, 480)
BENEATH_SAMPLE = (800, 625), (584, 220)  # a note, beside the minimap
SHARP = {"min_snr_gamma": 5.0}  # as guides recommend, whatever the subject: docs/learning.md
EXAMPLE = {"folder": "atelier:concept_example"}
ON_TOY = {"width": 128, "height": 128, "steps": 20, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal"}
MY = {"folder": "my_pictures", "trigger_word": "mychar"}
PICTURES = (
    "Put 15 to 40 varied pictures into *input/my_pictures*. Say what may vary in each in a text file of the same name "
    "(*01.png*, *01.txt*)."
)
LATER = (
    "*Preset* of **Train LoRA** suits a character, a style or a thing. *Dataset Preview* shows each picture as it is "
    "trained."
)


def node_by_node(graph: Graph) -> dict[str, Any]:
    """Write the quickstart: each step is a node of its own."""
    trained = of_stable_diffusion(
        graph,
        None,
        EXAMPLE,
        {"name": "mossling", "steps": 600, "batch_size": 4},
        {"prompt": "a mossling on a blue background", "batch_size": 4, "seed": 5, **ON_TOY},
    )
    graph.note(
        *BENEATH_SAMPLE,
        "Press **Run**. A toy model learns a *mossling* (left: before, right: after).\n\n"
        "**Your own pictures:** put 10 to 30 into *input/my_pictures*, each with a text file of the "
        "same name that describes it.\n\n1. **Concept Dataset**: *folder* my_pictures, a made-up *trigger_word*.\n2. "
        "**Load Base Model**: your checkpoint.\n3. **Train LoRA**: a *name*, 1000 *steps*, *batch_size* 1.\n4. "
        "**Sample**: no *prompt*, *width* and *height* 0 draw what was trained.\n\nFlux, Z-Image, Qwen-Image and "
        "others have their own templates.",
    )
    _, data, *_ = graph.nodes
    data.at = BELOW
    weighed = graph.add("AtelierObjective", BETWEEN, (170, 30), collapsed=True, **SHARP)
    trained.inputs = {**trained.inputs, "objective": (weighed, "OBJECTIVE")}
    return graph.workflow()


def stable_diffusion(graph: Graph, checkpoint: File, size: int, note: str) -> dict[str, Any]:
    """Write the workflow of a kind of Stable Diffusion. size: the least side of good pictures, in pixels."""
    of_stable_diffusion(graph, checkpoint, MY, {"name": "my_character", "steps": 1500}, {})
    graph.note(
        *BENEATH_SAMPLE,
        f"1. **Load Base Model**: choose the checkpoint that you will draw with.\n2. {PICTURES} At least {size} "
        f"pixels.\n3. **Concept Dataset**: write your own trigger word.\n4. Press **Run**.\n\n{LATER} {note}",
    )
    return graph.workflow()


def linked_model(graph: Graph, model: File, texts: list[File], kind: str, vae: File, note: str) -> dict[str, Any]:
    """Write the workflow of a model that ComfyUI's own loaders load. kind: `type` of the loader of text encoders."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    loader = "DualCLIPLoader" if len(texts) > 1 else "CLIPLoader"
    named = {str(i): value for i, value in enumerate([*(file.name for file in texts), kind])}
    clip = graph.add(loader, (0, 130), (300, 130), models=texts, **named)
    unet = graph.add("UNETLoader", (0, 330), (300, 82), models=[model], **{"0": model.name})
    base = graph.add(
        "AtelierConnectModel",
        (340, 96),
        (300, 200),
        linked={"model": (unet, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")},
    )
    data = graph.add("AtelierConceptDataset", (340, 440), (300, 290), **MY)
    trained = graph.add(
        "AtelierTrain",
        (680, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET")},
        name="my_character",
        steps=1500,
    )
    sample = graph.add(
        "AtelierSample",
        (1100, 0),
        (330, 520),
        linked={"model": (trained, "MODEL"), "clip": (trained, "CLIP"), "vae": (loaded_vae, "VAE")},
    )
    graph.add(
        "SaveImage", (1100, 616), (240, 229), linked={"images": (sample, "IMAGE")}, **{"0": "atelier/my_character"}
    )
    graph.note(
        (0, 452),
        (300, 393),
        f"1. Choose the files in the three loaders.\n2. {PICTURES}\n3. **Concept Dataset**: write your own trigger "
        f"word.\n4. Press **Run**.\n\n{LATER}\n\n{note}",
    )
    return graph.workflow()


def model_of_clips(graph: Graph, models: list[File], text: File, vae: File, name: str, note: str) -> dict[str, Any]:
    """Write the workflow of a model of clips. models: one file, or those of two experts, for low and for high noise."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    clip = graph.add("CLIPLoader", (0, 130), (300, 130), models=[text], **{"0": text.name, "1": "wan"})
    unets = [
        graph.add("UNETLoader", (0, 330 + 154 * number), (300, 82), models=[model], **{"0": model.name})
        for number, model in enumerate(models)
    ]
    linked = {"model": (unets[0], "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")}
    if len(unets) > 1:
        linked["model_high"] = (unets[1], "MODEL")
    return with_clips(graph, linked, 330 + 154 * len(unets), name, note)


def ltx2(graph: Graph, checkpoint: File, text: File, name: str, note: str) -> dict[str, Any]:
    """Write the workflow of LTX-2, whose checkpoint holds its VAE, and a part of its text encoder."""
    loaded = graph.add("CheckpointLoaderSimple", (0, 0), (300, 98), models=[checkpoint], **{"0": checkpoint.name})
    named = {"0": text.name, "1": checkpoint.name}
    clip = graph.add("LTXAVTextEncoderLoader", (0, 170), (300, 106), models=[text, checkpoint], **named)
    linked = {"model": (loaded, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded, "VAE")}
    return with_clips(graph, linked, 348, name, note)


def with_clips(
    graph: Graph, linked: Mapping[str, tuple[Node, str]], below: int, name: str, note: str
) -> dict[str, Any]:
    """Add what trains on clips and draws some. linked: the loaders of the model; below: where there is room under them.

    Samples are drawn by the run, as two experts have no single MODEL to draw with.
    """
    clips = graph.add("AtelierClips", (0, below), (300, 180), take="chunk")
    base = graph.add("AtelierConnectModel", (360, 0), (300, 200), linked=linked)
    # Use Connected Model grows by what it says of the model.
    data = graph.add(
        "AtelierConceptDataset",
        (360, 490),
        (300, 290),
        linked={"clip_settings": (clips, "CLIPS")},
        folder="my_clips",
        trigger_word="mymove",
    )
    drawn = {"sample_prompts": "{caption}", "sample_every": 250, "sample_frames": 33}
    saves = graph.add("AtelierSaves", (450, 445), (170, 30), collapsed=True, **drawn)
    graph.add(
        "AtelierTrain",
        (720, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET"), "saves": (saves, "SAVES")},
        name="my_move",
        steps=1500,
        resolution=512,
    )
    graph.note(
        (1160, 0),
        (330, 470),
        f"**A motion for {name}**\n\n1. Choose the files in the loaders.\n2. Put 10 to 40 clips of two to five seconds "
        "into *input/my_clips*. Describe in a text file of the same name (*01.mp4*, *01.txt*) what happens. Pictures "
        "may lie beside them.\n3. **Concept Dataset**: *mymove* is the trigger word; write your own.\n4. Press **Run**."
        " Every 250 steps the run draws a clip, which plays on **Train LoRA**.\n\n**Clips** says which frames are "
        "trained. Fewer, or a smaller *resolution*, need less memory. **Saves & Samples**, folded, says what is "
        f"drawn.\n\n{note}",
    )
    return graph.workflow()


# What the adapter's pictures show: of everything a little, so that it changes nothing but the steps.
SUBJECTS = """portrait photo of an old fisherman, soft window light
a young woman laughing in a park, candid photo
a man in a grey suit walking across a crosswalk
two children building a sandcastle on a beach
a crowded night market in the rain, neon signs
a mountain lake at sunrise, wide angle
a snowy forest path with long shadows
a red vintage car parked in front of a white house
a tabby cat asleep on a stack of books
a horse running through shallow water
a bowl of ramen on a wooden table, top view
a glass of orange juice and a croissant on a tray
a modern living room with large windows
the inside of an old library, warm lamps
a close-up of a dew drop on a leaf
a knight in shining armour, oil painting
a watercolour of a small fishing village
an ink drawing of a bamboo grove
a city of the future at dusk, concept art
a robot watering flowers, children's book illustration
an anime girl with a blue umbrella
a logo of a fox, flat design, white background
a poster with the word OPEN in bold letters
a macro photo of a mechanical watch"""


def adapter(graph: Graph, model: File, text: File, kind: str, vae: File) -> dict[str, Any]:
    """Write the workflow that trains a LoRA on a distilled model's own pictures, to lie beneath others in training."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    clip = graph.add("CLIPLoader", (0, 130), (300, 130), models=[text], **{"0": text.name, "1": kind})
    unet = graph.add("UNETLoader", (0, 330), (300, 82), models=[model], **{"0": model.name})
    loaded = {"model": (unet, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")}
    base = graph.add("AtelierConnectModel", (360, -6), (300, 200), linked=loaded, train_distilled=True)
    drawn = graph.add(
        "AtelierDrawnPictures",
        (360, 340),
        (300, 476),
        linked=loaded,
        **{"of": "prompts", "of.prompt": SUBJECTS},
        pictures=20,
        role="train",
    )
    graph.add(
        "AtelierTrain",
        (720, 0),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (drawn, "DATASET")},
        name="training_adapter",
        steps=3000,
    )
    graph.note(
        (0, 460),
        (300, 360),
        "A **training adapter** lets a distilled model (Turbo, Lightning) learn and lose less of its few steps.\n\n1. "
        "Choose the files in the three loaders, and press **Run**. The model draws 480 pictures, and the adapter is "
        "trained on them.\n2. For your own LoRA choose *training_adapter* in **Existing LoRA**: *use* beneath, "
        "*training_only* true. Set *train_distilled* of **Use Connected Model**.\n3. Use your LoRA on the distilled "
        "model without the adapter.",
    )
    graph.note(
        (720, 634),
        (380, 196),
        "**Have you the model that it was distilled from?** Train on that. Or let **Extract LoRA** make the adapter: "
        "that model as the tuned one, the distilled one as the base.\n\nOn a tiny model, training alone undid 59 % of "
        "the distillation. With an adapter of this template it undid 43 %, with an extracted one 17 %.",
    )
    return graph.workflow()


def captioned(graph: Graph, text: File) -> dict[str, Any]:
    """Write the workflow that lets a vision model write a caption beside each picture of a folder."""
    data = graph.add("AtelierConceptDataset", (0, 0), (300, 290), folder="my_pictures")
    clip = graph.add("CLIPLoader", (0, 412), (300, 130), models=[text], **{"0": text.name, "1": "stable_diffusion"})
    asked = graph.add("AtelierCaptionInstruction", (0, 600), (300, 230))
    seen = graph.add("AtelierDatasetPictures", (360, 130), (270, 106), linked={"dataset": (data, "DATASET")})
    said = graph.add(
        "TextGenerate",
        (690, 340),
        (320, 400),
        linked={"clip": (clip, "CLIP"), "image": (seen, "IMAGE"), "prompt": (asked, "STRING")},
    )
    graph.add(
        "AtelierWriteCaptions",
        (1070, 0),
        (340, 106),
        linked={"dataset": (data, "DATASET"), "texts": (said, "generated_text")},
    )
    graph.note(
        (1070, 190),
        (340, 360),
        "**Captions for a folder**\n\n1. **Concept Dataset**: write the *folder* of your pictures.\n2. **Load CLIP**: "
        "choose a vision model, as Qwen3-VL.\n3. **Caption Instruction**: choose what you train, and what captions "
        "call it.\n4. Press **Run**. Each picture gets a text of its name. One that has a text keeps it.\n\nRead a few "
        "before you train. Cancel keeps what is written; the next **Run** goes on there.\n\nA tagger works as well: "
        "link its text into *texts*. **Train LoRA** may follow *DATASET*.",
    )
    return graph.workflow()


def masked(graph: Graph, model: File) -> dict[str, Any]:
    """Write the workflow that lets a model write a mask beside each picture of a folder."""
    data = graph.add("AtelierConceptDataset", (0, 0), (300, 290), folder="my_pictures")
    loaded = graph.add("CheckpointLoaderSimple", (0, 412), (300, 98), models=[model], **{"0": model.name})
    seen = graph.add("AtelierDatasetPictures", (360, 130), (270, 106), linked={"dataset": (data, "DATASET")})
    what = graph.add("CLIPTextEncode", (360, 560), (270, 180), linked={"clip": (loaded, "CLIP")}, **{"0": "person"})
    found = graph.add(
        "SAM3_Detect",
        (690, 340),
        (300, 230),
        linked={"model": (loaded, "MODEL"), "image": (seen, "IMAGE"), "conditioning": (what, "CONDITIONING")},
    )
    graph.add(
        "AtelierWriteMasks",
        (1050, 0),
        (340, 82),
        linked={"dataset": (data, "DATASET"), "masks": (found, "masks")},
    )
    graph.note(
        (1050, 158),
        (340, 332),
        "**Masks for a folder**\n\n1. **Concept Dataset**: write the *folder* of your pictures.\n2. **Load "
        "Checkpoint**: choose SAM 3.\n3. **CLIP Text Encode**: write what is trained, as *person*, *robot* or *chair*."
        "\n4. Press **Run**. Each picture gets a mask, as *cat-masklabel.png*. One that has a mask keeps it.\n\nLook "
        "at a few before you train. Cancel keeps what is written; the next **Run** goes on there.\n\nTo train with "
        "them link *DATASET* into **Mask Loader**, and that into **Train LoRA**.",
    )
    return graph.workflow()


def to_share(graph: Graph) -> dict[str, Any]:
    """Write the workflow that chooses among saves, makes the LoRA smaller and saves it to be shared."""
    base = graph.add("AtelierLoadBaseModel", (0, 0), (300, 358), checkpoint=TINY)
    # As low as this, the view opens with the note above the minimap.
    data = graph.add("AtelierConceptDataset", (0, 540), (300, 290), **EXAMPLE)
    saves = graph.add(
        "AtelierSaves", BETWEEN, (170, 30), collapsed=True, save_every=100, save_unit="steps", keep_last=4
    )
    trained = graph.add(
        "AtelierTrain",
        (360, 150),
        (380, 600),
        linked={
            "base_model": (base, "BASE_MODEL"),
            "dataset": (data, "DATASET"),
            "saves": (saves, "SAVES"),
        },
        name="mossling to share",
        steps=400,
        batch_size=4,
    )
    compared = graph.add(
        "AtelierCompareLoras",
        (800, 0),
        (370, 800),
        linked={
            "model": (base, "MODEL"),
            "clip": (base, "CLIP"),
            "vae": (base, "VAE"),
            "lora_1": (trained, "LORA"),
        },
        **{"of": "saves of lora_1"},
        strengths="0.7, 1",
        prompt="a mossling on a blue background\na mossling on a green background",
        seeds="5",
        **ON_TOY,
    )
    smaller = graph.add(
        "AtelierResizeLora",
        (1230, 0),
        (170, 30),
        collapsed=True,
        linked={"lora": (compared, "LORA")},
        mode="sv_fro",
    )
    graph.add(
        "AtelierSaveLoraFile",
        (1230, 45),
        (320, 260),
        linked={"lora": (smaller, "LORA")},
        file_name="shared/mossling",
        title="Mossling",
        trigger_words="mossling",
        description="A small mossy creature, trained with LoRA Atelier.",
    )
    graph.note(
        (1230, 340),
        (320, 200),
        "Press **Run**: it trains, **compares** its four saves at two strengths, makes the chosen LoRA **smaller** "
        "and **saves** it in *models/loras/shared*.\n\n*choose* of **Compare LoRAs** is its column; 0 is the last "
        "save.\n\nFor a run of yours set *of* to *saves of a run*, without **Train LoRA**.",
    )
    return graph.workflow()


# --- the blueprint ----------------------------------------------------------------------------------------------------

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


# --- all of them ------------------------------------------------------------------------------------------------------

COMFY = "Comfy-Org"
SPLIT = "resolve/main/split_files"
AE = File("ae.safetensors", "vae", f"{COMFY}/z_image_turbo/{SPLIT}/vae")
ENCODERS = "comfyanonymous/flux_text_encoders/resolve/main"
WAN = f"{COMFY}/Wan_2.2_ComfyUI_Repackaged/{SPLIT}"
UMT5 = File(
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders",
    f"{COMFY}/Wan_2.1_ComfyUI_repackaged/{SPLIT}/text_encoders",
)
QWEN = f"{COMFY}/Qwen-Image_ComfyUI/{SPLIT}"

WORKFLOWS: dict[str, Callable[[Graph], dict[str, Any]]] = {
    "workflows/1 Start here": start,
    "workflows/1 Start here.app": start_as_app,
    "workflows/2 Train a LoRA node by node": node_by_node,
    "workflows/3 Stable Diffusion 1.5": lambda graph: stable_diffusion(
        graph,
        File(
            "v1-5-pruned-emaonly-fp16.safetensors",
            "checkpoints",
            f"{COMFY}/stable-diffusion-v1-5-archive/resolve/main",
        ),
        512,
        "6 GB of GPU memory are enough.",
    ),
    "workflows/4 Stable Diffusion XL": lambda graph: stable_diffusion(
        graph,
        File(
            "sd_xl_base_1.0.safetensors",
            "checkpoints",
            "stabilityai/stable-diffusion-xl-base-1.0/resolve/main",
        ),
        1024,
        "Pony, Illustrious and NoobAI are XL, too.",
    ),
    "workflows/5 Z-Image": lambda graph: linked_model(
        graph,
        File("z_image_bf16.safetensors", "diffusion_models", f"{COMFY}/z_image/{SPLIT}/diffusion_models"),
        [File("qwen_3_4b.safetensors", "text_encoders", f"{COMFY}/z_image_turbo/{SPLIT}/text_encoders")],
        "lumina2",
        AE,
        "Not Turbo: the LoRA works on Turbo afterwards.",
    ),
    "workflows/6 FLUX.1 dev": lambda graph: linked_model(
        graph,
        File("flux1-dev.safetensors", "diffusion_models", f"{COMFY}/flux1-dev/resolve/main"),
        [
            File("clip_l.safetensors", "text_encoders", ENCODERS),
            File("t5xxl_fp16.safetensors", "text_encoders", ENCODERS),
        ],
        "flux",
        AE,
        "Little memory? Set *weight_dtype* of **Load Diffusion Model** to fp8_e4m3fn.",
    ),
    "workflows/7 Qwen-Image": lambda graph: linked_model(
        graph,
        File("qwen_image_fp8_e4m3fn.safetensors", "diffusion_models", f"{QWEN}/diffusion_models"),
        [File("qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders", f"{QWEN}/text_encoders")],
        "qwen_image",
        File("qwen_image_vae.safetensors", "vae", f"{QWEN}/vae"),
        "The weights are float8 here, the LoRA is not.",
    ),
    "workflows/8 Compare, shrink, share": to_share,
    "workflows/9 Make a training adapter": lambda graph: adapter(
        graph,
        File("z_image_turbo_bf16.safetensors", "diffusion_models", f"{COMFY}/z_image_turbo/{SPLIT}/diffusion_models"),
        File("qwen_3_4b.safetensors", "text_encoders", f"{COMFY}/z_image_turbo/{SPLIT}/text_encoders"),
        "lumina2",
        AE,
    ),
    "workflows/10 Caption a folder": lambda graph: captioned(
        graph,
        File("qwen3vl_8b_fp8_scaled.safetensors", "text_encoders", f"{COMFY}/Qwen3-VL/resolve/main/text_encoders"),
    ),
    "workflows/11 Mask a folder": lambda graph: masked(
        graph, File("sam3.1_multiplex_fp16.safetensors", "checkpoints", f"{COMFY}/sam3.1/resolve/main/checkpoints")
    ),
    "workflows/12 Wan 2.2 5B": lambda graph: model_of_clips(
        graph,
        [File("wan2.2_ti2v_5B_fp16.safetensors", "diffusion_models", f"{WAN}/diffusion_models")],
        UMT5,
        File("wan2.2_vae.safetensors", "vae", f"{WAN}/vae"),
        "Wan 2.2 5B",
        "It also draws from a picture: *first_frame* of **Clips** 0.5 trains both ways.",
    ),
    "workflows/13 Wan 2.2 14B": lambda graph: model_of_clips(
        graph,
        [
            File(f"wan2.2_t2v_{half}_noise_14B_fp8_scaled.safetensors", "diffusion_models", f"{WAN}/diffusion_models")
            for half in ("low", "high")
        ],
        UMT5,
        File("wan_2.1_vae.safetensors", "vae", f"{WAN}/vae"),
        "both experts of Wan 2.2 14B",
        "Each step trains one expert, whose noise it draws; the other waits. Each gets a file, *-low* and *-high*.",
    ),
    "workflows/14 LTX-2": lambda graph: ltx2(
        graph,
        File("ltx-2-19b-dev-fp8.safetensors", "checkpoints", "Lightricks/LTX-2/resolve/main"),
        File("gemma_3_12B_it_fp4_mixed.safetensors", "text_encoders", f"{COMFY}/ltx-2/{SPLIT}/text_encoders"),
        "LTX-2",
        "Sound is not trained. It also draws from a picture: *first_frame* of **Clips** 0.5 trains both ways.",
    ),
    f"subgraphs/{BLUEPRINT}": shipped_blueprint,
}


def forms() -> dict[str, dict[str, Any]]:
    """Return inputs and outputs of this pack's nodes, as its tests keep them."""
    from lora_atelier.trainer_core.workflow.canvas import form_of

    info = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
    return {
        name: {
            "rows": form_of(name, each["input"], each.get("input_order")).inputs,
            "types": {
                input_: "COMBO" if isinstance(spec[0], list) else spec[0]
                for group in ("required", "optional")
                for input_, spec in each["input"].get(group, {}).items()
            },
            "outputs": dict(zip(each["output_name"], each["output"], strict=True)),
        }
        for name, each in info.items()
    }


def write(folder: Path) -> None:
    """Write all files into a folder that is laid out as the repository."""
    known = forms()
    for name, build in WORKFLOWS.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(build(Graph(known)), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))  # for lora_atelier, under which name tests import the pack
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
