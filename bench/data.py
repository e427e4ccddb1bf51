"""Measure scanning by the number of pictures, and encoding against the bare autoencoder.

`scan` reads a folder of JPEG pictures and captions; a second process then uses the index of the first.
`encode` runs an autoencoder over pictures, bare and through the cache, in turn.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lora_atelier.bench.bases import ready, tokenizer
from lora_atelier.bench.cases import BASES
from lora_atelier.bench.measure import describe_machine, now, read_peak, start_peak
from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data.cache import Cache
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Index, fingerprint, scan
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.training.encode import encode_plan
from lora_atelier.trainer_core.training.pixels import pixels

SIZE = (768, 512)  # pixels of the pictures
CPU = torch.device("cpu")


def write_pictures(folder: Path, count: int) -> Path:
    """Write JPEG pictures of one seeded noise, different by a comment in the file, each with a caption."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8)
    data, mark = io.BytesIO(), "0" * 8
    Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC).save(data, "JPEG", comment=mark.encode())
    for i in range(count):
        (folder / f"{i:06}.jpg").write_bytes(data.getvalue().replace(mark.encode(), f"{i:08}".encode(), 1))
        (folder / f"{i:06}.txt").write_text(f"a thing, number {i}", encoding="utf-8")
    return folder


def measure_scan(folder: Path, index: Path) -> dict[str, float]:
    """Time a scan with an index; return seconds, the fingerprint's seconds, pictures, and MB over the start."""
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    before = start_peak(CPU)
    began = time.perf_counter()
    with Index(index) as known:
        manifest = scan(dataset, known)
    scanned = time.perf_counter()
    with Index(index) as known:
        fingerprint(dataset, known)
    return {
        "seconds": scanned - began,
        "fingerprint": time.perf_counter() - scanned,
        "pictures": len(manifest.pictures),
        "megabytes": read_peak(CPU) - before,
    }


def measure_encoding(model: str, device: torch.device, count: int, resolution: int) -> dict[str, Any]:
    """Time the encoding of pictures, bare and through the cache, in turn; return seconds of each per picture."""
    base = load_base_model(BaseModelConfig(path=str(ready(model)), tokenizer=tokenizer()))
    base.free("text", "denoiser")
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as name:
        folder = write_pictures(Path(name) / "pictures", count)
        dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
        train = TrainConfig(epochs=1, resolution=resolution)
        plan = build_plan(scan(dataset), dataset, train)
        tensors = [
            pixels(cut(load_picture(plan.manifest.pictures[i].path), crop))[None]
            for i in plan.trained
            for crop in plan.first_crops(i)
        ]
        for turn in range(4):  # the first is a warm-up
            base.autoencoder.module.to(device)
            began = now(device)
            with torch.no_grad():
                for batch in tensors:
                    mean, std = base.autoencoder.encode(base.autoencoder.module, batch.to(device))
                    mean.cpu(), std.cpu()
            bare = now(device) - began
            base.autoencoder.module.to("cpu")
            began = now(device)
            with Cache(Path(name) / f"store-{turn}") as cache:
                encode_plan(base, plan, cache, device, Callbacks(), prompts=None)
            rows.append({"bare": bare / count, "ours": (now(device) - began) / count})
    about = {"title": BASES[model].title, "resolution": resolution, "pictures": count}
    return {"rows": rows[1:], "machine": describe_machine(device), **about}


def main() -> None:
    """Measure a scan or the encoding, as the command line asks, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "scan", "encode"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--model", default="sd15")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "write":
        result: Any = str(write_pictures(options.folder / "pictures", options.count))
    elif options.what == "scan":
        result = measure_scan(options.folder / "pictures", options.folder / "index")
    else:
        result = measure_encoding(options.model, torch.device(options.device), options.count, options.resolution)
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
