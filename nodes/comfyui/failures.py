"""Remember the failures of our nodes, and tell every open page: the page shows each on the node that failed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import comfy.model_management
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...insides import missing_in_comfyui
from ...trainer_core.common.wording import for_page
from .shown import OF_A_PROMPT, id_in, shows_the_run_before

EVENT = "atelier.failed"
MOST, LONGEST = 1000, 2000  # failures that are remembered, the newest; characters of each
INTERRUPTED = comfy.model_management.InterruptProcessingException


class Failure(NamedTuple):
    """What went wrong at a node."""

    sentence: str
    early: bool  # at a Train LoRA whose run had not begun, or before it


_failed: dict[tuple[str, str], Failure] = {}  # by the ids of workflow and node; until the workflow is queued again


def follow_prompts() -> None:
    """Forget the failures of a workflow when a page queues it again; only while ComfyUI starts."""
    PromptServer.instance.add_on_prompt_handler(_queued)


def of_workflow(workflow: str) -> dict[str, Any]:
    """Return the sentence of each failed node of a workflow, by its id, and which were early."""
    found = {node: failure for (of, node), failure in list(_failed.items()) if of == workflow}
    early = [node for node, failure in found.items() if failure.early]
    return {"failed": {node: failure.sentence for node, failure in found.items()}, "early": early}


def forget(workflow: str, nodes: Iterable[str]) -> None:
    """Forget the failures of nodes that are mended, or whose run was taken up again, as in a shell."""
    if any([_failed.pop((workflow, node), None) is not None for node in nodes]):
        _tell(workflow)


class Noticed:
    """Remember the exception that leaves a `with` block as the failure of the node at work; a Cancel is none."""

    def __enter__(self) -> Noticed:
        context = get_executing_context()
        self._node = context.node_id if context else ""
        self._prompt = context.prompt_id if context else ""
        self._workflow = _workflow_of(self._prompt) if context else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        missing = missing_in_comfyui(problem) if problem else ""
        if self._workflow:  # else a script's, which no page shows
            # Neither a Cancel nor the end of ComfyUI is a failure.
            failed = isinstance(problem, Exception) and not isinstance(problem, INTERRUPTED)
            self._remember((missing or str(problem) or type(problem).__name__)[:LONGEST] if failed else "")
        if missing:
            raise RuntimeError(missing) from problem

    def _remember(self, sentence: str) -> None:
        """Show a failure in every open page; "" for none."""
        if not sentence:
            forget(self._workflow, [self._node])
            return
        _failed[self._workflow, self._node] = Failure(sentence, shows_the_run_before(self._prompt, self._node))
        for oldest in list(_failed)[:-MOST]:
            del _failed[oldest]
        _tell(self._workflow)


def _tell(workflow: str) -> None:
    """Send every open page the failures of a workflow."""
    event = for_page({"workflow": workflow, **of_workflow(workflow)})
    with suppress(RuntimeError):  # ComfyUI ends, and serves no page any more
        PromptServer.instance.send_sync(EVENT, event)


def _queued(prompt: dict[str, Any]) -> dict[str, Any]:
    workflow = id_in(prompt, *OF_A_PROMPT)
    forget(workflow, of_workflow(workflow)["failed"])
    return prompt


def _workflow_of(prompt: str) -> str:
    """Find the id of the workflow of a prompt at work; "" where its sender gave none."""
    for _, own, _, extra, *_ in list(PromptServer.instance.prompt_queue.currently_running.values()):
        if own == prompt:
            return id_in(extra, *OF_A_PROMPT[1:])
    return ""
