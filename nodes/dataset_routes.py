"""Answer the page of a dataset: its pictures as they are trained, their captions, changes of these, undo and redo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from ..trainer_core.common.garbage import uncollected
from ..trainer_core.common.wording import printable, say
from ..trainer_core.config import BaseModelConfig, DatasetConfig, Defaults, TrainConfig, fill_dataset, fill_train
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.read import PREVIEW, TRAIN, read_concept_of, read_preview, read_workflow
from ..trainer_core.workflow.settings import OPEN_TRAIN
from .comfyui import folders, server
from .comfyui.server import Refused
from .filling import connect
from .guess import family_of

if TYPE_CHECKING:
    from ..trainer_core.data.edits import Journal, Meanwhile, Operation
    from ..trainer_core.models.base import CaptionLengths
    from ..trainer_core.preflight.shown_pictures import CaptionFile

LARGEST = 2**18  # bytes of a question that holds a prompt
LARGEST_EDIT = 2**24  # of one that also names pictures
MOST_FILES = 20_000  # of a folder whose pictures are shown
MOST_PICTURES = 20_000  # that are changed at once
MOST_SHOWN = 200  # captions before and after, in the preview of a change
Key = tuple[int, str]  # a picture: number of its concept in the dataset, name


class Opened(NamedTuple):
    """A dataset as a page looks at it."""

    dataset: DatasetConfig
    train: TrainConfig
    base: Chosen | None
    concepts: tuple[int, ...]  # that are shown
    remark: str  # what decides the plan where it is not what a run would take


def register_dataset_routes() -> None:
    """Add the routes to the server."""
    for name, answer, largest in (
        ("open", answer_open, LARGEST),
        ("caption", answer_caption, LARGEST),
        ("edit", answer_edit, LARGEST_EDIT),
        ("undo", answer_undo, LARGEST_EDIT),
        ("redo", answer_redo, LARGEST_EDIT),
    ):
        server.add_question(f"/atelier/dataset/{name}", _on_a_dataset(answer), largest)


def _on_a_dataset(
    answer: Callable[[Opened, dict[str, Any]], dict[str, Any]],
) -> Callable[[web.Request, Any], web.Response]:
    """Make a route that answers about the dataset of the node that a question names."""

    def answered(_: web.Request, question: Any) -> web.Response:
        asked = question if isinstance(question, dict) else {}
        prompt, node, plan = (asked.get(name) for name in ("prompt", "node", "plan"))
        if not isinstance(prompt, dict) or not isinstance(node, str) or not isinstance(plan, str):
            raise Refused("prompt must be a prompt, and node and plan ids in it, or plan empty.", 400)
        with uncollected():
            found = answer(_read(prompt, node, plan), asked)
            return server.json_answer(found, status=409 if "meanwhile" in found else 200)

    return answered


def _read(prompt: dict[str, Any], node: str, plan: str) -> Opened:
    """Read the dataset of a Concept Dataset or a Dataset Preview; plan: the node whose plan is shown, "" for none.

    Raises ValueError as a run would for a folder that cannot be read.
    """
    if _kind(prompt, node) == PREVIEW:
        base, dataset, train = read_preview(prompt, folders, node, connect)
        return Opened(dataset, train, base, tuple(range(len(dataset.concepts))), "")
    try:
        own = read_concept_of(prompt, folders, node)
        if _kind(prompt, plan) == TRAIN:
            config = read_workflow(prompt, folders, plan, connect).config
            base, dataset, train = Chosen(config.base_model), config.dataset, config.train
        elif plan:
            base, dataset, train = read_preview(prompt, folders, plan, connect)
        else:
            base, dataset, train = None, own, OPEN_TRAIN
        remark = "" if plan else say("No Train LoRA is linked, so that sizes are those of 1024 pixels.")
    except ValueError as problem:  # a node that runs only in ComfyUI, or an input that is missing
        inputs = {key: value for key, value in prompt[node]["inputs"].items() if key != "dataset"}
        own = read_concept_of({**prompt, node: {**prompt[node], "inputs": inputs}}, folders, node)
        base, dataset, train = None, own, OPEN_TRAIN
        remark = say("Shown without the nodes behind it, as these cannot be read before a run: {0}.", _bare(problem))
    return Opened(dataset, train, base, (len(own.concepts) - 1,), remark)


def _kind(prompt: Mapping[str, Any], node: str) -> str:
    found = prompt.get(node)
    known = isinstance(found, dict) and isinstance(found.get("inputs"), dict)
    if node and not known:
        raise ValueError("There is no such node in the prompt.")
    return str(found.get("class_type")) if isinstance(found, dict) else ""


def _bare(problem: ValueError) -> str:
    return str(problem).rstrip(".")


def answer_open(opened: Opened, question: dict[str, Any]) -> dict[str, Any]:
    """Answer with {pictures: as `list_shown` describes them, concepts, remark, left_out: sentences, last, next}."""
    from ..trainer_core.data.plan import build_plan  # here, so that ComfyUI starts fast
    from ..trainer_core.data.scan import Index, scan
    from ..trainer_core.preflight.shown_pictures import list_shown

    _refuse_many(opened)
    defaults, remark = _defaults(question["prompt"], opened)
    dataset = fill_dataset(_lenient(opened), defaults)
    train = fill_train(opened.train, defaults).replace(epochs=1)
    with Index(folders.index_file()) as index:
        manifest = scan(dataset, index, access=folders.access())
        # The plan moves pictures that are held out, or have a role of their own, to concepts after those.
        origin = {picture.path: picture.concept for picture in manifest.pictures}
        plan = build_plan(manifest, dataset, train)
        pictures = list_shown(plan, index, opened.concepts, origin)
    concepts = {number: _describe(dataset, number) for number in opened.concepts}
    for picture in pictures:
        if concepts[picture["concept"]]["elsewhere"]:
            picture["file"] = ""
    left = [file for file in plan.manifest.outcomes if file.concept in opened.concepts and file.outcome == "left out"]
    return {
        "pictures": pictures,
        "concepts": concepts,
        "remark": remark or opened.remark,
        "left_out": [f"{printable(file.name)}: {file.why}" for file in left],
        **_changes(opened),
    }


def _refuse_many(opened: Opened) -> None:
    for number in opened.concepts:
        folders.refuse_many(opened.dataset.concepts[number].folder, MOST_FILES)


def _lenient(opened: Opened) -> DatasetConfig:
    """Let a page open what a run would refuse: captions are missing before they are written."""
    roles = {concept.role for concept in opened.dataset.concepts}
    return opened.dataset.replace(
        concepts=tuple(
            concept.replace(
                on_problem="leave_out",
                role=concept.role if "train" in roles else "train",
                captions=concept.captions.replace(missing="empty")
                if concept.captions.missing == "error"
                else concept.captions,
            )
            for concept in opened.dataset.concepts
        )
    )


def _describe(dataset: DatasetConfig, number: int) -> dict[str, Any]:
    """Describe a concept for the page: its folder, how its tags are split, and why captions cannot be changed."""
    from ..trainer_core.preflight.shown_pictures import where_captions_are

    concept = dataset.concepts[number]
    elsewhere = where_captions_are(concept)
    if not elsewhere and not folders.writable().allows(concept.folder):
        elsewhere = folders.only_read(concept.folder)
    return {
        "folder": concept.folder,
        "name": Path(concept.folder).name,
        "role": concept.role,
        "separator": concept.captions.separator,
        "elsewhere": elsewhere,
    }


def _defaults(prompt: dict[str, Any], opened: Opened) -> tuple[Defaults, str]:
    """Find what a model's family decides, and a remark where that is unknown before the run."""
    if opened.base is None:
        return Defaults(), ""
    try:
        if opened.base.config.connected is not None:
            return family_of(prompt, opened.base.config)[1], ""
        return _outline(opened.base.config).defaults, ""
    except ValueError as problem:
        return Defaults(), say("Sizes are those of 1024 pixels, as the model is unknown here: {0}.", _bare(problem))


def takes_films(asked: Any) -> bool | None:
    """Tell whether the model of a plan trains films; None where nothing tells. asked: {prompt, node, plan}."""
    given = asked if isinstance(asked, dict) else {}
    prompt, node, plan = (given.get(name) for name in ("prompt", "node", "plan"))
    if not isinstance(prompt, dict) or not isinstance(node, str) or not isinstance(plan, str) or not plan:
        return None
    try:
        opened = _read(prompt, node, plan)
    except ValueError:  # the run says it
        return None
    defaults, unknown = _defaults(prompt, opened)
    return None if opened.base is None or unknown else bool(defaults.clip_step)


@functools.lru_cache(maxsize=2)  # a second each time
def _outline(config: BaseModelConfig) -> Any:
    source = Chosen(config).source()
    source.check()
    return source.outline()


def answer_caption(opened: Opened, question: dict[str, Any]) -> dict[str, Any]:
    """Answer {concept, text} with what `describe_caption` composes, and a remark on whose tokens are counted."""
    from ..trainer_core.preflight.shown_pictures import describe_caption

    number, text = question.get("concept"), question.get("text")
    if type(number) is not int or number not in opened.concepts or not isinstance(text, str):
        raise Refused("concept must be the number of one, and text a text.", 400)
    limits, remark = _lengths(opened)
    return describe_caption(text, opened.dataset.concepts[number].captions, limits) | {"remark": remark}


def _lengths(opened: Opened) -> tuple[CaptionLengths, str]:
    """Find the limits of captions of the run's model; CLIP's, with a remark, where it is unknown before the run."""
    from ..trainer_core.models.sd import ClipLengths, load_tokenizer

    if opened.base is not None and opened.base.config.connected is None:
        return _outline(opened.base.config).text, ""
    return (
        ClipLengths(tokenizer=load_tokenizer(folders.tokenizer_path())),
        say("Counted as CLIP does; the run's model is unknown here."),
    )


def answer_edit(opened: Opened, question: dict[str, Any]) -> dict[str, Any]:
    """Answer {pictures: [concept, name, seen], operation, dry} with what it changes, or with files changed meanwhile.

    dry: nothing is written, and the answer has up to MOST_SHOWN texts before and after.
    """
    from ..trainer_core.data.edits import Meanwhile, Rewritten, encoded

    chosen, operation = _pictures(opened, question.get("pictures")), _operation(question.get("operation"))
    _refuse_many(opened)
    files = _files(opened, list(chosen))
    new = _edited(opened, files, operation)
    changed = {key: text for key, text in new.items() if text != files[key].text}
    if question.get("dry"):
        shown = [[*key, files[key].text, text] for key, text in list(changed.items())[:MOST_SHOWN]]
        return {"count": len(changed), "of": len(new), "shown": shown}
    writable = folders.writable()
    for key in changed:
        if not writable.allows(files[key].path):
            raise ValueError(_describe(opened.dataset, key[0])["elsewhere"] or say("This file may not be written."))
    changes: dict[Path, Rewritten] = {}
    for key, text in changed.items():  # two pictures of one name share a file
        path = files[key].path
        changes[path] = Rewritten(path, encoded(text, opened.dataset.concepts[key[0]].captions, path), chosen[key])
    places = {file.path: key for key, file in files.items()}
    try:
        count = _journal(opened).write(list(changes.values()), operation.kind, _folders(opened))
    except Meanwhile as problem:
        return _asked(problem, places)
    return _now(opened, changes.keys()) | {"count": count}


def answer_undo(opened: Opened, question: dict[str, Any]) -> dict[str, Any]:
    """Answer {number: of the newest change, pictures: [concept, name, seen]} with the captions that came back.

    pictures: those whose caption comes back although another program changed it, as `seen` tells.
    """
    return _turned(opened, question, _journal(opened).undo)


def answer_redo(opened: Opened, question: dict[str, Any]) -> dict[str, Any]:
    """Make the change again that was undone last; question and answer are those of `answer_undo`."""
    return _turned(opened, question, _journal(opened).redo)


def _turned(opened: Opened, question: dict[str, Any], turn: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    from ..trainer_core.data.edits import Meanwhile

    number, chosen = question.get("number"), _pictures(opened, question.get("pictures"))
    if not isinstance(number, str):
        raise Refused("number must be that of a change.", 400)
    _refuse_many(opened)
    known = {file.path: chosen[key] for key, file in _files(opened, list(chosen)).items()}
    try:
        turned = turn(_folders(opened), number, known, leave=question.get("leave") is True)
    except Meanwhile as problem:
        return _asked(problem, {file.path: key for key, file in _files_at(opened, problem.files).items()})
    return _now(opened, turned["files"]) | {"count": turned["count"]}


def _pictures(opened: Opened, given: Any) -> dict[Key, str]:
    """Read the pictures of a question, with what a person saw of each."""
    if not isinstance(given, list) or len(given) > MOST_PICTURES:
        raise Refused(f"pictures must be a list of at most {MOST_PICTURES}.", 400)
    found: dict[Key, str] = {}
    for each in given:
        match each:
            case [int(number), str(name), str(seen)] if number in opened.concepts:
                found[number, name] = seen
            case _:
                raise Refused("pictures must be lists of the number of a concept, a name and what was seen.", 400)
    return found


def _operation(given: Any) -> Operation:
    from ..trainer_core.data.edits import Operation

    fields = {"kind": str, "find": str, "text": str, "case": bool, "word": bool, "first": bool}
    if not isinstance(given, dict) or not all(type(value) is fields.get(name) for name, value in given.items()):
        raise Refused(f"operation must be an object with {', '.join(fields)}.", 400)
    return Operation(**{"kind": "", **given})


def _files(opened: Opened, chosen: Sequence[Key]) -> Mapping[Key, CaptionFile]:
    from ..trainer_core.preflight.shown_pictures import chosen_files

    return chosen_files(opened.dataset.concepts, folders.access(), chosen)


def _files_at(opened: Opened, places: Collection[Path]) -> dict[Key, CaptionFile]:
    """Read the captions at some places, of each picture that has one there."""
    from ..trainer_core.preflight.shown_pictures import caption_files

    concepts = opened.dataset.concepts
    return {
        (number, name): file
        for number in opened.concepts
        for name, file in caption_files(concepts[number], folders.access(), lambda _, path: path in places).items()
    }


def _edited(opened: Opened, files: Mapping[Key, CaptionFile], operation: Operation) -> dict[Key, str]:
    """Compute the new text of each picture, by the settings of its concept."""
    from ..trainer_core.data.edits import edited

    new: dict[Key, str] = {}
    for number in opened.concepts:
        own = [key for key in files if key[0] == number]
        texts = edited([files[key].text for key in own], operation, opened.dataset.concepts[number].captions)
        new |= dict(zip(own, texts, strict=True))
    return new


def _now(opened: Opened, changed: Collection[Path]) -> dict[str, Any]:
    """Describe for the page the captions of changed files as they are now, and what can be undone and redone."""
    now = [[*key, file.text, file.seen] for key, file in _files_at(opened, set(changed)).items()]
    return {"now": now, **_changes(opened)}


def _changes(opened: Opened) -> dict[str, Any]:
    """Describe {last: the newest change, next: the one that was undone last}, None without any."""
    journal, places = _journal(opened), _folders(opened)
    return {"last": journal.last(places), "next": journal.next(places)}


def _asked(problem: Meanwhile, places: Mapping[Path, Key]) -> dict[str, Any]:
    """Describe files that another program changed: [concept, name, text there, text that would be written, seen]."""
    from ..trainer_core.data.edits import fingerprint_of

    texts = {path: [(each or b"").decode("utf-8", "replace") for each in both] for path, both in problem.files.items()}
    listed = [[*places[path], *texts[path], fingerprint_of(problem.files[path][0])] for path in texts if path in places]
    return {"error": say("Another program has changed these captions meanwhile."), "meanwhile": listed}


def _journal(opened: Opened) -> Journal:
    from ..trainer_core.data.edits import Journal, flat_folders

    flat = flat_folders(opened.dataset.concepts[number] for number in opened.concepts)
    return Journal(folders.journal_folder(), flat)


def _folders(opened: Opened) -> list[Path]:
    return [Path(opened.dataset.concepts[number].folder) for number in opened.concepts]
