"""Write a run as a workflow for the canvas: the nodes whose settings are not open, linked into Train LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..common.access import real_path
from ..config import (
    MODEL_FILES,
    BaseModelConfig,
    BucketConfig,
    ClipConfig,
    ConceptConfig,
    MemoryConfig,
    ObjectiveConfig,
    RunConfig,
    SchedulerConfig,
)
from ..config.forms import FORMS
from ..config.forms.run import PARTS
from ..config.rows import inputs_of
from ..models import Chosen
from .canvas import BY_NAME, GROUPS, chosen_inputs, links_of, prompt_of, subgraphs_of
from .foreign.clips import HIGH, VISION
from .foreign.loaders import LoadingNode, loaders_of, vision_loader
from .places import ASSETS, EXAMPLE, listed
from .read import CONNECTED, read_workflow
from .run_file import RunFile
from .settings import (
    BAKED,
    CONTROL_FOLDERS,
    OPEN_CAPTIONS,
    OPEN_LORA,
    OPEN_OPTIMIZER,
    OPEN_TRAIN,
    Outputs,
)

WIDTH, GAP, ROW, TITLE = 340, 60, 26, 60  # pixels of a node on the canvas
COLLAPSED = 50  # pixels from one collapsed node to the next
NARROW = 270  # pixels that a column of collapsed nodes takes
# Columns: each links to the right, so that no link runs behind another node. Of pictures: collapsed, right beside them.
FILES, OF_PICTURES, DATA, SETTINGS, TRAIN = range(5)
LEFT = (0, WIDTH + GAP - NARROW, WIDTH + GAP, 2 * (WIDTH + GAP), 2 * (WIDTH + GAP) + NARROW)  # pixels
UNDER_LINKS = 100  # pixels from where a dataset's link leaves to the settings, which that link passes above
BELOW = 120  # pixels from a node to the next: it grows by a sentence where its folder or file is not found
NOTE_HIGHEST = 900  # pixels
DARK = {"color": "#2f3440", "bgcolor": "#1b1e25"}  # of notes: their text stays legible in both renderers


class _Canvas:
    """A workflow as it grows: columns of nodes from left to right."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self._below: dict[int, int] = {}  # by column: where the next node stands

    def add(
        self,
        kind: str,
        given: Mapping[str, Any],
        sources: Mapping[str, int],
        column: int = DATA,
        *,
        collapsed: bool = False,
    ) -> int:
        """Add a node and return its id; given: its values by input. sources: id of the node that each socket gets."""
        form = FORMS[kind]
        chosen: dict[str, Any] = {}
        for name, each in chosen_inputs(form.inputs, chosen):
            if each.widget:
                plain = name.rpartition(".")[2]
                chosen[name] = given.get(name, given.get(plain, each.shown))
        controls = [name for name, each in chosen_inputs(form.inputs, chosen) if each.controlled]
        values: list[Any] = []
        for name, value in chosen.items():
            values += [value, "fixed"] if name in controls else [value]
        sockets = [(each.input, each.type) for each in form.inputs if not each.widget]
        number = self.put(kind, values, sockets, form.outputs, column, collapsed=collapsed)
        for name, source in sources.items():
            self.link((source, 0), number, name)
        return number

    def put(
        self,
        kind: str,
        values: list[Any],
        sockets: Iterable[tuple[str, str]],
        outputs: Iterable[tuple[str, str]],
        column: int,
        *,
        collapsed: bool = False,
    ) -> int:
        """Add a node of any kind and return its id; sockets, outputs: (name, type) of each."""
        number, sockets = len(self.nodes) + 1, list(sockets)
        height, below = TITLE + ROW * (len(values) + len(sockets)), self._below.get(column, 0)
        node = {"id": number, "type": kind, "pos": [LEFT[column], below], "size": [WIDTH, height]}
        node |= {"flags": {"collapsed": True} if collapsed else {}, "order": number - 1, "mode": 0}
        node["inputs"] = [{"name": name, "type": type_, "link": None} for name, type_ in sockets]
        node["outputs"] = [{"name": name, "type": type_, "links": []} for name, type_ in outputs]
        node |= {"properties": {"Node name for S&R": kind}, "widgets_values": values}
        self.nodes.append(node)
        self._below[column] = below + (COLLAPSED if collapsed else height + BELOW)
        return number

    def lower(self, column: int, top: int) -> None:
        """Let a column go on no higher than a height."""
        self._below[column] = max(top, self._below.get(column, 0))

    def bottom(self, column: int) -> int:
        """Tell where the next node of a column would stand."""
        return self._below.get(column, 0)

    def top(self, node: int) -> int:
        """Tell how high a node stands."""
        return int(self.nodes[node - 1]["pos"][1])

    def copy(self, node: Mapping[str, Any]) -> int:
        """Add a node of another workflow, without its links, and return its id."""
        number = self.put(node["type"], [], (), (), FILES)
        own = {key: value for key, value in node.items() if key not in ("id", "pos", "order")}
        own["inputs"] = [{**each, "link": None} for each in node.get("inputs") or ()]
        own["outputs"] = [{**each, "links": []} for each in node.get("outputs") or ()]
        self.nodes[number - 1] |= own
        self._below[FILES] = self.nodes[number - 1]["pos"][1] + int(_height(node)) + BELOW
        return number

    def link(self, source: tuple[int, int], target: int, name: str) -> None:
        """Link an output, (id, its place), to the input of a name."""
        node, (origin, place) = self.nodes[target - 1], source
        slot = next(i for i, each in enumerate(node["inputs"]) if each["name"] == name)
        output, number = self.nodes[origin - 1]["outputs"][place], len(self.links) + 1
        node["inputs"][slot]["link"] = number
        output["links"].append(number)
        self.links.append([number, origin, place, target, slot, output["type"]])

    def note(self, text: str) -> None:
        """Add a note at the left of all nodes, where reading starts."""
        first = min(each["pos"][0] for each in self.nodes)
        number = self.put("MarkdownNote", [text], (), (), FILES)
        height = min(NOTE_HIGHEST, TITLE + 18 * (2 + text.count("\n") + len(text) // 60))
        self.nodes[number - 1] |= {"pos": [first - WIDTH - GAP, 0], "size": [WIDTH, height], "title": "Read me", **DARK}

    def document(self) -> dict[str, Any]:
        """Write the workflow as the editor saves it."""
        last = {"last_node_id": len(self.nodes), "last_link_id": len(self.links)}
        return {
            **last,
            "nodes": self.nodes,
            "links": self.links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }


def workflow_of(
    run: RunFile, models: Mapping[str, str] | None = None, family: str = "", note: str = ""
) -> dict[str, Any]:
    """Write the workflow of a run; raises ValueError for settings that no nodes make.

    Models are named as ComfyUI lists them: their files belong into its folders of models. models, family: files of a
    model that ComfyUI's own nodes load, by role, and its kind, one of FAMILIES. note: what a person reads first. The
    nodes that load a linked model are those of the workflow that the run was read from.
    """
    config, canvas = _without_model(run.config), _Canvas()
    if models is not None:
        base = _add_loaders(canvas, config, models, family)
    elif config.base_model.connected is not None:
        base = _add_loaders_of(canvas, run)
    else:
        base = _add_base(canvas, config.base_model)
    sources = {"base_model": base, "dataset": _add_dataset(canvas, config)}
    canvas.lower(TRAIN, canvas.top(sources["dataset"]))
    canvas.lower(SETTINGS, canvas.top(sources["dataset"]) + UNDER_LINKS)
    sources |= _add_optional(canvas, config)
    given = {**inputs_of(config.train), **inputs_of(config.existing), "name": run.name}
    canvas.add("AtelierTrain", given, sources, TRAIN)
    if note:
        canvas.note(note)
    document = canvas.document()
    again = read_workflow(document, _AsWritten(config), "", lambda *_: Chosen(config.base_model)).config
    read, given = _plain(again.to_dict()), _plain(config.to_dict())
    if read != given:
        wrong = _first_difference(read, given)
        raise ValueError(f"No workflow has the setting {wrong} of {run.name} beside its other settings.")
    return document


def _without_model(config: RunConfig) -> RunConfig:
    """Leave out what the model of a run says of clips, which no node sets."""
    of_none = {"step": 0, "begins": False, "keeps": False}
    concepts = (each.replace(clips=each.clips and each.clips.replace(**of_none)) for each in config.dataset.concepts)
    return config.replace(dataset=config.dataset.replace(concepts=tuple(concepts)))


def _height(node: Mapping[str, Any]) -> float:
    """Read the height of a node on the canvas, of which editors keep a list or a table."""
    size = node.get("size") or [0, 0]
    return float(size["1"] if isinstance(size, Mapping) else size[1])


def _plain(value: Any) -> Any:
    """Write every text in nested values as a path in one form: Windows knows two, and "./a" is "a"."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(PurePosixPath(value.replace("\\", "/"))) if isinstance(value, str) else value


def _add_loaders(canvas: _Canvas, config: RunConfig, models: Mapping[str, str], family: str) -> int:
    """Add ComfyUI's own loaders of a model, and Use Connected Model."""

    def put(loader: LoadingNode) -> int:
        return canvas.put(loader.kind, loader.values, (), [(name, name) for name in loader.outputs], FILES)

    base, sources = config.base_model, []
    for loader in loaders_of(models, family):
        number = put(loader)
        sources += [(number, place) for place in range(len(loader.outputs))]
    given = {**inputs_of(base), **(inputs_of(base.connected) if base.connected else {})}
    number = canvas.add("AtelierConnectModel", given, {})
    for name, source in zip(("model", "clip", "vae"), sources, strict=True):
        canvas.link(source, number, name)
    if HIGH in models:  # the other file of a model of two experts
        canvas.link((put(loaders_of({"diffusion_model": models[HIGH]}, family)[0]), 0), number, "model_high")
    if VISION in models:
        canvas.link((put(vision_loader(models[VISION])), 0), number, "clip_vision")
    return number


def _add_loaders_of(canvas: _Canvas, run: RunFile) -> int:
    """Add Use Connected Model with a run's settings, and copies of the nodes that lead to it in the run's workflow.

    Raises ValueError where the workflow has not just one, and for nodes that more than links lead to.
    """
    document, base = run.workflow or {}, run.config.base_model
    nodes, ends = {each["id"]: each for each in document.get("nodes", ())}, links_of(document)
    connects = [each for each in nodes.values() if each["type"] == CONNECTED]
    others = {*BY_NAME, *subgraphs_of(document)}
    if len(connects) != 1:
        raise ValueError(f"{run.name} trains on a model of other nodes, which its settings do not name.")
    added, why = dict[Any, int](), f"{run.name} trains on a model that more than plain nodes load."

    def add(number: Any) -> int:
        if number not in added:
            node = nodes[number]
            if node["type"] in others or node["type"].startswith(GROUPS) or node.get("mode", 0):
                raise ValueError(why)
            added[number] = canvas.copy(node)
            link_all(node, added[number])
        return added[number]

    def link_all(node: Mapping[str, Any], target: int) -> None:
        for each in node.get("inputs") or ():
            origin, slot = ends.get(each.get("link"), (None, 0))
            if origin in nodes:
                if all(socket["name"] != each["name"] for socket in canvas.nodes[target - 1]["inputs"]):
                    raise ValueError(why)  # a setting of Use Connected Model that another node gives
                canvas.link((add(origin), slot), target, each["name"])

    assert base.connected is not None
    given = prompt_of(document, FORMS)[str(connects[0]["id"])]["inputs"]
    target = canvas.add(CONNECTED, {**given, **inputs_of(base), **inputs_of(base.connected)}, {})
    link_all(connects[0], target)
    return target


def _add_base(canvas: _Canvas, base: BaseModelConfig) -> int:
    given = inputs_of(base)
    for role in MODEL_FILES[1:]:
        given[role] = listed(given[role], ("vae", "text_encoders", "clip")) if given[role] else BAKED
    return canvas.add("AtelierLoadBaseModel", {**given, "checkpoint": listed(base.path, ("checkpoints",))}, {})


def _add_dataset(canvas: _Canvas, config: RunConfig) -> int:
    """Add the concepts one after another, each with its masks and augmentation unless the next one has the same."""
    concepts, before = config.dataset.concepts, 0
    for concept, after in zip(concepts, (*concepts[1:], None), strict=True):
        before = canvas.add("AtelierConceptDataset", _concept(concept), _sources(canvas, concept, before))
        if concept.masks and (after is None or after.masks != concept.masks):
            before = canvas.add("AtelierMaskLoader", inputs_of(concept.masks), {"dataset": before}, collapsed=True)
        if concept.controls and (after is None or after.controls != concept.controls):
            folders = dict(zip(CONTROL_FOLDERS, concept.controls.folders, strict=False))
            given = {**inputs_of(concept.controls), **folders}
            before = canvas.add("AtelierControlPictures", given, {"dataset": before}, collapsed=True)
        if concept.augment and (after is None or after.augment != concept.augment):
            before = canvas.add("AtelierAugment", inputs_of(concept.augment), {"dataset": before}, collapsed=True)
    if not before:
        raise ValueError("The run has no pictures; write a concept with a folder.")
    return before


def _concept(concept: ConceptConfig) -> dict[str, Any]:
    folder = EXAMPLE if concept.folder == str(real_path(ASSETS / "concept_example")) else concept.folder
    return {**inputs_of(concept), **inputs_of(concept.captions), "folder": folder}


def _sources(canvas: _Canvas, concept: ConceptConfig, before: int) -> dict[str, int]:
    """Add Captions, Pictures and Clips of a concept where they are not open; before: the concept before, 0 for none."""
    found = {"dataset": before} if before else {}
    for name, kind, of, untouched in (
        ("caption_settings", "AtelierCaptions", concept.captions, OPEN_CAPTIONS),
        ("picture_settings", "AtelierPictures", concept, ConceptConfig(folder=concept.folder)),
        ("clip_settings", "AtelierClips", concept.clips or ClipConfig(), ClipConfig()),
    ):
        if any(getattr(of, row.name) != getattr(untouched, row.name) for row in FORMS[kind].inputs):
            canvas.lower(OF_PICTURES, max(canvas.bottom(FILES), canvas.bottom(DATA)))
            found[name] = canvas.add(kind, inputs_of(of), {}, OF_PICTURES, collapsed=True)
    return found


def _add_optional(canvas: _Canvas, config: RunConfig) -> dict[str, int]:
    """Add the optional nodes whose settings are not open; return their ids by the input of Train LoRA."""
    train, found = config.train, {}

    def add(name: str, kind: str, given: Mapping[str, Any], *, needed: bool) -> None:
        if needed:
            found[name] = canvas.add(kind, given, {}, SETTINGS, collapsed=True)

    sizes = {**inputs_of(train.buckets), "bucket_step": train.bucket_step}
    add("buckets", "AtelierBuckets", sizes, needed=train.buckets != BucketConfig() or train.bucket_step != 0)
    optimizer = {**inputs_of(config.optimizer), **config.optimizer.options}
    add("optimizer", "AtelierOptimizer", optimizer, needed=config.optimizer != OPEN_OPTIMIZER)
    scheduler = config.scheduler
    add("scheduler", "AtelierScheduler", inputs_of(scheduler), needed=scheduler != SchedulerConfig())
    objective = inputs_of(config.objective)
    objective["pyramid_noise"] = "on" if config.objective.pyramid_iterations else "off"
    add("objective", "AtelierObjective", objective, needed=config.objective != ObjectiveConfig())
    add("memory", "AtelierMemory", inputs_of(config.memory), needed=config.memory != MemoryConfig())
    outputs = Outputs(config.saves, config.sample, train.save_dtype, train.log)
    add("saves", "AtelierSaves", _saves(outputs), needed=outputs != Outputs())
    for kind, part in PARTS.items():
        given, untouched = ({row.name: getattr(of, row.name) for row in part.inputs} for of in (train, OPEN_TRAIN))
        add(part.title.lower(), kind, given, needed=given != untouched)
    return found | _add_lora(canvas, config)


def _saves(outputs: Outputs) -> dict[str, Any]:
    given = {**inputs_of(outputs.saves), **inputs_of(outputs.sample)}
    given["file_name"] = "/".join(filter(None, (outputs.saves.folder, outputs.saves.file_name)))
    given["sample_prompts"] = "\n".join(outputs.sample.prompts)
    return {**given, "save_dtype": outputs.save_dtype, "log": outputs.log}


def _add_lora(canvas: _Canvas, config: RunConfig) -> dict[str, int]:
    """Add LoRA Config, then the LoRAs that exist, then trained words."""
    lora, chain = config.lora, {}
    plain = lora.replace(start="", beneath=(), embeddings=())
    if plain != OPEN_LORA:
        chain = {"lora_config": canvas.add("AtelierLoraConfig", inputs_of(plain), {}, SETTINGS, collapsed=True)}
    files = [(each.path, "beneath", each.strength, each.training_only) for each in lora.beneath]
    files += [(lora.start, "continue", 1.0, False)] if lora.start else []
    for path, use, strength, alone in files:
        given = {
            "lora_name": listed(path, ("loras",)),
            "use": use,
            "strength": strength,
            "training_only": alone,
        }
        chain = {"lora_config": canvas.add("AtelierExistingLora", given, chain, SETTINGS, collapsed=True)}
    for word in lora.embeddings:
        given = {**inputs_of(word), "init_text": word.init}
        chain = {"lora_config": canvas.add("AtelierEmbedding", given, chain, SETTINGS, collapsed=True)}
    return chain


class _AsWritten:
    """Gives back the paths of a configuration for the names of its workflow; implements `Places`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        lora = config.lora
        paths = [*(each.path for each in lora.beneath), *filter(None, [lora.start])]
        self._loras = iter(paths)

    def checkpoint_path(self, name: str) -> Path:
        """The base model, whatever its name."""
        return Path(self._config.base_model.path)

    def file_path(self, kind: str, name: str, setting: str) -> Path:
        """The next LoRA, or the file of a setting."""
        if kind == "loras":
            return Path(next(self._loras))
        base = self._config.base_model
        return Path(next(getattr(base, part) for part in MODEL_FILES if base.named(part) == setting))

    def find_folder(self, folder: str, node: str) -> Path:
        """The folder as it is."""
        return ASSETS / "concept_example" if folder == EXAMPLE else Path(folder)

    def tokenizer_path(self) -> Path | None:
        """The tokenizer."""
        return Path(self._config.base_model.tokenizer) if self._config.base_model.tokenizer else None


def _first_difference(one: Any, other: Any, name: str = "") -> str:
    """Name the first setting where nested values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in other:
            if one.get(key) != other[key]:
                return _first_difference(one.get(key), other[key], f"{name}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True), 1):
            if mine != theirs:
                return _first_difference(mine, theirs, f"{name}.{number}")
    return name.lstrip(".")
