"""Race linked models against ComfyUI's own node, and compare gradients; called by `dev.py bench --connected`.

Every side works in a process of its own. Ours takes turns with one other side at a time, step by step: a process that
waits for long has its memory reclaimed, and would pay for that. Sides: see `connected_sides.py`.
"""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from lora_atelier.bench.report import build_ratio, ratios_head, verdict
from lora_atelier.bench.results import Child

MODELS = ("flux", "wan")
SIDES = {
    "frozen": "frozen pass (no network)",
    "ours": "**LoRA Atelier**",
    "ours, full": "LoRA Atelier, checkpointing full",
    "ours, float8": "LoRA Atelier, weights in float8",
    "stock": "ComfyUI's TrainLoraNode as it ships",
    "stock, plain": "the same without checkpointing",
}
OURS = "ours"
PATIENCE = 600.0  # seconds for a step


class Goal(NamedTuple):
    """A ratio of two sides, and its goal."""

    title: str
    what: str
    sides: tuple[str, str]
    limit: dict[str, float]


GOALS = (
    Goal("seconds per step, ours / frozen pass", "seconds", ("ours", "frozen"), {"most": 1.1}),
    Goal("seconds per step, TrainLoraNode / ours", "seconds", ("stock", "ours"), {"least": 2.5}),
    Goal("seconds per step, without checkpointing / ours", "seconds", ("stock, plain", "ours"), {"least": 1.8}),
    Goal("seconds per step, ours with full checkpointing / ours", "seconds", ("ours, full", "ours"), {}),
    Goal("peak memory, ours / TrainLoraNode", "peak", ("ours", "stock"), {"most": 0.5}),
    Goal("peak memory, ours / without checkpointing", "peak", ("ours", "stock, plain"), {"most": 0.5}),
)


def race(model: str, rounds: int, *, toy: bool) -> dict[str, Any]:
    """Let our side take turns with each other one; return the reports of both by the other, on each step but the first.

    `steps`: other side -> rounds, each side -> report.
    """
    parts = {side: {"what": "connected", "model": model, "side": side, "toy": toy} for side in SIDES}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES if side != OURS}
    ours = Child(parts[OURS])
    try:
        for side, steps in found.items():
            other = Child(parts[side])
            try:
                for turn in range(rounds + 1):
                    pair = ((OURS, ours), (side, other))
                    told = {
                        name: child.measure(parts[name], PATIENCE) for name, child in pair[:: 1 if turn % 2 else -1]
                    }
                    steps += [told] if turn else []
            finally:
                other.end()
            print(f"{model}, {side}", flush=True)
    finally:
        ours.end()
    return {"steps": found, "about": next(iter(found.values()))[0][OURS]["about"]}


def render(results: dict[str, dict[str, Any]], errors: dict[str, Any], command: str, stamp: str) -> str:
    """Write the page's block: a table of each race, and one of the errors of gradients."""
    machine = next(iter(results.values()))["about"]["machine"]
    lines = [
        "### Linked models against ComfyUI's own node, CPU",
        "",
        f"Random weights, float32, batch 1, rank 8 on every layer. {stamp}, {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}. "
        f"Load average before the start {machine['load']}. Command: `{command}`.",
    ]
    for result in results.values():
        lines += ["", *race_lines(result)]
    return "\n".join([*lines, "", *_error_lines(errors)]) + "\n"


def race_lines(result: dict[str, Any]) -> list[str]:
    """Write the tables of a race: seconds and memory of each side, and the ratios."""
    steps, about = result["steps"], result["about"]
    lines = [
        f"**{about['title']}**, {about['parameters'] / 1e6:.0f} M parameters, {about['pixels']} px:",
        "",
        "| | s / step | lowest – highest | peak memory | over the loaded model |",
        "|---|---|---|---|---|",
    ]
    for side, title in SIDES.items():
        told = [pair[side] for pairs in steps.values() for pair in pairs if side in pair]
        seconds = [step["seconds"] for step in told]
        peak = max(step["peak"] for step in told)
        spread = f"{min(seconds):.3f} – {max(seconds):.3f}"
        lines.append(
            f"| {title} | {median(seconds):.3f} | {spread} | {peak:,.0f} MB | {peak - told[0]['loaded']:,.0f} MB |"
        )
    lines += ["", *ratios_head("ratio")]
    for goal in GOALS:
        one, other = goal.sides
        pairs = steps[one if other == OURS else other]
        ratio = build_ratio(goal.title, [pair[one][goal.what] / pair[other][goal.what] for pair in pairs], **goal.limit)
        lines.append(verdict(ratio, targets=True))
    return lines


def _error_lines(errors: dict[str, Any]) -> list[str]:
    """Write the table of errors of gradients."""
    ways = [way for way in next(iter(errors.values())) if way != "slope"]
    lines = [
        "Relative error of the whole gradient, tiny models in float32, against the same pass with nothing recomputed "
        "and every tensor copied before it is written into; in brackets that pass against central differences. "
        "TrainLoraNode recomputes the whole model (depth 1, as it ships) or its parts (depth 2):",
        "",
        "| | " + " | ".join(ways) + " |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for name, row in errors.items():
        lines.append(f"| {name} (node {row['slope'][0]:.1e}, ours {row['slope'][1]:.1e}) | ")
        lines[-1] += " | ".join(_share(row[way]) for way in ways) + " |"
    return lines


def _share(error: float | str) -> str:
    if isinstance(error, str):
        return error
    return f"{error:.1%}" if error >= 0.0005 else f"{error:.0e}"
