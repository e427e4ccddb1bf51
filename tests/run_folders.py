"""Run folders made by hand, with files of a few bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.common.tensor_tree import save_state
from lora_atelier.trainer_core.runs import Keys, RunFolder
from lora_atelier.trainer_core.runs.folder import new_run

PLACE = "/home/somebody/models/checkpoints"
METADATA = {"ss_output_name": "x", "modelspec.title": "x"}
LORA = {"lora_unet_a.lora_up.weight": torch.ones(4, 1), "lora_unet_a.lora_down.weight": torch.full((1, 4), 0.5)}
WORD = {"emb_params": torch.ones(2, 3)}


def make_run(
    runs: Path,
    name: str,
    key: str = "a",
    *,
    saves: Iterable[int] = (),
    logged: int = 0,
    finished: int | None = None,
    steps: int = 8,
    **about: Any,
) -> RunFolder:
    """Make a run with saves after some steps, a log of others, and a result if it is finished; step 2's save stays."""
    about = {"config": {"base_model": {"path": f"{PLACE}/base.safetensors"}}, "pictures": 3, **about}
    run = new_run(runs, Keys(run=key * 64, course=key * 64), name, steps, **about)
    for step in range(1, logged + 1):
        run.log("step", step=step, loss=1 / step, lr={"lora_unet": 1e-4})
    for step in saves:

        def write(folder: Path, step: int = step) -> None:
            for file, size in (("weights", 40), ("optimizer", 1000)):
                (folder / f"{file}.safetensors").write_bytes(bytes([step]) * size)
            losses = torch.tensor([10.0 * number for number in range(1, step + 1)], dtype=torch.float64)
            save_state(folder / "history.safetensors", {"losses": losses, "validation": [(0, 2.0), (step, 1.5)]})
            of_run = {"atelier.run": key * 64}
            save_file({n: t * step for n, t in LORA.items()}, folder / "lora.safetensors", METADATA | of_run)
            (folder / "words").mkdir()
            save_file(WORD, folder / "words" / "lora-moss.safetensors", {"modelspec.title": "x"} | of_run)
            words = {"moss": "words/lora-moss.safetensors"}
            write_json(folder / "files.json", {"files": [{"path": "lora.safetensors", "words": words, "steps": step}]})

        run.save(step, write, stays=step == 2)
    if finished is not None:
        run.finish({"step": finished, "samples": {}})
    return run
