"""The table of our nodes' inputs that workflows are read by without a server: made of the snapshot of their schemas."""

from typing import Any

from lora_atelier.dev import DYNAMIC_COMBO
from lora_atelier.trainer_core.workflow.settings import READERS

SUFFIX = " (Atelier)"


def table(snapshot: dict) -> dict:
    """Make the table of the nodes that are read."""
    return {kind: described(snapshot[kind]) for kind in sorted([*READERS, "AtelierTrain"])}


def described(schema: dict) -> dict:
    """Describe a node: its title, inputs and outputs."""
    outputs = [list(each) for each in zip(schema["output_name"], schema["output"], strict=True)]
    inputs = rows(schema["input"], schema["input_order"])
    return {"title": schema["display_name"].removesuffix(SUFFIX), "inputs": inputs, "outputs": outputs}


def rows(groups: dict, order: dict) -> list[dict]:
    """List inputs in the order of their widgets."""
    found = []
    for group in ("required", "optional"):
        specs = groups.get(group) or {}
        for name in order.get(group) or specs:
            kind, options = specs[name][0], specs[name][1] if len(specs[name]) > 1 else {}
            row: dict[str, Any] = {"name": name, "kind": kind}
            if kind == DYNAMIC_COMBO:
                row["options"] = {each["key"]: rows(each["inputs"], {}) for each in options["options"]}
                row["default"] = next(iter(row["options"]))
            if "default" in options:
                row["default"] = options["default"]
            if group == "optional":
                row["optional"] = True
            if options.get("control_after_generate") or name in ("seed", "noise_seed"):
                row["controlled"] = True
            found.append(row)
    return found
