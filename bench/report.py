"""Compute ratios of raw measurements and write the tables of docs/benchmarks.md; needs only Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

TITLES = {
    "frozen": "frozen pass (no network)",
    "ours": "**LoRA Atelier**",
    "compiled": "**LoRA Atelier**, compiled",
    "peft": "diffusers + peft",
    "stock": "ComfyUI's TrainLoraNode",
}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio measured several times."""

    name: str
    middle: float  # the median
    low: float  # quartiles; the extremes when there are fewer than four values
    high: float
    count: int
    least: float | None = None  # the target: at least this
    most: float | None = None  # the target: at most this

    @property
    def met(self) -> bool:
        """Tell whether the median is within the target."""
        return (self.least is None or self.middle >= self.least) and (self.most is None or self.middle <= self.most)


def build_ratio(name: str, values: Sequence[float], *, least: float | None = None, most: float | None = None) -> Ratio:
    """Compute median and quartiles of one ratio's values."""
    low, high = min(values), max(values)
    if len(values) >= 4:
        low, _, high = quantiles(values, n=4, method="inclusive")
    return Ratio(name=name, middle=median(values), low=low, high=high, count=len(values), least=least, most=most)


def build_ratios(result: dict[str, Any]) -> list[Ratio]:
    """Compute the ratios pair by pair: of steps in turn, or of rounds for the node in another process."""
    ratios = [
        build_ratio(f"seconds per step, ours / {title}", values, most=most)
        for other, title, most in (("frozen", "frozen pass", 1.03), ("peft", "diffusers + peft", 1.03))
        if (values := pairs(result, "ours", other))
    ]
    stock = [round_ for round_ in result["rounds"] if round_.get("stock")]
    if stock:
        values = pairs(result, "stock", "ours") or [  # apart from the race: round by round
            median(r["stock"]["seconds"]) / median(s["ours"]["seconds"] for s in r["race"]) for r in stock
        ]
        ratios.append(build_ratio("seconds per step, TrainLoraNode / ours", values, least=4))
        if ours := memory(result, "ours"):
            values = [ours["peak"] / r["stock"]["peak"] for r in stock]
            ratios.append(build_ratio("peak memory, ours / TrainLoraNode", values, most=0.4))
    if result["loop"]:
        ratios.append(build_ratio("share of a step that is bookkeeping", bookkeeping(result["loop"]), most=0.02))
    return ratios


def pairs(result: dict[str, Any], upper: str, lower: str) -> list[float]:
    """Compute the ratios of two contenders' seconds, turn by turn."""
    steps = [step for round_ in result["rounds"] for step in round_["race"]]
    return [step[upper]["seconds"] / step[lower]["seconds"] for step in steps if upper in step and lower in step]


def bookkeeping(loop: Sequence[dict[str, float]]) -> list[float]:
    """Compute the share of each step outside forward pass, backward pass and optimizer step."""
    parts = ("forward", "backward", "optimizer")
    return [1 - sum(step[part] for part in parts) / step["seconds"] for step in loop]


def seconds(result: dict[str, Any], contender: str, part: str = "seconds") -> list[float]:
    """Collect all measured seconds of a contender; none of one that was left out."""
    if contender == "stock":
        return [s for r in result["rounds"] if r.get("stock") for s in r["stock"]["seconds"]]
    return [step[contender][part] for r in result["rounds"] for step in r["race"] if contender in step]


def memory(result: dict[str, Any], contender: str) -> dict[str, float]:
    """Find loaded and peak MB of a contender; empty if its measurement failed."""
    if contender == "stock":
        return max((r["stock"] for r in result["rounds"] if r.get("stock")), key=lambda stock: stock["peak"])
    return result["memory"].get(contender, {})


def render(result: dict[str, Any]) -> str:
    """Write one case's results as Markdown: case and machine, absolute numbers, ratios against targets."""
    case, described = result["case"], result["described"]
    machine, title = described["machine"], described["title"]
    lines = [
        f"### {title[0].upper()}{title[1:]}, {machine['device']}",
        "",
        f"{case['resolution']} px, batch {case['batch']}, {case['dtype']}, rank {case['rank']} on all "
        f"{described['layers']} layers of the preset {case['preset']}. {result['date']}, commit {result['commit']}, "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads ({machine['simd']}), "
        f"torch {machine['torch']}, Python {machine['python']}, load average before the start {machine['load']}. "
        f"Command: `{result['command']}`.",
        "",
        "| | s / step | quartiles | forward | backward | update | peak memory | over the loaded model |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(result, contender) for contender in TITLES if seconds(result, contender)]
    lines += ["", *ratios_head("ratio")]
    lines += [verdict(ratio, has_targets(result)) for ratio in build_ratios(result)]
    lines += ["", *_notes(result)]
    return "\n".join(lines).rstrip() + "\n"


def has_targets(result: dict[str, Any]) -> bool:
    """Tell whether a case has targets: only those of full-size models do."""
    return result["case"]["base"] in ("sd15", "sdxl")


def _row(result: dict[str, Any], contender: str) -> str:
    spread, used = build_ratio("", seconds(result, contender)), memory(result, contender)
    parts = ["", "", ""]
    if contender != "stock":
        parts = [f"{median(seconds(result, contender, p)):.3f}" for p in ("forward", "backward", "update")]
    cells = [TITLES[contender], f"{spread.middle:.3f}", f"{spread.low:.3f} – {spread.high:.3f}", *parts]
    cells += [f"{used['peak']:,.0f} MB", f"{used['peak'] - used['loaded']:,.0f} MB"] if used else ["", ""]
    return f"| {' | '.join(cells)} |"


def ratios_head(what: str = "") -> list[str]:
    """Write the head of a table of ratios."""
    return ["| " + f"{what} | median | spread | target | |".lstrip(), "|---|---|---|---|---|"]


def verdict(ratio: Ratio, targets: bool) -> str:
    """Write a ratio as a table's row, with its target where it has one."""
    target, met = "", ""
    if targets and (ratio.most is not None or ratio.least is not None):
        target = f"≤ {ratio.most:g}" if ratio.most is not None else f"≥ {ratio.least:g}"
        met = "met" if ratio.met else "**missed**"
    spread = f"{ratio.low:.3f} – {ratio.high:.3f}, n = {ratio.count}"
    return f"| {ratio.name} | {ratio.middle:.3f} | {spread} | {target} | {met} |"


def stock_notes(result: dict[str, Any]) -> list[str]:
    """Describe the dtype and the tensors of ComfyUI's node; empty if it was left out."""
    stock = next((r["stock"] for r in result["rounds"] if r.get("stock")), None)
    if stock is None:
        return []
    return [
        f"TrainLoraNode computed in {', '.join(stock['compute_dtype'])} and trained {stock['tensors']} tensors, "
        f"{stock['adapters']} LoRA layers among them; norms, biases and every alpha are trained as well."
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    notes = [*stock_notes(result), *result["left_out"]]
    if not has_targets(result):
        notes.append("The targets are set for the full-size model; this table shows how the parts compare when small.")
    machine = result["described"]["machine"]
    if machine["load"] > 0.5 * machine["cores"]:
        notes.append("**The machine was busy with other work, so these numbers are noisy.**")
    return notes


def render_data(result: dict[str, Any], command: str, stamp: str) -> str:
    """Write the measurements of `bench.data` as Markdown: scanning by size, encoding against the bare autoencoder."""
    encode = result["encode"]
    machine, ratios = encode["machine"], [row["ours"] / row["bare"] for row in encode["rows"]]
    lines = [
        f"### Scanning and encoding pictures, {machine['device']}",
        "",
        f"Pictures of 768 x 512 pixels, JPEG, each with a caption file. {stamp}, {machine['cpu']}, {machine['cores']} "
        f"cores, Python {machine['python']}. Command: `{command}`.",
        "",
        "| pictures | first scan | second scan | per 1000 | third | fingerprint on every queue | memory, second scan |",
        "|---|---|---|---|---|---|---|",
    ]
    bare, ours = (median([row[kind] for row in encode["rows"]]) for kind in ("bare", "ours"))
    longest = max(second["seconds"] for _, second, _ in result["scans"])
    for first, second, third in result["scans"]:
        bar = "█" * max(1, round(20 * second["seconds"] / longest))
        lines.append(
            f"| {second['pictures']:,} | {first['seconds']:.2f} s | {second['seconds']:.2f} s {bar} | "
            f"{second['seconds'] / second['pictures'] * 1e3:.3f} s | {third['seconds']:.2f} s | "
            f"{third['fingerprint']:.2f} s | {second['megabytes']:.0f} MB |"
        )
    ratio = build_ratio("seconds per picture, encoding through the store / bare autoencoder", ratios, most=1.02)
    lines += [
        "",
        "The second scan runs in a new process: it lists the folder, compares sizes and times with the index and reads "
        "only the captions.",
        "",
        f"Encoding {encode['pictures']} pictures at {encode['resolution']} px in float32 with the autoencoder of "
        f"{encode['title']}: bare {bare:.3f} s, with decoding, cutting and the store {ours:.3f} s per picture.",
        "",
        *ratios_head("ratio"),
        verdict(ratio, True),
    ]
    return "\n".join(lines) + "\n"


def write_block(page: Path, name: str, text: str) -> None:
    """Replace the block of this name in a Markdown page, or append it."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    block = f"{start}\n{text.rstrip()}\n{end}"
    old = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    new = pattern.sub(lambda _: block, old) if pattern.search(old) else f"{old.rstrip()}\n\n{block}\n"
    page.write_text(new, encoding="utf-8")
