"""Write the GPU suite as Markdown: speed, share of the card's peak, memory against speed, goals. Needs only Python."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from lora_atelier.bench import large
from lora_atelier.bench.cases import GPU, GPU_DRY
from lora_atelier.bench.report import (
    TITLES,
    Ratio,
    build_ratio,
    memory,
    pairs,
    ratios_head,
    seconds,
    stock_notes,
    verdict,
)

# Dense bfloat16 operations per second with float32 sums, from the makers' data sheets; (part of the name, 1e12/s).
# The first that fits counts, so the longer name stands first.
PEAKS = (
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX A6000", 154.8),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    ("RTX 4090", 165.2),
    ("RTX 5090", 209.5),
)
GOAL_PEAK, GOAL_FROZEN, GOAL_PEFT, GOAL_ESTIMATE = 0.45, 0.95, 1.3, 0.1
GOAL_MEGABYTES = {"sd15-512-1-gpu": 2_000, "sdxl-1024-1-gpu": 4_500}
GOAL_CASE = "sdxl-1024-4-gpu"
NOT_YET = "its turn has not come"


def listed_peak(device: str) -> float | None:
    """Look up the maker's bfloat16 operations per second of a card; None for a card not in the table."""
    return next((peak * 1e12 for name, peak in PEAKS if name in device), None)


def render(data: dict[str, Any], suite: dict[str, Any]) -> str:
    """Write a suite's measurements so far as one block of the page."""
    if "device" not in suite:
        return "### One card\n\nNothing has been measured yet: the device itself was left out.\n"
    device = suite["device"]
    machine, stated = device["machine"], listed_peak(device["machine"]["device"])
    size = f", {device['megabytes'] / 1000:,.0f} GB" if device["megabytes"] else ""
    text = "not in the table here" if stated is None else f"{stated / 1e12:,.0f} TFLOP/s by the maker's data sheet"
    lines = [
        f"### One card: {machine['device']}",
        "",
        f"{data['date']}, commit {data['commit']}, {machine['device']}{size}, torch {machine['torch']}, Python "
        f"{machine['python']}. Peak in dense bfloat16: {text}, {device['measured'] / 1e12:,.3g} TFLOP/s measured with "
        f"a large matrix product in the same run. Command: `{data['command']}`.",
        "",
        "Share of the peak: the operations of one frozen forward and backward pass (a LoRA's own not counted), by "
        "seconds per step. Memory is of each contender alone. Tensors: the most that lay in them at once, as the "
        "estimate counts. Reserved: the most that torch took from the card for them, gaps included. On the card: "
        "reserved, and what CUDA itself takes for its context and kernels. A card must hold that last one, so the "
        "goals of memory are judged by it; one with little memory may hold less, as torch then gives gaps back.",
    ]
    for case in (*GPU, *GPU_DRY):
        if case.name in suite:
            lines += ["", *_case(suite[case.name], device["measured"], stated)]
        if f"{case.name}-curve" in suite:
            lines += ["", *_curve(suite[f"{case.name}-curve"])]
    lines += large.render({name: suite[name] for name in large.MODELS if name in suite}, machine["device"])
    lines += ["", "| goal | measured | |", "|---|---|---|", *_goals(suite, stated or device["measured"])]
    return "\n".join(lines) + "\n"


def speeds(result: dict[str, Any], contender: str) -> list[float]:
    """List a contender's seconds per step: from the race, else from its measurement alone."""
    return seconds(result, contender) or result["memory"].get(contender, {}).get("seconds", [])


def _case(result: dict[str, Any], measured: float, stated: float | None) -> list[str]:
    case, described = result["case"], result["described"]
    lines = [
        f"**{described['title']}, {case['resolution']} px, batch {case['batch']}**: {case['dtype']}, rank "
        f"{case['rank']} on {described['layers']} layers (preset {case['preset']}), {described['flops'] / 1e12:.3g} "
        "TFLOP per step.",
        "",
        "| | steps / s | s / step, quartiles | share of stated peak | of measured | tensors | reserved | on the card |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for contender in TITLES:
        timings = speeds(result, contender)
        if not timings:
            continue
        spread = build_ratio("", timings)
        rate = described["flops"] / spread.middle
        used = memory(result, contender) if contender == "stock" else result["memory"].get(contender)
        cells = [TITLES[contender], f"{1 / spread.middle:.3g}", f"{spread.low:.4f} – {spread.high:.4f}"]
        cells += ["" if stated is None else f"{rate / stated:.1%}", f"{rate / measured:.1%}"]
        cells += _memory(used)
        lines.append(f"| {' | '.join(cells)} |")
    ratios = [verdict(ratio, True) for ratio in _ratios(result)]
    if ratios:
        lines += ["", *ratios_head("ratio"), *ratios]
    notes = [*stock_notes(result), *result["left_out"]]
    return [*lines, "", *notes] if notes else lines


def _ratios(result: dict[str, Any]) -> Iterator[Ratio]:
    """Yield the speed of ours relative to others, turn by turn."""
    for contender, other, least in (
        ("ours", "frozen", None),
        ("compiled", "frozen", None),
        ("ours", "peft", None),
        ("compiled", "peft", GOAL_PEFT),
    ):
        if values := pairs(result, other, contender):
            title = "LoRA Atelier" + (", compiled," if contender == "compiled" else "")
            yield build_ratio(f"speed, {title} / {TITLES[other]}", values, least=least)
    if (stock := seconds(result, "stock")) and (ours := seconds(result, "ours")):
        yield build_ratio("speed, LoRA Atelier / TrainLoraNode", [median(stock) / median(ours)])


def _curve(curve: dict[str, dict[str, Any]]) -> list[str]:
    """Write the table of memory against speed, setting by setting."""
    lines = [
        "| settings | tensors | reserved | on the card | steps / s | speed kept | estimated / tensors |",
        "|---|---|---|---|---|---|---|",
    ]
    fastest = min((median(row["seconds"]) for row in curve.values() if "seconds" in row), default=0.0)
    for name, row in curve.items():
        if "left_out" in row:
            lines.append(f"| {name} | | | | | | {row['left_out']} |")
            continue
        middle = median(row["seconds"])
        share = f"{row['estimated'] / row['peak']:.3f}" if row["estimated"] else ""
        cells = [name, *_memory(row), f"{1 / middle:.3g}"]
        lines.append(f"| {' | '.join([*cells, f'{fastest / middle:.0%}', share])} |")
    return lines


def _goals(suite: dict[str, Any], peak: float) -> Iterator[str]:
    """Yield the table row of each goal, measured or not."""
    text, met = "", False
    if result := suite.get(GOAL_CASE):
        shares, kept = [], []
        for contender in ("ours", "compiled"):
            if timings := speeds(result, contender):
                shares.append(result["described"]["flops"] / median(timings) / peak)
            if values := pairs(result, "frozen", contender):
                kept.append(median(values))
        if shares:
            text = f"{max(shares):.1%} of the peak" + (f", {max(kept):.1%} of the frozen pass" if kept else "")
            met = max(shares) >= GOAL_PEAK or max(kept, default=0.0) >= GOAL_FROZEN
    goal = "SDXL 1024 px, batch 4: ≥ 45 % of the peak, or ≥ 95 % of the frozen pass's speed"
    yield _goal(goal, text, met, _why(suite, GOAL_CASE, "The race", "ours"))
    compiled = {n: median(v) for n, r in suite.items() if "described" in r and (v := pairs(r, "peft", "compiled"))}
    name, least = min(compiled.items(), key=lambda item: item[1], default=("", 0.0))
    text = f"{least:.2f}x at the least ({name}; cases measured: {len(compiled)})" if compiled else ""
    why = _why(suite, GOAL_CASE, "The race was", "compiled", "peft")
    yield _goal("compiled: ≥ 1.3x the speed of diffusers + peft", text, least >= GOAL_PEFT, why)
    for case, limit in GOAL_MEGABYTES.items():
        curve = suite.get(f"{case}-curve", {})
        rows = [(name, row) for name, row in curve.items() if "left_out" not in row]
        fitting = [item for item in rows if on_card(item[1]) < limit]
        text = ""
        if rows:
            fastest = min(fitting, key=lambda item: median(item[1]["seconds"]), default=None)
            name, row = fastest or min(rows, key=lambda item: on_card(item[1]))
            text = f"{on_card(row):,.0f} MB on the card ({row['peak']:,.0f} MB of tensors), {name}"
        why = next((row["left_out"] for row in curve.values() if "left_out" in row), NOT_YET)
        yield _goal(f"{case}: < {limit:,} MB on the card (the fastest settings that fit)", text, bool(fitting), why)
    rows = [(f"{case} {n}", r) for case, c in suite.items() if case.endswith("-curve") for n, r in c.items()]
    errors = [(abs(r["estimated"] / r["peak"] - 1), n) for n, r in rows if r.get("estimated") and "peak" in r]
    error, name = max(errors, default=(1.0, ""))
    text = f"{error:.1%} off at the most ({name}; {len(errors)} of {len(rows)} settings)" if errors else ""
    yield _goal("memory estimate within 10 % of the tensors' memory", text, error <= GOAL_ESTIMATE, NOT_YET)


def _why(suite: dict[str, Any], case: str, *beginnings: str) -> str:
    """Find the first reason for a part left out of a case that starts with one of some words."""
    left_out = suite[case]["left_out"] if case in suite else []
    return next((line for line in left_out if line.startswith(beginnings)), NOT_YET)


def _goal(goal: str, text: str, met: bool, why: str) -> str:
    """Write a goal's row; `why` explains a missing measurement."""
    return f"| {goal} | {text} | {'met' if met else '**missed**'} |" if text else f"| {goal} | not measured | {why} |"


def on_card(row: dict[str, Any]) -> float:
    """Compute the MB used on a card, reserved by torch and taken by CUDA itself; on the CPU the process's MB."""
    return row["peak"] if row["reserved"] is None else row["reserved"] + row["overhead"]


def _memory(used: dict[str, Any] | None) -> list[str]:
    """Write the cells tensors, reserved and on the card; the last is unknown for ComfyUI's node."""
    whole = {"held": on_card(used)} if used and used.get("overhead") is not None else {}
    return [_megabytes(used, "peak"), _megabytes(used, "reserved"), _megabytes(whole, "held")]


def _megabytes(used: dict[str, Any] | None, name: str) -> str:
    value = (used or {}).get(name)
    return "" if value is None else f"{value:,.0f} MB"
