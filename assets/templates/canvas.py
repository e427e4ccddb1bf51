"""A workflow as the editor saves it: its nodes, the links between them, and the view at which it opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCREEN, CLEAR = (1280, 720), (75, 115)  # pixels: of a small screen, and of the editor's menus left and above
READABLE, LARGEST = 0.62, 0.85  # the scales at which files open; a run makes its node taller
TINY = "atelier-tiny.safetensors"
HUB = "https://huggingface.co"
NOTE = "MarkdownNote"
DARK = {"color": "#2f3440", "bgcolor": "#1b1e25"}  # of notes: their text stays legible in both renderers

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
