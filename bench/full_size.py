"""Prove the whole way of full-size checkpoints on the CPU: load, train one step, save, load in ComfyUI.

`train` runs trainer_core, `load` ComfyUI's own loaders on the saved file; each in a separate process, whose highest
resident memory is reported. Pages of the checkpoint that are mapped into memory count as well.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 24_000  # MB of memory that a person may have
COMPLAINTS = ("not loaded", "missing", "unexpected", "left over", "mismatch")  # parts of ComfyUI's log lines


@dataclass(frozen=True, kw_only=True)
class Size:
    """The training of a full-size model: no larger than the proof needs."""

    precision: str
    resolution: int  # pixels


SIZES = {
    "sd15": Size(precision="float32", resolution=256),
    "sd2": Size(precision="float32", resolution=256),
    # Processors without bfloat16 instructions take a minute for what takes a second in float32.
    "sdxl": Size(precision="bfloat16", resolution=128),
    "toy-sdxl": Size(precision="bfloat16", resolution=64),
    "tiny": Size(precision="float32", resolution=64),
}


def train_one_step(name: str, output: Path) -> dict[str, Any]:
    """Train UNet and text encoders for one step and save the LoRA; return seconds, peak memory in MB and layers."""
    import torch

    from lora_atelier.bench.bases import ready, tokenizer
    from lora_atelier.bench.loop import write_pictures
    from lora_atelier.bench.measure import read_peak
    from lora_atelier.trainer_core.config import (
        BaseModelConfig,
        ConceptConfig,
        DatasetConfig,
        LoraConfig,
        OptimizerConfig,
        RunConfig,
        TrainConfig,
    )
    from lora_atelier.trainer_core.train import train_lora

    size, path, began = SIZES[name], ready(name), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        pictures = write_pictures(Path(folder), size.resolution, 2)
        config = RunConfig(
            base_model=BaseModelConfig(path=str(path), tokenizer=tokenizer(), precision=size.precision),  # type: ignore[arg-type]
            dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(pictures)),)),
            lora=LoraConfig(rank=4, alpha=4, preset="full"),
            optimizer=OptimizerConfig(text_encoder_learning_rate=1e-4, text_encoder_2_learning_rate=1e-4),
            train=TrainConfig(steps=1, resolution=size.resolution),
        )
        result = train_lora(config, output, Path(folder) / "cache", "cpu")
    layers = Counter(key.split("_", 2)[1] for key in result.tensors if key.endswith("lora_up.weight"))
    moved = sum(bool(t.any()) for key, t in result.tensors.items() if key.endswith("lora_up.weight"))
    return {
        "seconds": time.perf_counter() - began,
        "peak": read_peak(torch.device("cpu")),
        "loss": result.losses[0],
        "layers": dict(sorted(layers.items(), key=lambda part: (part[0] != "unet", part[0]))),
        "moved": moved,
        "megabytes": output.stat().st_size / 1e6,
        "precision": size.precision,
        "resolution": size.resolution,
    }


def load_in_comfyui(checkpoint: Path, lora_file: Path) -> dict[str, Any]:
    """Load checkpoint and LoRA as ComfyUI's nodes do; return peak memory in MB, patched layers and warnings."""
    import comfy.sd
    import comfy.utils
    import torch

    from lora_atelier.bench.measure import read_peak
    from lora_atelier.bench.stock import register_tiny

    register_tiny()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    began = time.perf_counter()
    with torch.inference_mode():  # as ComfyUI's executor
        model, clip = comfy.sd.load_checkpoint_guess_config(str(checkpoint), output_vae=False)[:2]
        lora = comfy.utils.load_torch_file(str(lora_file), safe_load=True)
        before = len(lines)
        patched, patched_clip = comfy.sd.load_lora_for_models(model, clip, lora, 1.0, 1.0)
    return {
        "seconds": time.perf_counter() - began,
        "peak": read_peak(torch.device("cpu")),
        "unet": len(patched.patches),
        "text": len(patched_clip.patcher.patches),
        "checkpoint_log": [line for line in lines[:before] if any(word in line.lower() for word in COMPLAINTS)],
        "lora_log": lines[before:],
    }


def render(results: dict[str, dict[str, Any]]) -> str:
    """Write the table of full-size models as Markdown."""
    lines = [
        "### Full-size models from load to ComfyUI, CPU",
        "",
        "A checkpoint of random weights at full size: one training step of rank 4 on every layer of the UNet and of "
        "the text encoders, the LoRA saved, then checkpoint and LoRA through ComfyUI's own loaders in another process. "
        "Memory is the highest resident size of each process, mapped pages of the checkpoint included.",
        "",
        "| | trained in | pixels | layers trained | layers ComfyUI patched | keys not loaded | peak, training | "
        f"peak, ComfyUI | under {LIMIT / 1000:.0f} GB | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        train, load = result["train"], result["load"]
        layers = " + ".join(f"{count} {kind}" for kind, count in train["layers"].items())
        peak = max(train["peak"], load["peak"])
        lines.append(
            f"| {name} | {train['precision']} | {train['resolution']} | {layers} | {load['unet']} + {load['text']} | "
            f"{len(load['lora_log'])} | {train['peak']:,.0f} MB | {load['peak']:,.0f} MB | "
            f"{'met' if peak < LIMIT else '**missed**'} | {result['stamp']}, `{result['command']}` |"
        )
    return "\n".join(lines) + "\n"


def check(name: str, result: dict[str, dict[str, Any]]) -> None:
    """Raise RuntimeError when a LoRA was not trained or not loaded whole."""
    train, load = result["train"], result["load"]
    count = sum(train["layers"].values())
    if load["lora_log"] or load["unet"] + load["text"] != count:
        patched = f"{load['unet']} + {load['text']} of {count} layers"
        raise RuntimeError(f"{name}: ComfyUI patches {patched} and logs {load['lora_log']}.")
    if train["moved"] != count:
        raise RuntimeError(f"{name}: one step has changed {train['moved']} of {count} layers.")


def main() -> None:
    """Run `train` or `load` for one model and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "load"])
    parser.add_argument("--model", required=True, choices=SIZES)
    parser.add_argument("--lora", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    if options.what == "train":
        result = train_one_step(options.model, options.lora)
    else:
        from lora_atelier.bench.cases import BASES

        # ComfyUI reads the command line when it is imported, and `import nodes` must find its own.
        sys.argv, sys.path[0] = [sys.argv[0], "--cpu"], os.environ["COMFYUI_PATH"]
        import comfy.options

        comfy.options.enable_args_parsing()
        result = load_in_comfyui(BASES[options.model].path, options.lora)
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
