"""Answer the editor: pictures on nodes, a LoRA's blocks, what people ask of a run, allowed folders, kept files."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from yarl import URL

from ..trainer_core.common.disk_errors import reason
from ..trainer_core.common.wording import say
from ..trainer_core.config import ObjectiveConfig, SchedulerConfig
from ..trainer_core.lora_files.blocks import blocks_of
from ..trainer_core.lora_files.read import outline_lora
from ..trainer_core.models.sd.noise import noise_model
from ..trainer_core.objective import Objective, level_shares
from ..trainer_core.optim.schedule import check_length, lr_factor, warmup_steps
from ..trainer_core.workflow.read import read_concept_of
from ..trainer_core.workflow.settings import plain_path, read_objective, read_scheduler
from . import help_pages, presets
from .comfyui import allowed, failures, folders, kept, server, session, shell, shown
from .comfyui.progress import live_state
from .dataset_routes import takes_films
from .guess import guess
from .load_lora import WHERE
from .objective import CHOICES
from .sockets import io

LARGEST = 8192  # bytes of a question
LARGEST_PROMPT = 262_144  # of one that holds a prompt
LARGEST_WORKFLOW = 2**23  # bytes of one that holds a workflow
LARGEST_LIST = 4_194_304  # of one that holds names of files
MOST_FILES = 20_000  # of a folder that are counted before a run, and that a page sends into one
MOST_FOLDERS = 20  # of one workflow that a person is asked for
LONGEST = 10_000_000  # steps of a run
MOST_NODES = 100  # that a page asks for at once
PARTS = 50  # of all levels, in the picture of Noise & Loss
POINTS = 241  # of a curve
USUAL = 1000  # steps drawn where nothing says how many the run has


def register_routes(nodes: Sequence[type[io.ComfyNode]]) -> None:
    """Add the routes to the server; nodes: those that have help pages."""
    ids = {node.GET_SCHEMA().node_id: node for node in nodes}
    # Where ComfyUI serves js/ as it is: a longer path comes first, so that the page gets the tables as well.
    folder = URL.build(path=f"/extensions/{help_pages.ROOT.name}/docs").raw_path
    server.add_route(f"{folder}/{{node}}.md", partial(answer_help, ids))
    server.add_route(f"{folder}/{{node}}/{{language}}.md", partial(answer_help, ids))
    server.add_token_route()
    server.add_question("/atelier/command", answering(answer_command), LARGEST_WORKFLOW)
    server.add_question("/atelier/shown", answering(answer_shown), LARGEST)
    server.add_question("/atelier/failed", answering(answer_failed), LARGEST)
    server.add_question("/atelier/schedule", answering(answer_schedule), LARGEST)
    server.add_question("/atelier/levels", answering(answer_levels), LARGEST)
    server.add_question("/atelier/blocks", answering(answer_blocks), LARGEST)
    server.add_question("/atelier/ask", answering(answer_ask), LARGEST)
    server.add_question("/atelier/guess", answering(answer_guess), LARGEST_PROMPT)
    server.add_question("/atelier/presets", answering(answer_presets), LARGEST_PROMPT)
    server.add_route("/atelier/kept", answer_kept)
    server.add_question("/atelier/kept/clear", answering(answer_clear), LARGEST)
    server.add_route("/atelier/folders", answer_folders)
    server.add_route("/atelier/folders/datasets", answer_datasets)
    server.add_question("/atelier/folders/look", answering(answer_look), LARGEST)
    server.add_question("/atelier/folders/check", answering(answer_check), LARGEST)
    server.add_question("/atelier/folders/new", answering(answer_new), LARGEST_LIST)
    here = allowed.only_at_the_machine
    server.add_question("/atelier/folders/allow", answering(answer_allow), LARGEST, here)
    server.add_question("/atelier/folders/forget", answering(answer_forget), LARGEST, here)


def answering(answer: Callable[[Any], web.Response]) -> Callable[[web.Request, Any], web.Response]:
    """Make an answer to a request of one that needs its question alone."""
    return lambda _, question: answer(question)


def answer_help(nodes: Mapping[str, type[io.ComfyNode]], request: web.Request) -> web.Response:
    """Answer the help page of a node as Markdown; 404 for what we have not, after which the editor asks for English."""
    node, language = request.match_info["node"], request.match_info.get("language", "en")
    if node not in nodes or language not in help_pages.LANGUAGES:
        return web.Response(status=404, text="There is no such help page.")
    page = help_pages.help_page(nodes[node].GET_NODE_INFO_V1(), language)
    return web.Response(text=page, content_type="text/markdown", headers={"Cache-Control": "no-cache"})


def answer_ask(question: Any) -> web.Response:
    """Answer {what: one of session.SAID, node: id of a Train LoRA, or none} with {said: a sentence} or {error: one}."""
    what, node = (question.get("what"), question.get("node")) if isinstance(question, dict) else (None, None)
    if not isinstance(what, str) or what not in session.SAID or not isinstance(node, str | None):
        known = ", ".join(session.SAID)
        return server.json_answer({"error": f"what must be one of {known}, and node a node's id or null."}, status=400)
    try:
        return server.json_answer({"said": session.ask(what, node)})
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)


def answer_command(question: Any) -> web.Response:
    """Answer {workflow: as the editor saves it, node: id of a Train LoRA} with {command: a line for a shell}."""
    workflow, node = (question.get("workflow"), question.get("node")) if isinstance(question, dict) else (None, None)
    if not isinstance(workflow, dict) or not isinstance(workflow.get("nodes"), list) or not isinstance(node, str):
        return server.json_answer({"error": "workflow must be a workflow, and node a node's id."}, status=400)
    try:
        return server.json_answer({"command": shell.command_of(workflow, node)})
    except ValueError as problem:
        whole = str(problem).endswith((".", "?"))
        sentence = str(problem) if whole else say("This run has no command: {0}.", str(problem))
    except OSError as problem:
        sentence = f"The file of the run could not be written ({reason(problem)}); check ComfyUI's user folder."
    return server.json_answer({"error": sentence}, status=409)


def answer_shown(question: Any) -> web.Response:
    """Answer {workflow: id, nodes: ids} with {shown: by node, the state of its run at work, or {run: its last one}}.

    A run at work elsewhere has the state that `follow` gives. A node whose turn is still to come also has {waiting: for
    what}. A node whose run is deleted, or that never had one, is left out.
    """
    asked = question if isinstance(question, dict) else {}
    workflow, nodes = asked.get("workflow", ""), asked.get("nodes", "")
    named = [workflow, *nodes] if isinstance(nodes, list) and len(nodes) <= MOST_NODES else [None]
    if not all(isinstance(each, str) and 0 < len(each) <= shown.LONGEST_ID for each in named):
        return server.json_answer({"error": "workflow must be an id, and nodes a list of ids."}, status=400)
    live = {node: state for node in nodes if (state := live_state(workflow, node)) is not None}
    try:
        last = _last_runs(workflow, [node for node in nodes if node not in live])
    except OSError as problem:
        return server.json_answer({"error": f"The runs could not be read ({reason(problem)})."}, status=409)
    failures.forget(workflow, [node for node, state in last.items() if state.get("alive")])
    for node, said in shown.waiting(workflow, [node for node in nodes if node not in live]).items():
        last[node] = {**last.get(node, {}), "waiting": said}
    return server.json_answer({"shown": last | live})


def answer_failed(question: Any) -> web.Response:
    """Answer {workflow: id} with {failed: what went wrong, by node}, since the workflow was queued last.

    early lists those at a Train LoRA whose run had not begun, and before it: it shows the run before.
    """
    workflow = question.get("workflow") if isinstance(question, dict) else None
    if not isinstance(workflow, str) or not 0 < len(workflow) <= shown.LONGEST_ID:
        return server.json_answer({"error": "workflow must be an id."}, status=400)
    return server.json_answer(failures.of_workflow(workflow))


def _last_runs(workflow: str, nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
    from ..trainer_core.runs import run_paths  # here, so that ComfyUI starts fast
    from ..trainer_core.runs.follow import follow

    found: dict[str, dict[str, Any]] = {}
    paths = {path.name: path for path in run_paths(folders.runs_folder())}
    for node, run in shown.of_nodes(workflow, nodes).items():
        if run in paths:  # else it was deleted, or ended before anything was written
            found[node] = {"run": run}
            with suppress(ValueError, OSError):  # damaged: the node asks for the run, and says so
                state = follow(paths[run])
                found[node] = state if state["alive"] else found[node]
    return found


def answer_schedule(question: Any) -> web.Response:
    """Answer {values: the Scheduler's widgets, steps: of the run or null} with a curve, or {error: a sentence}."""
    try:
        return server.json_answer(curve(question))
    except ValueError as problem:
        return server.json_answer({"error": str(problem)})


def curve(question: Any) -> dict[str, Any]:
    """Compute steps, warm-up, floor and [step, factor] at up to POINTS steps; raises ValueError."""
    if not isinstance(question, dict) or not isinstance(question.get("values"), dict):
        raise ValueError("The question needs the Scheduler's values.")
    config, steps = scheduler_of(question["values"]), question.get("steps")
    if steps is None:
        steps = config.planned_steps or max(USUAL, 2 * warmup_steps(USUAL, config))
    if type(steps) is not int or not 1 <= steps <= LONGEST:
        raise ValueError(f"steps is {steps!r:.80}; it must be a whole number between 1 and {LONGEST}.")
    check_length(steps, config)
    shown = range(steps) if steps <= POINTS else [round(i * (steps - 1) / (POINTS - 1)) for i in range(POINTS)]
    return {
        "steps": steps,
        "warmup": warmup_steps(steps, config),
        "floor": config.min_lr_ratio,
        "points": [[step, round(lr_factor(step, steps, config), 6)] for step in shown],
    }


def scheduler_of(values: dict[str, Any]) -> SchedulerConfig:
    """Build the configuration of widgets by their names (`name`, `name.cycles` …), as strict as a prompt is."""
    settings = settings_of(values, SchedulerConfig, "Scheduler", ["name"])
    if "name" not in settings:
        raise ValueError("name of Scheduler is missing; choose a shape.")
    return read_scheduler(**settings)


def settings_of(values: dict[str, Any], config: type, title: str, choices: Sequence[str]) -> dict[str, Any]:
    """Check the values of a node's widgets by the types of a configuration, and return them by field.

    choices: the widgets whose choices have fields of their own, named `choice.field`. Raises ValueError.
    """
    hints, found = typing.get_type_hints(config) | dict.fromkeys(choices, str), {}
    for key, value in values.items():
        choice, field = _choice_and_field(key)
        kinds = {int: (int,), float: (int, float), bool: (bool,)}.get(hints.get(field, object), (str,))
        as_wanted = isinstance(value, kinds) and isinstance(value, bool) == (kinds == (bool,))
        if field not in hints or choice not in ("", *choices) or not as_wanted:
            raise ValueError(f"{field[:80]} of {title} cannot be {value!r:.80}.")
        found[field] = value
    return found


def _choice_and_field(widget: str) -> tuple[str, str]:
    choice, _, field = widget.rpartition(".")
    return choice, field


def answer_levels(question: Any) -> web.Response:
    """Answer {values: Noise & Loss's widgets, connected: of a model that ComfyUI has loaded} with `levels`."""
    try:
        return server.json_answer(levels(question))
    except ValueError as problem:
        return server.json_answer({"error": str(problem)})


def levels(question: Any) -> dict[str, Any]:
    """Compute how often each of PARTS parts of all levels is drawn, and what of it is the family's; raises ValueError.

    Drawn for Stable Diffusion; of a connected model neither family nor levels are known before the run.
    """
    values = question.get("values") if isinstance(question, dict) else None
    if not isinstance(values, dict):
        raise ValueError("The question needs the values of Noise & Loss.")
    config = read_objective(**settings_of(values, ObjectiveConfig, "Noise & Loss", CHOICES))
    open_shift, family = not config.timestep_shift, ""
    if question.get("connected"):
        if config.timestep_distribution in ("auto", "snr_uniform"):
            raise ValueError(
                say("How often timesteps are trained depends on the connected model; Use Connected Model names it.")
            )
        family = say("without the shift of the model's family") if open_shift else ""
    elif config.timestep_distribution == "auto":
        family = say("as Stable Diffusion is trained")
    objective = Objective(config, noise_model("epsilon", False), seed=0)
    table, count = objective.probabilities((64, 64)), len(objective.path)
    shares = level_shares(table, config.min_timestep, count, PARTS)
    return {"levels": count, "shares": [round(share, 4) for share in shares], "family": family}


def answer_guess(question: Any) -> web.Response:
    """Answer {prompt: all that leads to a Train LoRA, node: its id} with {settings: as `guess` lists} or {error: …}."""
    return _answer_settings(question, lambda prompt, node: {"settings": guess(prompt, node)})


def answer_presets(question: Any) -> web.Response:
    """Answer the same with what `offer` lists, or with goal, family, memory and network as `settings_of` does."""

    def find(prompt: dict[str, Any], node: str) -> dict[str, Any]:
        if "goal" not in question:
            return presets.offer(prompt, node)
        goal, family, memory = (question.get(name) for name in ("goal", "family", "memory"))
        return presets.settings_of(prompt, node, goal, family, memory, question.get("network", presets.LORA))

    return _answer_settings(question, find)


def _answer_settings(question: Any, find: Callable[[dict[str, Any], str], dict[str, Any]]) -> web.Response:
    prompt, node = (question.get("prompt"), question.get("node")) if isinstance(question, dict) else (None, None)
    if not isinstance(prompt, dict) or not isinstance(node, str):
        return server.json_answer({"error": "prompt must be a prompt, and node an id in it."}, status=400)
    try:
        return server.json_answer(find(prompt, node))
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    except OSError as problem:
        return server.json_answer({"error": f"A file could not be read ({reason(problem)})."}, status=409)


def answer_blocks(question: Any) -> web.Response:
    """Answer {lora_name: as in Load LoRA File} with {blocks: names of the LoRA's blocks}, or {error: a sentence}.

    Only the header of the file is read.
    """
    name = question.get("lora_name") if isinstance(question, dict) else None
    if not isinstance(name, str):
        return server.json_answer({"error": "lora_name must be a text."}, status=400)
    try:
        return server.json_answer({"blocks": _blocks(name)})
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    except OSError as problem:
        return server.json_answer({"error": f"{name[:80]} could not be read ({reason(problem)})."}, status=409)


def _blocks(name: str) -> list[str]:
    return blocks_of(outline_lora(folders.lora_path(name, WHERE)))


def answer_folders(request: web.Request) -> web.Response:
    """Answer with {folders: those that a person allowed, may_change: whether this page may change the list}."""
    try:
        known = allowed.allowed_folders()
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    return server.json_answer({"folders": known, "may_change": allowed.at_the_machine(request)})


def answer_datasets(request: web.Request) -> web.Response:
    """Answer with {folders: those with pictures in input/ and datasets/, example: the name of the pack's pictures}."""
    try:
        found = folders.dataset_folders()
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    return server.json_answer({"folders": found, "example": folders.EXAMPLE})


def answer_look(question: Any) -> web.Response:
    """Answer {prompt: a Concept Dataset and what sets it, node: its id} with what `look_at` finds, or {error: …}.

    trained: {prompt, node, plan} of the whole workflow, as the page of a dataset asks; its model tells who takes films.
    """
    trained = question.get("trained") if isinstance(question, dict) else None
    return _answer_settings(question, partial(look_at, trained=trained))


def look_at(prompt: dict[str, Any], node: str, trained: Any = None) -> dict[str, Any]:
    """Count pictures and films of a Concept Dataset and those without a caption; raises ValueError as its run would.

    left_out: whether the films are, as the model takes pictures alone. {more: MOST_FILES} of a folder with more files
    than are counted while somebody waits.
    """
    from ..trainer_core.data.scan import glance  # here, so that ComfyUI starts fast

    concept = read_concept_of(prompt, folders, node).concepts[-1]
    if folders.holds_more(concept.folder, MOST_FILES):
        return {"more": MOST_FILES}
    left_out = takes_films(trained) is False
    return {**glance(concept, folders.access(), takes_films=not left_out)._asdict(), "left_out": left_out}


def answer_new(question: Any) -> web.Response:
    """Answer {name, files: paths of another computer} with {folder: a new one of input/, files: their names in it}.

    A name is "" where no dataset reads the file; without any other there is no folder.
    """
    from ..trainer_core.data.scan.sent import usable_names  # here, so that ComfyUI starts fast

    name, files = (question.get("name"), question.get("files")) if isinstance(question, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(files, list) or not all(isinstance(each, str) for each in files):
        return server.json_answer({"error": "name must be a text, and files a list of paths."}, status=400)
    if len(files) > MOST_FILES:
        return server.json_answer({"error": f"A page sends at most {MOST_FILES} files at once."}, status=400)
    names = usable_names(files)
    try:
        return server.json_answer({"folder": folders.new_folder(name) if any(names) else "", "files": names})
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    except OSError as problem:
        sentence = f"No folder could be made in ComfyUI's input folder ({reason(problem)}); check it and the disk."
        return server.json_answer({"error": sentence}, status=409)


def answer_check(question: Any) -> web.Response:
    """Answer {folders: as nodes name them} with {unknown: the full paths of those that nobody allowed}."""
    named = question.get("folders") if isinstance(question, dict) else None
    if not isinstance(named, list) or not all(isinstance(folder, str) for folder in named):
        return server.json_answer({"error": "folders must be a list of names."}, status=400)
    try:
        unknown = [place for folder in named[:MOST_FOLDERS] if (place := folders.unknown_place(folder)) is not None]
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    return server.json_answer({"unknown": list(dict.fromkeys(map(str, unknown)))})


def answer_allow(question: Any) -> web.Response:
    """Answer {folder: a full path} with {said: a sentence} or {error: one}."""
    return _change(
        question,
        lambda folder: allowed.allow(Path(folder)),
        lambda folder: say("Workflows may now read the pictures in {0}.", folder),
    )


def answer_forget(question: Any) -> web.Response:
    """Answer {folder: a full path} with {said: a sentence} or {error: one}."""
    return _change(question, allowed.forget, lambda folder: say("Workflows may no longer read {0}.", folder))


def _change(question: Any, change: Callable[[str], None], said: Callable[[str], str]) -> web.Response:
    folder = question.get("folder") if isinstance(question, dict) else None
    if not isinstance(folder, str):
        return server.json_answer({"error": "folder must be a full path."}, status=400)
    try:
        change(plain_path(folder, "The folder"))
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    except OSError as problem:
        sentence = f"The list of allowed folders could not be written ({reason(problem)}); check {allowed.list_file()}."
        return server.json_answer({"error": sentence}, status=409)
    return server.json_answer({"said": said(folder)})


def answer_kept(_: Any) -> web.Response:
    """Answer with {sizes: bytes of what the pack keeps by kind, limit: the most bytes, 0 for any}, or {error: …}."""
    try:
        limit, sizes = folders.kept_limit(), kept.sizes()
    except ValueError as problem:
        return server.json_answer({"error": str(problem)}, status=409)
    return server.json_answer({"sizes": sizes, "limit": limit})


def answer_clear(question: Any) -> web.Response:
    """Delete what the pack keeps, and answer as `answer_kept` does; refused while a LoRA is trained, wherever."""
    from ..trainer_core.runs import run_paths  # here, so that ComfyUI starts fast
    from ..trainer_core.runs.folder import RunFolder

    runs = (RunFolder(path=path, about={}) for path in run_paths(folders.runs_folder()))
    if kept.is_in_use() or any(run.at_work() for run in runs):
        return server.json_answer({"error": say("A LoRA is being trained; clear after it.")}, status=409)
    kept.clear()
    return answer_kept(question)
