"""Read the training part of a workflow: the same configuration that its nodes make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..config import ConceptConfig, DatasetConfig, RunConfig, TrainConfig, plain_name
from ..config.forms import FORMS, Form
from ..config.rows import Row
from ..models import Chosen, Open
from .canvas import CONSTANTS, MUTED_INPUTS, chosen_inputs, prompt_of
from .settings import READERS, Places, read_plan, read_train

TRAIN = "AtelierTrain"
CONNECTED = "AtelierConnectModel"
LOADED = "AtelierLoadBaseModel"
# What these write lies beside the pictures already, or is missing there: no model runs in a shell.
WRITING = ("AtelierWriteCaptions", "AtelierWriteMasks")
LOOPS = ("StartLoop", "EndLoop")  # ComfyUI's own since 0.46: what is between them runs several times
PREVIEW = "AtelierDatasetPreview"
SHEET_ONLY = ("columns", "limit")  # inputs of Dataset Preview that the plan does not follow
OUTPUTS_ONLY = ("name", "model", "clip", "strength")  # inputs of Train LoRA that are no settings of the run
CASTS: dict[str, tuple[Callable[[Any], Any], str]] = {  # as ComfyUI casts the values of widgets
    "INT": (int, "a whole number"),
    "FLOAT": (float, "a number"),
    "STRING": (str, "a text"),
    "BOOLEAN": (bool, "true or false"),
}
NO_BASE = f"base_model of {TrainConfig.NODE} is linked to a node that gives no base model"
Connect = Callable[[Any, str], Chosen]  # loads what a workflow links into the node of an id


class Wanted(NamedTuple):
    """A run as a workflow describes it."""

    name: str  # of the LoRA
    config: RunConfig
    open: Open  # builds the source of its base model


def read_workflow(document: Any, places: Places, node: str, connect: Connect) -> Wanted:
    """Read the run that a workflow or a prompt trains.

    node: id of its Train LoRA, "" where there is one. connect: called for a connected model. Raises ValueError.
    """
    prompt = prompt_of(document, FORMS)
    chosen = _choose(prompt, node)
    reader = _Reader(prompt, places, lambda key: connect(document, key))
    inputs = reader.inputs(chosen)
    name = plain_name(inputs["name"])
    settings = {key: value for key, value in inputs.items() if key not in OUTPUTS_ONLY}
    base = settings["base_model"]
    if not isinstance(base, Chosen):
        raise ValueError(NO_BASE)
    return Wanted(name, read_train(**{**settings, "base_model": base.config}), base.open)


def read_base_model(document: Any, places: Places, node: str, connect: Connect) -> Chosen:
    """Read the base model that is linked to a Train LoRA, and nothing else of its run; raises ValueError."""
    prompt = prompt_of(document, FORMS)
    link = prompt[_choose(prompt, node)]["inputs"].get("base_model")
    if not isinstance(link, list):
        raise ValueError(f"nothing is linked to base_model of {TrainConfig.NODE}")
    reader = _Reader(prompt, places, lambda key: connect(document, key))
    base = reader.linked(str(link[0]), f"base_model of {TrainConfig.NODE}")
    if not isinstance(base, Chosen):
        raise ValueError(NO_BASE)
    return base


def read_concept_of(document: Any, places: Places, node: str) -> DatasetConfig:
    """Read the concepts up to a Concept Dataset, without a run; raises ValueError."""

    def connect(key: str) -> Chosen:
        raise ValueError(f"node {key} gives no pictures")

    prompt = prompt_of(document, FORMS)
    return _Reader(prompt, places, connect).linked(node, f"folder of {ConceptConfig.NODE}")


def read_preview(
    document: Any, places: Places, node: str, connect: Connect
) -> tuple[Chosen | None, DatasetConfig, TrainConfig]:
    """Read what a Dataset Preview shows: the model that decides open settings, its dataset, and the plan's settings."""
    prompt = prompt_of(document, FORMS)
    inputs = _Reader(prompt, places, lambda key: connect(document, key)).inputs(node)
    base, sizes, validation = (inputs.pop(name, None) for name in ("base_model", "buckets", "validation"))
    share = validation.values.get("validation_share", 0.0) if validation else 0.0
    dataset, epoch = inputs.pop("dataset"), inputs.pop("epoch")
    values = {name: value for name, value in inputs.items() if name not in SHEET_ONLY}
    return base, dataset, read_plan(sizes, epochs=epoch + 1, validation_share=share, **values)


def trains_of(document: Any) -> dict[str, Any]:
    """List the Train LoRA of a workflow or a prompt: what each has as name, by its id; raises ValueError."""
    return _trains(prompt_of(document, FORMS))


def _trains(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each["inputs"].get("name") for key, each in prompt.items() if each["class_type"] == TRAIN}


def _choose(prompt: Mapping[str, Any], node: str) -> str:
    trains = _trains(prompt)
    if not trains:
        raise ValueError(f"it has no training part: no {TrainConfig.NODE} of LoRA Atelier that would run is in it")
    if node and node not in trains:
        raise ValueError(f"node {node} is no {TrainConfig.NODE}; set --node to {' or '.join(trains)}")
    if len(trains) > 1 and not node:
        listed = ", ".join(f"{key} ({name})" for key, name in trains.items())
        raise ValueError(
            f"it has {len(trains)} {TrainConfig.NODE} nodes: {listed}; choose one by --node {next(iter(trains))}"
        )
    return node or next(iter(trains))


class _Reader:
    """Reads the nodes of a prompt, each once."""

    def __init__(self, prompt: Mapping[str, Any], places: Places, connect: Callable[[str], Chosen]) -> None:
        self._prompt, self._places, self._connect = prompt, places, connect
        self._read: dict[str, Any] = {}
        self._open: list[str] = []  # nodes whose inputs are being read

    def inputs(self, key: str) -> dict[str, Any]:
        """Read the inputs of one of our nodes as ComfyUI would pass them."""
        node = self._prompt[key]
        form, given = FORMS[node["class_type"]], node["inputs"]
        found: dict[str, Any] = {}
        for name, each in chosen_inputs(form.inputs, given):
            if name in given:
                found[name] = self._value(given[name], each, f"{each.input} of {form.title}")
            elif not each.optional:
                raise ValueError(_missing(node, name, f"{each.input} of {form.title}"))
        return _nested(form, found)

    def _value(self, value: Any, each: Row, name: str) -> Any:
        if isinstance(value, list) and len(value) == 2:
            return self.linked(str(value[0]), name) if each.input not in ("model", "clip") else None
        if isinstance(value, dict) and "__value__" in value:
            value = value["__value__"]
        if each.options:
            if value not in each.options:
                raise ValueError(f"{name} is {value!r:.80}, which is not in its list")
            return value
        if each.type not in CASTS:
            if each.type != "COMBO":
                raise ValueError(f"{name} is {value!r:.80}; link a node into it")
            return value
        cast, words = CASTS[each.type]
        try:
            return cast(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} is {value!r:.80} and must be {words}") from error

    def linked(self, key: str, name: str) -> Any:
        """Read what a link brings; name: of the input, for messages."""
        if key not in self._prompt:
            raise ValueError(f"{name} is linked to node {key}, which does not run")
        if key in self._open:
            raise ValueError(f"the links of {name} form a circle")
        if key not in self._read:
            self._open.append(key)
            self._read[key] = self._node(key, name)
            self._open.pop()
        return self._read[key]

    def _node(self, key: str, name: str) -> Any:
        node = self._prompt[key]
        kind = node["class_type"]
        if kind == LOADED:
            return Chosen(READERS[kind](self._places, **self.inputs(key)))
        if kind in READERS:
            return READERS[kind](self._places, **self.inputs(key))
        if kind in CONSTANTS:
            return node["inputs"]["value"]
        if kind in WRITING and isinstance(source := node["inputs"].get("dataset"), list):
            return self.linked(str(source[0]), name)
        if kind == CONNECTED:
            if loop := self._loop_before(key):
                raise ValueError(
                    f"{name} comes through {loop}, and a loop runs only in ComfyUI; load the model outside"
                )
            return self._connect(key)
        raise ValueError(f"{name} comes from the node {kind}, which runs only in ComfyUI; set it on its own node")

    def _loop_before(self, key: str) -> str:
        """Find a node of a loop among those that lead to a node; "" without one."""
        found, left = set[str](), [key]
        while left:
            if (each := left.pop()) in found or each not in self._prompt:
                continue
            found.add(each)
            if self._prompt[each]["class_type"] in LOOPS:
                return self._prompt[each]["class_type"]
            links = (value for value in self._prompt[each]["inputs"].values() if isinstance(value, list))
            left += [str(value[0]) for value in links if len(value) == 2]
        return ""


def _missing(node: Mapping[str, Any], name: str, said: str) -> str:
    """Say why an input has nothing: its link may come from a node that is muted."""
    about = node.get("_meta")
    muted = about.get(MUTED_INPUTS) if isinstance(about, Mapping) else None
    title = muted.get(name) if isinstance(muted, Mapping) else None
    return f"{said} is linked to {title!s:.80}, which is muted; unmute it" if title else f"{said} is missing"


def _nested(form: Form, found: Mapping[str, Any]) -> dict[str, Any]:
    """Put the inputs of a choice into one dict with it, as ComfyUI passes them."""
    choices = {each.input for each in form.inputs if each.options}
    result: dict[str, Any] = {}
    for name, value in found.items():
        choice, dot, field = name.partition(".")
        if choice in choices:
            result.setdefault(choice, {})[field if dot else choice] = value
        else:
            result[name] = value
    return result
