"""From a workflow as the editor saves it to a prompt, as ComfyUI's HTTP API takes it, without a server.

Values stand in a node's `widgets_values` by the order of its widgets, which its form holds, or by name. Subgraphs are
opened, muted nodes left out, bypassed ones passed through.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..config.dataset import ConceptConfig
from ..config.forms import Form
from ..config.rows import WIDGETS, Row

MUTED, BYPASSED = 2, 4
INPUTS, OUTPUTS = -10, -20  # ids of a subgraph's own ends
DEEPEST = 20  # subgraphs in one another
MOST_NODES = 20_000  # of a workflow, counted in each use of a subgraph
MOST_STEPS = 500_000  # along links, from node to node; a second of work
SEED_CONTROLS = ("fixed", "increment", "decrement", "randomize")  # a widget that follows a seed
NOTES = ("Note", "MarkdownNote")
SENDERS, GETTERS = ("SetNode", "easy setNode"), ("GetNode", "easy getNode")  # a link by a name
PASSING = ("Reroute", "Reroute (rgthree)", "ReroutePrimitive|pysssss", *SENDERS)  # an output is what comes in
CHOOSING = ("Any Switch (rgthree)",)  # an output is the first thing that comes in
PATTERNED = "Anything Everywhere?"  # its widgets are patterns; newer ones have them among their properties
EVERYWHERE = ("Anything Everywhere", "Anything Everywhere3", PATTERNED, "Prompts Everywhere", "Seed Everywhere")
PLAIN_PATTERN = re.compile(
    r"(?:[\w\s^$|-]|\.(?![*+])|\\[^\w])*(?:\.[*+])?(?:[\w\s^$|-]|\.(?![*+])|\\[^\w])*"
)  # takes no time
LONGEST_PATTERN = 100
EDITORS_OWN = ("PrimitiveNode", *PASSING, *GETTERS, *EVERYWHERE, *NOTES)  # nodes that no server needs
BY_NAME = (*SENDERS, *GETTERS, *EVERYWHERE)  # of these, those that pass on without a link
MUTED_INPUTS = "muted"  # what a prompt tells of a node beside its title: inputs whose link comes from a muted node
GROUPS = ("workflow>", "workflow/")  # before the name of a group node, which older editors made
CONSTANTS = ("PrimitiveInt", "PrimitiveFloat", "PrimitiveString", "PrimitiveStringMultiline", "PrimitiveBoolean")

ELSEWHERE = {  # widgets of Concept Dataset before Captions and Pictures were nodes, with their defaults
    "flip": False, "shuffle_tags": False, "keep_tags": 0, "tag_dropout": 0.0, "caption_dropout": -1,
    "caption_suffix": "", "caption_extension": ".txt", "missing_caption": "error", "loss_weight": 1.0,
    "recursive": True, "role": "train", "enabled": True, "resolutions": "", "samples": 0, "folder_repeats": True,
    "caption_file": "", "caption_lines": "draw", "caption_encoding": "auto", "wildcards": False, "tag_separator": ",",
    "tag_dropout_mode": "uniform", "protected_tags": "", "background": "white", "on_problem": "stop",
    "min_picture_side": 16, "caption_variants": -1, "class_prompt": "", "tag_warmup_steps": 0, "tag_warmup_min": 1,
    "caption_dropout_every_n_epochs": 0,
}  # fmt: skip
FORMER = ("folder", "trigger_word", "captions_from", "repeats", *ELSEWHERE, "leave_out")  # all of them, in order


def chosen_inputs(rows: tuple[Row, ...], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Row]]:
    """Yield (full name, input) of all inputs of a node in order, with those of the options that values choose."""
    for each in rows:
        name = prefix + each.input
        yield name, each
        choice = values.get(name)
        yield from chosen_inputs(each.options.get(choice, ()) if isinstance(choice, str) else (), values, f"{name}.")


DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"  # a choice whose options have inputs of their own, named choice.input
DYNAMIC_GROUP = "COMFY_DYNAMICGROUP_V3"  # a number of rows with the same inputs, named group.number.input
ROW, MOST_ROWS = "a row", 100  # among the options of such a group: the inputs of each row


def form_of(title: str, groups: Mapping[str, Any], order: Mapping[str, Any] | None = None) -> Form:
    """Read the form of any node from its inputs as ComfyUI describes them, in the order of their widgets."""
    return Form(title, tuple(_described(groups, order or {})), ())


def _described(groups: Mapping[str, Any], order: Mapping[str, Any]) -> Iterator[Row]:
    for group in ("required", "optional"):
        specs = groups.get(group) or {}
        for name in order.get(group) or specs:
            kind, about = specs[name][0], specs[name][1] if len(specs[name]) > 1 else {}
            listed = kind if isinstance(kind, list) else about.get("options") or ()
            options = {each["key"]: tuple(_described(each["inputs"], {})) for each in listed if kind == DYNAMIC_COMBO}
            if kind == DYNAMIC_GROUP:
                options, about = (
                    {ROW: tuple(_described(about.get("template") or {}, {}))},
                    {"default": about.get("min", 0)},
                )
            shown = (*WIDGETS.values(), "COMBO", DYNAMIC_COMBO, DYNAMIC_GROUP)
            widget = (isinstance(kind, list) or kind in shown) and not about.get("forceInput")
            yield Row(
                name=name,
                words=about.get("tooltip", ""),
                socket="" if widget else str(kind),
                default=about.get("default", next(iter(options or listed), None)),
                optional=group == "optional",
                controlled=bool(about.get("control_after_generate")) or name in ("seed", "noise_seed"),
                options=options,
                listed=widget,
            )


def prompt_of(document: Any, known: Mapping[str, Form]) -> dict[str, dict[str, Any]]:
    """Convert what a person saved, a workflow or a prompt, to a prompt; raises ValueError for anything else."""
    inner = document.get("prompt") if isinstance(document, dict) else None
    prompt = inner if isinstance(inner, dict) else document
    if isinstance(prompt, dict) and prompt and all(_is_entry(each) for each in prompt.values()):
        return prompt
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ValueError("it is neither a workflow nor a prompt of ComfyUI")
    try:
        opened = {str(each["id"]): _Shape(each) for each in (document.get("definitions") or {}).get("subgraphs", [])}
        whole = _Graph("", _Shape(document), opened, _Budget())
        nodes = list(whole.all_nodes())
        if group := next((node.kind for node in nodes if node.kind.startswith(GROUPS)), None):
            raise ValueError(f"it holds the group node {group[9:]}, an old form; ungroup it in ComfyUI and save again")
        return {node.id: _entry(node, known) for node in nodes}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError("it is damaged: a node or a link of it is not as the editor saves it") from error
    except RecursionError as error:
        raise ValueError("its links form a circle, or a chain too long to follow") from error


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("class_type"), str) and isinstance(value.get("inputs"), dict)
    )


class _Value(NamedTuple):
    """A value that an input gets from a node of the editor alone."""

    value: Any


class _Link(NamedTuple):
    """An output that an input gets its value from."""

    node: str
    slot: int


class _Budget:
    """What reading a workflow may cost, whatever a stranger has written into it."""

    def __init__(self) -> None:
        self._nodes, self._steps = MOST_NODES, MOST_STEPS

    def hold(self, nodes: int) -> None:
        """Count the nodes of a use of a subgraph."""
        self._nodes -= nodes
        if self._nodes < 0:
            raise ValueError(f"it has more than {MOST_NODES} nodes")

    def step(self) -> None:
        """Count a step along links."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError(f"its links take more than {MOST_STEPS} steps to follow")


class _Shape:
    """A workflow or a subgraph as it is written; what follows from that is found once, for all uses."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = about

    @property
    def nodes(self) -> list[Mapping[str, Any]]:
        """List its nodes."""
        return self._about["nodes"]

    @functools.cached_property
    def _links(self) -> list[tuple[Any, tuple[Any, int], tuple[Any, int]]]:
        return [_ends(each) for each in self._about.get("links") or [] if each]

    @functools.cached_property
    def starts(self) -> dict[Any, tuple[Any, int]]:
        """Map each link to the output that it comes from."""
        return {number: start for number, start, _ in self._links}

    @functools.cached_property
    def given(self) -> dict[int, tuple[Any, int]]:
        """Map each output of the subgraph to the output inside that it gives."""
        return {slot: start for _, start, (node, slot) in self._links if node == OUTPUTS}

    def input(self, slot: int) -> str:
        """Name an input of the subgraph."""
        return self._about["inputs"][slot]["name"]

    @functools.cached_property
    def senders(self) -> dict[str, Any]:
        """Map each name that something is sent under to the first node that sends it."""
        found: dict[str, Any] = {}
        for each in self.nodes:
            if each["type"] in SENDERS and each.get("mode", 0) != MUTED:
                found.setdefault(_sent_as(each), each["id"])
        return found


def links_of(document: Mapping[str, Any]) -> dict[Any, tuple[Any, int]]:
    """Map each link of a workflow to the output that it comes from, (node, slot)."""
    return _Shape(document).starts


def subgraphs_of(document: Mapping[str, Any]) -> set[str]:
    """List the types of nodes that are graphs of their own in a workflow."""
    return {each["id"] for each in (document.get("definitions") or {}).get("subgraphs") or ()}


def _sent_as(about: Mapping[str, Any]) -> str:
    """Return the name under which a node sends or gets something."""
    return str((about.get("widgets_values") or [""])[0])


def _ends(link: Any) -> tuple[Any, tuple[Any, int], tuple[Any, int]]:
    """Read a link: its number, and (node, slot) of where it begins and ends."""
    if isinstance(link, list):
        return link[0], (link[1], link[2]), (link[3], link[4])
    start, end = (link["origin_id"], link["origin_slot"]), (link["target_id"], link["target_slot"])
    return link["id"], start, end


class _Node:
    """A node of a workflow, in its graph."""

    def __init__(self, graph: _Graph, about: Mapping[str, Any]) -> None:
        self.graph, self.about = graph, about
        self.id = f"{graph.prefix}{about['id']}"
        self.kind, self.mode = str(about["type"]), about.get("mode", 0)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """List its sockets."""
        return self.about.get("inputs") or []

    @functools.cached_property
    def inner(self) -> _Graph | None:
        """Open the subgraph that it stands for; None if it is a plain node."""
        shape = self.graph.opened.get(self.kind)
        return shape and _Graph(f"{self.id}:", shape, self.graph.opened, self.graph.budget, self)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Map the name of each socket to its place."""
        return {each["name"]: place for place, each in reversed([*enumerate(self.inputs)])}

    @functools.cached_property
    def shown(self) -> dict[str, int]:
        """Map each widget that a subgraph shows to the place of its value."""
        names = [each["name"] for each in self.inputs if each.get("widget")]
        return {name: place for place, name in reversed([*enumerate(names)])}

    def given(self, slot: int) -> _Value | _Link | None:
        """Find what an input gets; None without a link."""
        return self.graph.follow(self.inputs[slot].get("link"))

    def output(self, slot: int) -> _Value | _Link | None:
        """Find what an output gives, through bypassed nodes, reroutes and subgraphs; None for nothing."""
        self.graph.budget.step()
        if self.mode == MUTED:
            return None
        if self.mode == BYPASSED:
            return self._passed(slot)
        if self.inner:
            return self.inner.result(slot)
        if self.kind in PASSING:
            return self.given(0)
        if self.kind in GETTERS:
            return self.graph.sent(_sent_as(self.about))
        if self.kind in CHOOSING:
            return next(filter(None, map(self.given, range(len(self.inputs)))), None)
        if self.kind == "PrimitiveNode":
            return _Value(self.about["widgets_values"][0])
        return _Link(self.id, slot)

    def _passed(self, slot: int) -> _Value | _Link | None:
        """Find what a bypassed node passes on: its input beside the output, else the first of the same type."""
        kinds = [each.get("type") for each in self.inputs]
        kind = self.about["outputs"][slot].get("type")
        if kind not in kinds:
            return None
        return self.given(slot if slot < len(kinds) and kinds[slot] == kind else kinds.index(kind))

    def widget_value(self, name: str) -> _Value | None:
        """Find the value of a widget that a subgraph shows; None if the widget inside it holds it."""
        values: Any = _named(self.about) or self.about.get("widgets_values") or []
        if isinstance(values, dict):
            return _Value(values[name]) if name in values else None
        index = self.shown.get(name, len(values))
        return _Value(values[index]) if index < len(values) else None


class _Graph:
    """A workflow or one use of a subgraph."""

    def __init__(
        self,
        prefix: str,
        shape: _Shape,
        opened: Mapping[str, _Shape],
        budget: _Budget,
        outside: _Node | None = None,
    ) -> None:
        if prefix.count(":") > DEEPEST:
            raise ValueError(f"its subgraphs are nested more than {DEEPEST} levels deep")
        budget.hold(len(shape.nodes))
        self.prefix, self.shape, self.opened, self.budget, self.outside = prefix, shape, opened, budget, outside
        self.nodes: dict[Any, _Node] = {each["id"]: _Node(self, each) for each in shape.nodes}

    def all_nodes(self) -> Iterator[_Node]:
        """Yield the nodes that run, also inside of subgraphs."""
        for node in self.nodes.values():
            if node.mode in (MUTED, BYPASSED) or node.kind in EDITORS_OWN:
                continue
            if node.inner:
                yield from node.inner.all_nodes()
            else:
                yield node

    def follow(self, link: Any) -> _Value | _Link | None:
        """Find what a link brings."""
        return self._from(self.shape.starts[link]) if link in self.shape.starts else None

    def muted(self, link: Any) -> _Node | None:
        """Find the muted node that a link comes from, through bypassed nodes and reroutes; None if there is none."""
        self.budget.step()
        origin = self.nodes.get(self.shape.starts[link][0]) if link in self.shape.starts else None
        if origin is None or origin.mode == MUTED:
            return origin
        if origin.kind in GETTERS:
            return self._muted_sender(_sent_as(origin.about))
        passes = origin.mode == BYPASSED or origin.kind in PASSING
        return next(filter(None, (self.muted(each.get("link")) for each in origin.inputs if passes)), None)

    def _muted_sender(self, name: str) -> _Node | None:
        """Find the muted node that would send under a name."""
        senders = (node for node in self.nodes.values() if node.kind in SENDERS and node.mode == MUTED)
        return next((node for node in senders if _sent_as(node.about) == name), None)

    def sent(self, name: str) -> _Value | _Link | None:
        """Find what the node that sends under a name gets, here or in a graph around; None where there is none."""
        self.budget.step()
        if name in self.shape.senders:
            return self.nodes[self.shape.senders[name]].output(0)
        return self.outside.graph.sent(name) if self.outside else None

    @functools.cached_property
    def everywhere(self) -> list[tuple[_Node, int]]:
        """List the inputs (node, its place) of nodes that send what they get everywhere, in this graph or around."""
        here = [
            (node, slot)
            for node in self.nodes.values()
            if node.kind in EVERYWHERE and node.mode not in (MUTED, BYPASSED)
            for slot in range(len(node.inputs))
        ]
        return [*here, *(self.outside.graph.everywhere if self.outside else ())]

    def broadcast(self, node: _Node, name: str, kind: Any) -> _Value | _Link | None:
        """Find what an open input gets from a node that sends everywhere; its own link would go before."""
        for sender, slot in self.everywhere:
            self.budget.step()
            if sender.inputs[slot].get("type") == kind and _fits(sender, node, name):
                return sender.given(slot)
        return None

    def result(self, slot: int) -> _Value | _Link | None:
        """Find what an output of the subgraph gives."""
        start = self.shape.given.get(slot)
        return None if start is None else self._from(start)

    def _from(self, start: tuple[Any, int]) -> _Value | _Link | None:
        origin, slot = start
        if origin != INPUTS:
            return self.nodes[origin].output(slot) if origin in self.nodes else None
        if self.outside is None:
            raise ValueError("a link of it begins at an input of a subgraph, outside of any")
        name = self.shape.input(slot)
        place = self.outside.places.get(name)
        found = None if place is None else self.outside.given(place)
        return found or self.outside.widget_value(name)


def _fits(sender: _Node, node: _Node, name: str) -> bool:
    """Tell whether a node that sends everywhere means an input: some have patterns for titles and inputs."""
    own = (sender.about.get("properties") or {}).get("ue_properties") or {}
    values = sender.about.get("widgets_values") if sender.kind == PATTERNED else ()
    texts = {"title": str(node.about.get("title") or node.kind), "input": name}
    for place, (what, text) in enumerate(texts.items()):
        older = (values or ())[place : place + 1]
        for pattern in (*older, own.get(f"{what}_regex")):
            turned = bool(own.get(f"{what}_regex_invert"))
            if isinstance(pattern, str) and pattern not in ("", ".*") and _holds(pattern, text) == turned:
                return False
    return not own.get("group_regex") and not any(own.get(f"{what}_restricted") for what in ("group", "color"))


def _holds(pattern: str, text: str) -> bool:
    """Tell whether a text has a pattern; one that may take for ever is taken for a plain word."""
    if len(pattern) <= LONGEST_PATTERN and PLAIN_PATTERN.fullmatch(pattern):
        return re.search(pattern, text[:LONGEST_PATTERN]) is not None
    return pattern in text


def _entry(node: _Node, known: Mapping[str, Form]) -> dict[str, Any]:
    """Write a node as a prompt has it."""
    form, values = known.get(node.kind), node.about.get("widgets_values") or []
    inputs: dict[str, Any] = dict(values) if isinstance(values, dict) else {}
    if node.kind in CONSTANTS:
        inputs = {"value": values[0]}
    elif form and (named := _named(node.about)):
        inputs = dict(named_values(form.inputs, named))
    elif form and isinstance(values, list):
        former = _former(values) if node.kind == "AtelierConceptDataset" and len(values) == len(FORMER) else {}
        inputs = dict(widget_values(form.inputs, deque([*former.values()][:3] if former else values))) | former
    elif not form:
        inputs = {}
    inputs = {name: {"__value__": value} if isinstance(value, list) else value for name, value in inputs.items()}
    about: dict[str, Any] = {}
    for slot, each in enumerate(node.inputs):
        found = node.given(slot)
        if found is None and (off := node.graph.muted(each.get("link"))):
            about.setdefault(MUTED_INPUTS, {})[each["name"]] = _title(off, known)
        if found is None and not each.get("widget") and each.get("link") is None:
            found = node.graph.broadcast(node, each["name"], each.get("type"))
        if found is not None:
            inputs[each["name"]] = list(found) if isinstance(found, _Link) else found.value
    return {"class_type": node.kind, "inputs": inputs, "_meta": {"title": _title(node, known), **about}}


def _former(values: list[Any]) -> dict[str, Any]:
    """Read the widgets of Concept Dataset as they stood before; what moved since must have its default."""
    found = dict(zip(FORMER, values, strict=True))
    for name, usual in ELSEWHERE.items():
        if name != "role" and found.pop(name) != usual:
            raise ValueError(
                f"its {ConceptConfig.NODE} of an older version has {name}; set it anew in the editor, and save"
            )
    return found


def _title(node: _Node, known: Mapping[str, Form]) -> str:
    form = known.get(node.kind)
    return node.about.get("title") or (form.title if form else node.kind)


def _named(about: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find the values of a node's widgets by name, which frontends since 1.58 save beside the list; None without."""
    named = about.get("widgets_values_named")
    return named if isinstance(named, dict) and named else None


def nested_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the inputs of rows and of a choice together, as ComfyUI hands them to a node.

    loras.0.name is of the first table of the list `loras`; mode.size is beside the choice itself in the table `mode`.
    """
    found = {name: value for name, value in inputs.items() if "." not in name}
    for name in sorted({name.partition(".")[0] for name in inputs if "." in name}):
        inner = _below(inputs, name)
        rows = {number for number, _, rest in (key.partition(".") for key in inner) if number.isdecimal() and rest}
        if rows:
            found[name] = [nested_inputs(_below(inner, row)) for row in sorted(rows, key=int)]
        else:
            found[name] = {**({name: inputs[name]} if name in inputs else {}), **nested_inputs(inner)}
    return found


def _below(inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Take the inputs whose names begin with a name and a dot, by the rest."""
    return {key.removeprefix(f"{name}."): each for key, each in inputs.items() if key.startswith(f"{name}.")}


def named_values(rows: tuple[Row, ...], named: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Take the values of a node's widgets by name, in whatever order they stood when the file was saved."""
    for each in rows:
        if each.widget:
            value = named.get(prefix + each.input, each.shown)
            yield from _sent(each, value, prefix)
            for inner, start in _inside(each, value, prefix):
                yield from named_values(inner, named, start)


def widget_values(rows: tuple[Row, ...], values: deque[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Take the values of a node's widgets in order, by name; those that an older file lacks have their default."""
    for each in rows:
        if not each.widget:
            continue
        value = values.popleft() if values else each.shown
        yield from _sent(each, value, prefix)
        if each.controlled and values and values[0] in SEED_CONTROLS:
            values.popleft()
        for inner, start in _inside(each, value, prefix):
            yield from widget_values(inner, values, start)


def _sent(each: Row, value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield an input's own value; the number of a group's rows is none."""
    if ROW not in each.options:
        yield prefix + each.input, value


def _inside(each: Row, value: Any, prefix: str) -> list[tuple[tuple[Row, ...], str]]:
    """List the inputs that a value brings with it, of a choice or of each row of a group, and how their names begin."""
    start = f"{prefix}{each.input}."
    if ROW in each.options:
        rows = min(value, MOST_ROWS) if isinstance(value, int) else 0
        return [(each.options[ROW], f"{start}{number}.") for number in range(rows)]
    return [(each.options.get(value, ()), start)] if isinstance(value, str) else []
