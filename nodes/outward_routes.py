"""Answer the settings of services outside, and publish LoRAs; no answer holds a token or an address.

Only a page that was opened on the machine itself changes something here: what goes out, goes in its owner's name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from ..trainer_core.common.wording import say
from .comfyui import outward, server
from .comfyui.askers import at_the_machine
from .comfyui.server import Refused
from .run_routes import find_run, on_a_run, opened, step_of

LARGEST = 16_384  # bytes of a question: all addresses


def register_outward_routes() -> None:
    """Add the routes to the server."""
    here = outward.only_at_the_machine
    server.add_route("/atelier/outward", answer_settings)
    server.add_question("/atelier/outward/change", answer_change, LARGEST, here)
    server.add_question("/atelier/outward/try", answer_try, LARGEST, here)
    server.add_route("/atelier/runs/{run}/published", on_a_run(answer_published))
    server.add_question("/atelier/runs/hub", answer_hub, LARGEST, here)


def answer_settings(request: web.Request) -> web.Response:
    """Answer with {services: [{name, on, kept, secret, project, installed, problem}], events, all_events, pictures, …}.

    kept: whether a token or an address is kept. secret: of which kind. may_change: whether this page may change them.
    """
    return server.json_answer({**shown(), "may_change": at_the_machine(request)})


def shown() -> dict[str, Any]:
    """Describe the settings without what is secret in them."""
    from ..trainer_core.outward import MESSAGES, SERVICES  # here, so that ComfyUI starts fast
    from ..trainer_core.outward.sender import problems

    chosen = outward.read()
    services = [
        {
            "name": name,
            "tells": row.build is not None,
            "on": chosen.of(name).on,
            "kept": bool(chosen.of(name).secret),
            "secret": row.secret,
            "project": chosen.of(name).project if row.project else None,
            "installed": is_installed(name),
            "problem": problems.get(name, ""),
        }
        for name, row in SERVICES.items()
    ]
    events = {"events": list(chosen.events), "all_events": list(MESSAGES), "pictures": chosen.pictures}
    return {"services": services, **events}


def is_installed(package: str) -> bool:
    """Tell whether Python would find a package, without importing it, which takes seconds."""
    return package in sys.modules or any((Path(place or ".") / package).is_dir() for place in sys.path)


def answer_change(_: web.Request, question: Any) -> web.Response:
    """Change {service: its name, on, secret, project} or {events, pictures}, and answer as `answer_settings` does.

    A secret that is left out stays as it is, and "" deletes it.
    """
    from dataclasses import replace

    from ..trainer_core.outward import SERVICES

    asked = dict(question) if isinstance(question, dict) else {}
    service = asked.pop("service", None)
    of_all = service is None and bool(asked) and set(asked) <= {"events", "pictures"}
    of_one = isinstance(service, str) and service in SERVICES and set(asked) <= {"on", "secret", "project"}
    if not (of_all or of_one):
        raise Refused("The question names no service, or what it has not.", 400)
    with outward.changing:
        known = outward.read()
        if isinstance(service, str) and of_one:
            outward.write(known.with_choice(service, **asked))
        else:
            outward.write(replace(known, **asked))
    return server.json_answer({**shown(), "may_change": True})


def answer_try(_: web.Request, __: Any) -> web.Response:
    """Deliver a message to all addresses, and say whether it went."""
    from ..trainer_core.outward import Attempt, deliver, mask_logs

    chosen = outward.read()
    mask_logs(chosen.secrets)
    with Attempt(chosen.secrets) as attempt:
        deliver(chosen, "A message to try this address.")
    if attempt.problem:
        raise Refused(say("No message went out: {0}.", attempt.problem))
    return server.json_answer({"said": say("A message went out.")})


def answer_published(path: Path, _: web.Request) -> web.Response:
    """Answer how publishing a run goes, or went last."""
    return server.json_answer(outward.published(path.name))


def answer_hub(_: web.Request, question: Any) -> web.Response:
    """Begin to publish the save of {run, step} as {repository, licence, public, samples}, and say so."""
    from ..trainer_core.outward.hub import check_names
    from ..trainer_core.runs.card import publish_at_hub
    from ..trainer_core.runs.export import save_to_export

    asked = question if isinstance(question, dict) else {}
    texts, flags = ("run", "repository", "licence"), ("public", "samples")
    if not all(isinstance(asked.get(name), str) for name in texts):
        raise Refused("run, repository and licence must be texts.", 400)
    if not all(isinstance(asked.get(name), bool) for name in flags):
        raise Refused("public and samples must be true or false.", 400)
    how = {name: asked[name] for name in ("repository", "licence", *flags)}
    check_names(how["repository"], how["licence"])
    if not is_installed("huggingface_hub"):
        raise Refused(say("The package {0} is not installed; install it with ComfyUI's Python.", "huggingface_hub"))
    path, step = find_run(asked["run"]), step_of(asked.get("step"))
    run, chosen = opened(path), outward.read()
    checkpoint = save_to_export(run, step)
    outward.publish_behind(path.name, lambda: publish_at_hub(run, checkpoint, chosen, **how))
    return server.json_answer({"said": say("{0} is being published; a message tells of the end.", how["repository"])})
