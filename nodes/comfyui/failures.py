"""Remember what went wrong at our nodes, and tell every open page of it: it stands on the node that failed."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import comfy.model_management
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...trainer_core.common.wording import for_page
from .progress import LONGEST_ID

EVENT = "atelier.failed"
MOST = 1000  # failures that are remembered, the newest
_failed: dict[tuple[str, str], str] = {}  # by the ids of workflow and node; until the workflow is queued again


def follow_prompts() -> None:
    """Forget what went wrong in a workflow when it is queued again; only while ComfyUI starts."""
    PromptServer.instance.add_on_prompt_handler(_queued)


def of_workflow(workflow: str) -> dict[str, str]:
    """Return what went wrong in a workflow, by the node's id in the prompt."""
    return {node: sentence for (of, node), sentence in list(_failed.items()) if of == workflow}


class Noticed:
    """Remember the exception that leaves a `with` block as the failure of the node at work; a Cancel is none."""

    def __enter__(self) -> Noticed:
        context = get_executing_context()
        self._node = context.node_id if context else ""
        self._workflow = _workflow_of(context.prompt_id) if context else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._workflow:  # a script's, which no page shows
            return
        key = (self._workflow, self._node)
        if problem is None or isinstance(problem, comfy.model_management.InterruptProcessingException):
            if _failed.pop(key, None) is not None:
                _tell(self._workflow)
            return
        _failed[key] = str(problem) or type(problem).__name__
        for oldest in list(_failed)[:-MOST]:
            del _failed[oldest]
        _tell(self._workflow)


def _tell(workflow: str) -> None:
    """Tell every open page what is wrong in a workflow now."""
    PromptServer.instance.send_sync(EVENT, for_page({"workflow": workflow, "failed": of_workflow(workflow)}))


def _queued(prompt: dict[str, Any]) -> dict[str, Any]:
    workflow = _id_of(prompt.get("extra_data"))
    if found := of_workflow(workflow):
        for node in found:
            _failed.pop((workflow, node), None)
        _tell(workflow)
    return prompt


def _workflow_of(prompt: str) -> str:
    """Find the id of the workflow of a prompt at work; "" where its sender gave none."""
    for _, own, _, extra, *_ in list(PromptServer.instance.prompt_queue.currently_running.values()):
        if own == prompt:
            return _id_of(extra)
    return ""


def _id_of(extra: Any) -> str:
    """Read a workflow's id from what a stranger may have sent beside a prompt."""
    for name in ("extra_pnginfo", "workflow", "id"):
        extra = extra.get(name) if isinstance(extra, dict) else None
    return extra if isinstance(extra, str) and len(extra) <= LONGEST_ID else ""
