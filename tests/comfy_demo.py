"""Run a workflow in a headless server and show its progress on one line (for `dev.py demo`).

python tests/comfy_demo.py WORKFLOW [--cpu]
"""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

from prompts import to_prompt

from comfy_client import ComfyClient, ComfyServer, Result
from lora_atelier.dev import BASE, comfyui_folder


class ProgressLine:
    """One line of the terminal, rewritten as events come in."""

    def __init__(self, prompt: dict) -> None:
        self.prompt = prompt
        self.node, self.done, self.of, self.text = "", 0, 0, ""
        self.live = sys.stdout.isatty()
        self.shown = ""

    def __call__(self, kind: str, data: dict, result: Result) -> None:
        """Take one event."""
        if kind == "executing" and data["node"] is not None and data["node"] != self.node:
            self.node, self.done, self.of, self.text = data["node"], 0, 0, ""
        elif kind == "progress":
            self.done, self.of = data["value"], data["max"]
        elif kind == "text":
            self.text = data["text"].strip().splitlines()[0] if data["text"].strip() else ""
        elif kind not in ("execution_success", "execution_error", "execution_interrupted"):
            return
        self.draw(len(result.ran) + len(result.cached))

    def draw(self, reached: int) -> None:
        """Rewrite the line; where the output is no terminal, print a line per node instead."""
        title = self.prompt.get(self.node, {}).get("_meta", {}).get("title", self.node)
        head = f"[{min(reached, len(self.prompt))}/{len(self.prompt)}] {title}"
        if not self.live:
            if head != self.shown:
                print(head, flush=True)
            self.shown = head
            return
        steps = f"  {self.done}/{self.of}" if self.of else ""
        line = f"{head}{steps}  {self.text}"[: shutil.get_terminal_size().columns - 1]
        print("\r" + line.ljust(len(self.shown)), end="", flush=True)
        self.shown = line

    def close(self) -> None:
        """Leave the line as it stands."""
        if self.live and self.shown:
            print()


def results(prompt: dict, result: Result) -> list[str]:
    """Name what each node left: the text it shows, and the files it saved."""
    lines = []
    for node, output in result.outputs.items():
        title = prompt[node]["_meta"]["title"]
        lines += [f"  {title}: {text}" for text in output.get("text", [])]
        for image in output.get("images", []):
            if image["type"] == "output":
                lines.append(f"  {title}: {BASE / 'output' / image['subfolder'] / image['filename']}")
    return lines


def forgotten(queue: Path, before: set[Path], patience: float = 5.0) -> None:
    """Wait until the server has seen that the prompt left its queue, or it would be offered again when it starts."""
    until = time.monotonic() + patience
    while {*queue.glob("*.json")} - before and time.monotonic() < until:
        time.sleep(0.05)


def main() -> int:
    """Serve, queue the workflow, report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    print("Starting ComfyUI ...", flush=True)
    queue = BASE / "user" / "__atelier" / "queue"
    before = {*queue.glob("*.json")}
    with ComfyServer(comfyui_folder(), BASE, cpu="--cpu" in sys.argv) as server:
        client = ComfyClient(server.url)
        workflow = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        prompt = to_prompt(workflow, client.object_info())
        line = ProgressLine(prompt)
        result = client.queue(prompt, on_event=line)
        line.close()
        forgotten(queue, before)
    if not result.ok:
        print(f"The demo failed: {result.error or result.status}", file=sys.stderr)
        return 1
    print(f"Done in {time.monotonic() - started:.0f} s.", *results(prompt, result), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
