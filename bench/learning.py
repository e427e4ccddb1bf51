"""Measure what settings do for learning the example concept on the tiny base; called by `dev.py bench --learning`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lora_atelier.bench.cases import CACHE, ROOT
from lora_atelier.trainer_core.common.wording import count
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    BeneathConfig,
    ConceptConfig,
    ConnectedConfig,
    DatasetConfig,
    ObjectiveConfig,
    RunConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data.fit import SURE
from lora_atelier.trainer_core.runs import PICTURES, open_run

STEPS, RANK, RATE = 250, 16, 3e-3
GROUNDS = ("blue", "green", "red", "yellow", "white", "orange")  # the example pictures' but for orange
PLAIN = (("square", "red", "blue"), ("heart", "pink", "green"), ("star", "blue", "white"),
         ("triangle", "green", "yellow"), ("ring", "white", "red"), ("cross", "black", "orange"))  # fmt: skip
# The figure that is most like the mossling.
CIRCLES = (("circle", "red", "blue"), ("circle", "pink", "green"), ("circle", "blue", "white"),
           ("circle", "green", "yellow"), ("circle", "white", "red"), ("circle", "black", "orange"))  # fmt: skip
CONSTANT = {"name": "constant"}
MEASURED = {"validate_every": 20, "validation_share": 0.2}
SMALL = {"resolution": 64, "batch_size": 2, "steps": 200, **MEASURED}
# What is changed against AdamW at RATE with min_snr_gamma 5, by part of the configuration.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon", "options": {}}},
    **{f"adamw, rate {rate}": {"optimizer": {"learning_rate": float(rate)}} for rate in ("1e-2", "3e-4", "3e-5")},
    "muon, rate 1e-2": {"optimizer": {"name": "muon", "options": {}, "learning_rate": 1e-2}},
    "every timestep weighs the same": {"objective": {"min_snr_gamma": 0.0}},
    "mode": {"objective": {"timestep_distribution": "mode"}},
    "cos_map": {"objective": {"timestep_distribution": "cos_map"}},
    "inverted_parabola": {"objective": {"timestep_distribution": "inverted_parabola"}},
    "logit_normal": {"objective": {"timestep_distribution": "logit_normal"}},
    "uncertainty_rate 0.01": {"objective": {"min_snr_gamma": 0.0, "uncertainty_rate": 0.01}},
    "modulations at rank 4": {"lora": {"kind_ranks": ("modulation=4",)}},
    "attention 24, other layers 8": {"lora": {"kind_ranks": ("attention=24", "mlp=8", "convolution=8", "other=8")}},
    **{
        f"lokr, whole, factor {factor}": {"lora": {"algorithm": "lokr", "full_matrix": True, "factor": factor}}
        for factor in (4, 8, 16)
    },
    "soap": {"optimizer": {"name": "soap", "options": {}}},
    "automagic": {"optimizer": {"name": "automagic", "options": {}}, "scheduler": CONSTANT},
    "automagic, rate 1e-5": {
        "optimizer": {"name": "automagic", "options": {}, "learning_rate": 1e-5},
        "scheduler": CONSTANT,
    },
    "constant": {"scheduler": CONSTANT},
    "constant, plateau_patience 2": {"scheduler": CONSTANT, "train": {**MEASURED, "plateau_patience": 2}},
    "timestep_rank 8": {"lora": {"timestep_rank": 8}},
    "preservation blank": {"objective": {"preservation": "blank"}},
    "preservation class": {
        "objective": {"preservation": "class", "preservation_trigger": "mossling", "preservation_class": "ring"}
    },
    "regularisation pictures": {},
    "regularisation pictures, batches of their own": {},
    "differential_guidance 3": {"objective": {"differential_guidance": 3.0}},
    "nearest_noise 4": {"objective": {"nearest_noise": 4}},
    "nearest_noise 64": {"objective": {"nearest_noise": 64}},
    "easy_weight 0.125": {"objective": {"easy_weight": 0.125}},
    "channel_scaling": {"lora": {"channel_scaling": True}},
    "init svd_down": {"lora": {"init": "svd_down"}},
    "init eva": {"lora": {"init": "eva"}},
    "init lora_ga": {"lora": {"init": "lora_ga"}},
    "init pissa": {"lora": {"init": "pissa"}},
    "compute int8": {"memory": {"compute": "int8"}},
    "compute float8": {"memory": {"compute": "float8"}},
    "flow model": {},
    "flow model, weighting cos_map": {"objective": {"weighting": "cos_map"}},
    "flow model, weighting sigma_sqrt": {"objective": {"weighting": "sigma_sqrt"}},
    "flow model, mixflow 0.8": {"objective": {"mixflow": 0.8}},
    "flow model, compute int8": {"memory": {"compute": "int8"}},
    "flow model, compute float8": {"memory": {"compute": "float8"}},
    "flow model, beta 1 2": {"objective": {"timestep_distribution": "beta", "beta_a": 1.0, "beta_b": 2.0}},
    "flow model, mixflow 0.8, beta 1 2": {
        "objective": {"mixflow": 0.8, "timestep_distribution": "beta", "beta_a": 1.0, "beta_b": 2.0}
    },
}
FLOW = tuple(name for name in VARIANTS if name.startswith("flow model"))
FLOW_STEPS, FLOW_RANK, FLOW_RATE, FIGURES = 500, 64, 4e-3, 6  # it learns more slowly, beside plain figures
# Variants that train circles by the base beside the example: how many, and how many in a batch of theirs alone.
DRAWN = {"regularisation pictures": (24, 0), "regularisation pictures, batches of their own": (24, 4)}


def configure(name: str, seed: int, steps: int | None = None, size: int = 128) -> RunConfig:
    """Describe the run of a variant."""
    import concept

    flow = name in FLOW
    steps = steps or (FLOW_STEPS if flow else STEPS)

    prompts = [*(f"a mossling on a {ground} background" for ground in GROUNDS)]
    prompts += [*concept.plain_prompts(PLAIN), *concept.plain_prompts(CIRCLES)]
    sample = SampleConfig(prompts=tuple(prompts), width=size, height=size, steps=12 if flow else 10, cfg=4, seed=seed)
    tokenizer = Path(os.environ["COMFYUI_PATH"]) / "comfy" / "sd1_tokenizer"
    base = BaseModelConfig(path=str(ROOT / "assets" / "atelier-tiny.safetensors"), tokenizer=str(tokenizer))
    rank, rate = (FLOW_RANK, FLOW_RATE) if flow else (RANK, RATE)
    run = concept.learning_run(base, sample, rank=rank, rate=rate, steps=steps)
    run = run.replace(
        objective=ObjectiveConfig(min_snr_gamma=0 if flow else 5),
        scheduler=run.scheduler.replace(warmup_steps=min(run.scheduler.warmup_steps, steps // 4)),
        train=run.train.replace(seed=seed, resolution=size),
    )
    for part, changes in VARIANTS[name].items():
        run = run.replace(**{part: getattr(run, part).replace(**changes)})
    return run


@contextmanager
def on_flow(run: RunConfig) -> Iterator[tuple[RunConfig, Any]]:
    """Move a run to the tiny flow-matching model, linked as Use Connected Model does, beside plain figures.

    Also yield the model's source.
    """
    import concept
    import from_comfyui  # concept has put its folder on the path

    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedSource

    loaded = from_comfyui.load()
    live = LinkedModels(loaded.model, loaded.clip, loaded.vae)
    linked = BaseModelConfig(path="atelier-tiny-flow", connected=ConnectedConfig(guidance=3.5))
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        concept.draw_plain_figures(Path(folder), FIGURES)
        plain = ConceptConfig(folder=folder, role="regularisation")
        dataset = DatasetConfig(concepts=(*run.dataset.concepts, plain))
        yield run.replace(base_model=linked, dataset=dataset), ConnectedSource(linked, live)


def draw_concept(base: BaseModelConfig, sample: SampleConfig, folder: Path, role: Any = "train") -> ConceptConfig:
    """Let a base model draw the pictures of a concept into a folder; the prompts are their captions."""
    from torchvision.utils import save_image

    from lora_atelier.trainer_core.models.sd import load_base_model
    from lora_atelier.trainer_core.training.sample import sample_images

    for number, (drawn, picture) in enumerate(sample_images(load_base_model(base), sample)):
        save_image(picture[0].movedim(-1, 0), folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(drawn.prompt, encoding="utf-8")
    return ConceptConfig(folder=str(folder), role=role)


def with_drawn(run: RunConfig, count: int, folder: Path, batch: int = 0) -> RunConfig:
    """Add regularisation pictures to a run: circles that its base draws into a folder, none that it is judged by.

    batch: how many are one of theirs alone; 0: they share the run's.
    """
    import concept

    figures = [("circle", colour, ground) for colour, ground in itertools.permutations(GROUNDS, 2)]
    prompts = concept.plain_prompts([each for each in figures if each not in CIRCLES][:count])
    drawn = draw_concept(run.base_model, run.sample.replace(prompts=tuple(prompts)), folder, "regularisation")
    drawn = drawn.replace(batch_size=batch)
    return run.replace(dataset=DatasetConfig(concepts=(*run.dataset.concepts, drawn)))


def judge(pictures: Any) -> dict[str, float]:
    """Judge the pictures that `configure` asks for, (n, height, width, 3) in 0..1.

    motif: mean score of pictures with the trigger word; 1 is a perfect motif, the base's own are below 0. bleed: the
    same of pictures without it; circles: of circles. kept: share of those without it whose figure and ground have the
    colours asked for.
    """
    import concept

    first, last = len(GROUNDS), len(GROUNDS) + len(PLAIN)
    figures, grounds, _ = concept.read_plain(pictures[first:], (*PLAIN, *CIRCLES))
    scores = concept.motif_score(pictures)
    return {
        "motif": float(scores[:first].mean()),
        "bleed": float(scores[first:last].mean()),
        "circles": float(scores[last:].mean()),
        "kept": (figures + grounds) / (2 * len(PLAIN + CIRCLES)),
    }


def measure(run: RunConfig, source: Any = None, drawn: int = 0, batch: int = 0) -> dict[str, float]:
    """Train a run, and judge its pictures.

    drawn: how many regularisation pictures the base draws first. batch: how many are one of theirs alone; 0: they share
    the run's. loss: mean of the last fifth of the steps. seconds: the processor's for a step, the median, so that a
    busy machine changes little. For the others see `judge`.
    """
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.train import train_lora

    at: list[float] = []
    told = Callbacks(step=lambda report: at.append(time.process_time()))
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        if drawn:
            (pictures := Path(folder) / "drawn").mkdir()
            run = with_drawn(run, drawn, pictures, batch)
        result = train_lora(
            run, Path(folder) / "mossling.safetensors", CACHE / "learning", callbacks=told, source=source
        )
    return {
        **judge(result.samples),
        "loss": statistics.fmean(result.losses[-max(1, len(result.losses) // 5) :]),
        "seconds": statistics.median(after - before for before, after in itertools.pairwise(at)),
    }


def measure_small(name: str, seed: int, steps: int | None = None) -> dict[str, float]:
    """Train a variant on small pictures and judge none: the losses of the end, of trained and of held-out ones.

    steps: by default SMALL's. lowest: of all measurements of held-out ones. rate: the last learning rate. weights: how
    many are trained. prediction: by how much the LoRA changes one, relative; norm: of its changes together.
    """
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.train import train_lora

    length = SMALL | ({"steps": steps} if steps else {})
    run, rates = configure(name, seed, length["steps"], length["resolution"]), list[float]()
    run = run.replace(sample=run.sample.replace(prompts=()), train=run.train.replace(epochs=0, **length))
    told = Callbacks(step=lambda report: rates.append(next(iter(report.learning_rates.values()))))
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        began = time.process_time()
        result = train_lora(run, Path(folder) / "lora.safetensors", CACHE / "learning", callbacks=told)
        seconds = time.process_time() - began
        assert result is not None
        effect = (open_run(result.run).result() or {})["effect"]
    held = dict(result.validation)
    return {
        "loss": statistics.fmean(result.losses[-len(result.losses) // 5 :]),
        "validation": held[len(result.losses)],
        "lowest": min(loss for step, loss in held.items() if step),
        "rate": rates[-1],
        "prediction": effect["prediction"],
        "norm": math.hypot(*effect["norms"].values()),
        "weights": sum(tensor.numel() for name, tensor in result.tensors.items() if not name.endswith("alpha")),
        "seconds": seconds / len(result.losses),
    }


def measure_mean(seeds: Sequence[int], steps: int | None = None, size: int = 128) -> dict[str, list[dict[str, float]]]:
    """Train the example with several seeds, and judge each LoRA, their exact mean, and the nearest one of their rank.

    Each draws with all those seeds; a row's figures are the means over these, one row for each LoRA. steps, size: of a
    run and its pictures.
    """
    import torch
    from safetensors.torch import save_file

    from lora_atelier.trainer_core.lora_files.average import mean_of_seeds
    from lora_atelier.trainer_core.lora_files.merge import merge_beneath
    from lora_atelier.trainer_core.models.sd import load_base_model
    from lora_atelier.trainer_core.train import train_lora
    from lora_atelier.trainer_core.training.sample import sample_images

    runs = [configure("adamw", seed, steps, size) for seed in seeds]

    def judged(path: Path) -> dict[str, float]:
        base = load_base_model(runs[0].base_model)
        merge_beneath(base, (BeneathConfig(path=str(path)),))
        found = [judge(torch.cat([image for _, image in sample_images(base, run.sample)])) for run in runs]
        return {key: statistics.fmean(each[key] for each in found) for key in found[0]}

    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        files = [(seed, Path(folder) / f"{seed}.safetensors") for seed in seeds]
        for run, (_, path) in zip(runs, files, strict=True):
            train_lora(run.replace(sample=run.sample.replace(prompts=())), path, CACHE / "learning")
        made = {"seeds": [path for _, path in files]}
        for name, rank in (("mean", 0), (f"mean at rank {RANK}", RANK)):
            mean, _ = mean_of_seeds(files, rank)
            path = Path(folder) / f"{name}.safetensors"
            save_file(mean, path, mean.metadata)
            made[name] = [path]
        return {name: [judged(path) for path in paths] for name, paths in made.items()}


def measure_planted(seed: int) -> dict[str, Any]:
    """Train the example with a wrong caption on one of its pictures, that of another one, and tell who is named.

    planted: its name. named: all pictures that the report names. odd: those that stood out twice. residuals: of each.
    """
    from lora_atelier.trainer_core.train import train_lora

    run = configure("adamw", seed)
    concept = run.dataset.concepts[0]
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        copied = shutil.copytree(concept.folder, Path(folder) / "example")
        captions = sorted(copied.glob("*.txt"))
        chosen = captions[seed % len(captions)]
        other = captions[(seed + len(captions) // 2) % len(captions)]
        chosen.write_text(other.read_text(encoding="utf-8"), encoding="utf-8")
        planted = run.replace(
            dataset=DatasetConfig(concepts=(concept.replace(folder=str(copied)),)),
            sample=run.sample.replace(prompts=()),
        )
        result = train_lora(planted, Path(folder) / "lora.safetensors", CACHE / "learning")
        assert result is not None
        pictures = json.loads((result.run / PICTURES).read_text(encoding="utf-8"))["pictures"]
    return {
        "planted": chosen.stem,
        "named": [Path(each["name"]).stem for each in pictures if each["odd"] or each["sure"] > SURE],
        "odd": [Path(each["name"]).stem for each in pictures if each["odd"]],
        "residuals": {Path(each["name"]).stem: each["residual"] for each in pictures},
    }


def render(results: Mapping[str, Sequence[Mapping[str, float]]], command: str, stamp: str) -> str:
    """Write the table of variants as Markdown: means over the seeds, with the spread of the motif.

    results: of each seed by variant; the first variant is what the others are compared with.
    """
    plain = statistics.fmean(each["seconds"] for each in next(iter(results.values())))
    lines = [
        "| changed setting | motif | lowest and highest seed | bleed | circles | kept | loss | time of a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        motifs = [run["motif"] for run in runs]
        lines.append(
            f"| {name} | {means['motif']:.3f} | {min(motifs):.3f} to {max(motifs):.3f} | {means['bleed']:.3f} | "
            f"{means['circles']:.3f} | {means['kept']:.0%} | {means['loss']:.4f} | {means['seconds'] / plain:.2f} |"
        )
    seeds = len(next(iter(results.values())))
    lines += ["", f"{count(seeds, 'seed')} each. Command: `{command}`, {stamp}."]
    return "\n".join(lines)


def main() -> None:
    """Measure one variant and write JSON."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="adamw", choices=VARIANTS)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--small", action="store_true", help="small pictures, which nobody judges")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--planted", action="store_true", help="a wrong caption, and which pictures are named")
    parser.add_argument("--mean", action="store_true", help="of three seeds of the first variant, as one LoRA")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another are at work, too, for the processor's time
    if options.mean:
        options.out.write_text(json.dumps(measure_mean(range(3), options.steps)))
        return
    if options.planted:
        options.out.write_text(json.dumps(measure_planted(options.seed)))
        return
    if options.small:
        options.out.write_text(json.dumps(measure_small(options.variant, options.seed, options.steps)))
        return
    run = configure(options.variant, options.seed, options.steps)
    with on_flow(run) if options.variant in FLOW else nullcontext((run, None)) as (run, source):
        options.out.write_text(json.dumps(measure(run, source, *DRAWN.get(options.variant, ()))))


if __name__ == "__main__":
    main()
