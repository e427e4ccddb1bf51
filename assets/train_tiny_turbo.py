"""Distil the tiny flow model to four steps, and measure what training does to them: alone, and on a training adapter.

    COMFYUI_PATH=COMFYUI python assets/train_tiny_turbo.py --work DIR

The student learns where the tiny flow model's guided sampler goes between four of its levels. One adapter is a
LoRA that is trained on pictures by the student itself, another is extracted from both models. Then LoRAs learn the
example concept on the student, alone and with an adapter beneath, and draw on the student in four steps. What is in DIR
is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import drawing
import numpy as np
import torch
from from_comfyui import ASSETS, Loaded, comfy, draw, load
from PIL import Image
from reading import read_picture
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(ASSETS.parent / "tests"))
import concept

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    BeneathConfig,
    ConceptConfig,
    ConnectedConfig,
    DatasetConfig,
    RunConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.memory import copied_before_written

FLOW = ASSETS / "atelier-tiny-flow.safetensors"
DIFFUSION = "model.diffusion_model."
STEPS, SUBSTEPS, CFG = 4, 5, 4.0  # of the student; of the teacher between two levels of the student; the teacher's
GUIDANCE = 3.5  # a number that means nothing to the teacher
GROUNDS = ("blue", "green", "yellow", "white", "red", "orange")
RATE, ADAPTER_RATE = 2e-3, 4e-3  # learning rates of the LoRAs, and of the adapter
EXTRACTED = 64  # rank of the extracted adapter
SEEDS = (0, 1, 2)  # of the LoRAs
SEED = 31_000  # of what is measured; pictures to learn from have smaller ones
# Figures that no caption of the student's pictures asks for.
PLAIN = (("square", "red", "blue"), ("heart", "pink", "green"), ("star", "blue", "white"),
         ("triangle", "green", "yellow"), ("ring", "white", "red"), ("cross", "black", "orange"),
         ("circle", "red", "blue"), ("diamond", "yellow", "purple"), ("heart", "red", "white"),
         ("square", "purple", "gray"), ("star", "yellow", "black"), ("circle", "green", "pink"))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is drawn and trained."""

    paths: int = 256  # pictures by the teacher that the student learns from
    distil: int = 500  # steps of the student
    pictures: int = 96  # by the student, for its adapter
    beside: int = 36  # others by the student, beside the example concept
    adapter: int = 500  # steps of the adapter
    steps: int = 200  # of each LoRA


def captions(count: int) -> list[str]:
    """List captions of plain figures that nothing is measured by, each once, in an order of chance."""
    figures = [(shape, colour, ground) for shape in drawing.SHAPES for colour in drawing.COLOURS
               for ground in drawing.COLOURS if colour != ground]  # fmt: skip
    rest = [each for each in figures if each not in PLAIN]
    chosen = np.random.default_rng(0).permutation(len(rest))[:count]
    return concept.plain_prompts([rest[i] for i in chosen])


def encode(loaded: Loaded, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode prompts: hidden states (N, 77, 64), and pooled vectors (N, 64)."""
    found = [loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(prompt))[0] for prompt in prompts]
    return torch.cat([each[0] for each in found]), torch.cat([each[1]["pooled_output"] for each in found])


@torch.inference_mode()
def paths(loaded: Loaded, prompts: Sequence[str], size: int = 128, batch: int = 32) -> dict[str, torch.Tensor]:
    """Draw with the teacher, and keep where it is at the student's levels.

    Returns "x" (N, STEPS + 1, 16, h, w) from noise to picture, "sigmas" (STEPS + 1,), and of the captions "cross" and
    "pooled".
    """
    cross, pooled = encode(loaded, prompts)
    empty_cross, empty_pooled = encode(loaded, [""])
    steps, model = STEPS * SUBSTEPS, loaded.model
    whole = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    found = []
    for first in range(0, len(prompts), batch):
        rows = slice(first, first + batch)
        count = len(cross[rows])
        at: list[torch.Tensor] = []

        def keep(step: int, _: torch.Tensor, x: torch.Tensor, __: int, at: list[torch.Tensor] = at) -> None:
            if step % SUBSTEPS == 0:
                at.append(x.clone())

        positive = [[cross[rows], {"pooled_output": pooled[rows], "guidance": GUIDANCE}]]
        blank = {"pooled_output": empty_pooled.expand(count, -1), "guidance": GUIDANCE}
        negative = [[empty_cross.expand(count, -1, -1), blank]]
        latents = torch.zeros(count, 16, size // 8, size // 8)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(first))
        end = comfy.sample.sample(model, noise, steps, CFG, "euler", "simple", positive, negative, latents,
                                  callback=keep, disable_pbar=True)  # fmt: skip
        found.append(torch.stack([*at, model.model.process_latent_in(end)], 1))
    return {"x": torch.cat(found), "sigmas": whole[::SUBSTEPS].clone(), "cross": cross, "pooled": pooled}


def targets(found: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the velocities that lead from each level to the next in one step, (N, STEPS, 16, h, w)."""
    return found["x"].diff(dim=1) / found["sigmas"].diff().view(1, -1, 1, 1, 1)


def distil(
    network: torch.nn.Module, found: Mapping[str, torch.Tensor], steps: int, batch: int = 16, rate: float = 5e-4
) -> list[float]:
    """Teach a network the velocities of `targets` by AdamW with a cosine; return the loss of each step."""
    wanted, losses = targets(found), list[float]()
    parameters = [each.requires_grad_() for each in network.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    chance = torch.Generator().manual_seed(0)
    comfy.model_management.in_training = True  # plain formulas, which have gradients
    for _ in range(steps):
        rows = torch.randint(len(wanted), (batch,), generator=chance)
        levels = torch.randint(STEPS, (batch,), generator=chance)
        with copied_before_written():  # the blocks write into their input
            given = found["cross"][rows], found["pooled"][rows], torch.full((batch,), GUIDANCE)
            predicted = network(found["x"][rows, levels], found["sigmas"][levels], *given)
            loss = (predicted - wanted[rows, levels]).square().mean()
            loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    comfy.model_management.in_training = False
    network.requires_grad_(False)
    return losses


def save_student(network: torch.nn.Module, path: Path) -> None:
    """Write the tiny flow model's checkpoint with the student's weights."""
    with safe_open(FLOW, "pt") as file:
        metadata = file.metadata()
    student = {DIFFUSION + name: value.half().contiguous() for name, value in network.state_dict().items()}
    save_file(load_file(FLOW) | student, path, metadata)


def make_student(work: Path, size: Size) -> Path:
    """Draw with the teacher, and distil it."""
    path = work / "atelier-tiny-flow-turbo.safetensors"
    if not path.exists():
        teacher = load()
        found = paths(teacher, captions(size.paths))
        network = teacher.model.model.diffusion_model
        network.load_state_dict({k: v.clone() for k, v in network.state_dict().items()}, assign=True)
        # Those of inference mode have no gradients.
        losses = distil(network, {name: value.clone() for name, value in found.items()}, size.distil)
        print(json.dumps({"student": [round(float(np.mean(losses[i:j])), 4) for i, j in ((0, 50), (-50, None))]}))
        save_student(network, path)
    return path


def draw_concept(student: Loaded, folder: Path, rows: range, role: Any = "train") -> ConceptConfig:
    """Let the student draw pictures of some of the captions in its four steps, as *Drawn Pictures* does."""
    if not folder.exists():
        folder.mkdir()
        prompts = captions(rows.stop)[rows.start :]
        for number, pixels in enumerate(draw(student, prompts, cfg=1.0, steps=STEPS, seed=rows.start)):
            Image.fromarray(pixels).save(folder / f"{number:02}.png")
            (folder / f"{number:02}.txt").write_text(prompts[number], encoding="utf-8")
    return ConceptConfig(folder=str(folder), role=role)


def run_of(name: str, steps: int, rate: float, seed: int, *others: ConceptConfig) -> RunConfig:
    """Describe a run on the student, whose file has that name."""
    base = BaseModelConfig(path=name, connected=ConnectedConfig(guidance=GUIDANCE))
    run = concept.learning_run(base, SampleConfig(), *others, rank=32, rate=rate, steps=steps)
    return run.replace(train=run.train.replace(seed=seed, batch_size=2))


def train(student: Loaded, run: RunConfig, path: Path) -> Path:
    """Train a LoRA on the student, unless it is there."""
    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedSource
    from lora_atelier.trainer_core.train import train_lora

    if not path.exists():
        source = ConnectedSource(run.base_model, LinkedModels(student.model, student.clip, student.vae))
        train_lora(run, path, path.parent / "cache", source=source)
    return path


def train_adapter(student: Loaded, name: str, work: Path, size: Size) -> Path:
    """Train an adapter on the student's own pictures, as the template *Make a training adapter* does."""
    own = draw_concept(student, work / "drawn", range(size.pictures))
    run = run_of(name, size.adapter, ADAPTER_RATE, 0).replace(dataset=DatasetConfig(concepts=(own,)))
    return train(student, run, work / "adapter.safetensors")


def extract_adapter(student: Path, work: Path) -> Path:
    """Extract an adapter: what turns the student back into the tiny flow model."""
    from lora_atelier.trainer_core.lora_files.cli import main

    path = work / "extracted.safetensors"
    if not path.exists() and main([
        "extract", str(FLOW), "--base", str(student), "--rank", str(EXTRACTED), "--to", str(path),
        "--comfyui", os.environ["COMFYUI_PATH"],
    ]):  # fmt: skip
        raise SystemExit("No adapter was extracted.")
    return path


def train_concept(student: Loaded, name: str, path: Path, size: Size, seed: int, adapter: Path | None = None) -> Path:
    """Train a LoRA on the example concept, beside pictures of the student's own; on the adapter if there is one."""
    rows = range(size.pictures, size.pictures + size.beside)
    beside = draw_concept(student, path.parent / "beside", rows, "regularisation")
    run = run_of(name, size.steps, RATE, seed, beside)
    if adapter:
        run = run.replace(lora=run.lora.replace(beneath=(BeneathConfig(path=str(adapter), training_only=True),)))
    return train(student, run, path)


def draw_with(model: Loaded, lora: Path | None, steps: int = STEPS, cfg: float = 1.0) -> torch.Tensor:
    """Draw pictures with the trigger word, one on each of GROUNDS, then two of each of PLAIN; (N, 128, 128, 3)."""
    if lora:
        patched, _ = comfy.sd.load_lora_for_models(model.model, None, load_file(lora), 1.0, 0.0)
        model = replace(model, model=patched)
    prompts = [*(f"a mossling on a {ground} background" for ground in GROUNDS), *concept.plain_prompts(PLAIN * 2)]
    return torch.from_numpy(draw(model, prompts, cfg=cfg, steps=steps, seed=SEED))


def judge(pictures: torch.Tensor, own: torch.Tensor, undistilled: torch.Tensor, goal: torch.Tensor) -> dict[str, float]:
    """Judge pictures of `draw_with`; others from the same noise: the student's own, those in four steps without
    guidance by the model that it was distilled from, and those that it was taught to reach.

    motif: mean score of those with the trigger word. Of the others, followed: share of their shapes, colours and
    grounds that are as asked for; undone: share of the way from the student's own to the undistilled model's; away:
    grey levels from the goal.
    """
    first = len(GROUNDS)
    plain, own, undistilled, goal = (each[first:].float() for each in (pictures, own, undistilled, goal))
    read = [read_picture(each.numpy()) for each in pictures[first:]]
    right = sum(a == b for got, wanted in zip(read, PLAIN * 2, strict=True) for a, b in zip(got, wanted, strict=True))
    way = undistilled - own
    return {
        "motif": float(concept.motif_score(pictures[:first] / 255).mean()),
        "followed": right / (3 * len(read)),
        "undone": float(((plain - own) * way).sum() / way.square().sum()),
        "away": float((plain - goal).abs().mean()),
    }


def prove(work: Path, size: Size, seeds: Sequence[int] = SEEDS) -> dict[str, list[dict[str, float]]]:
    """Make what is not there yet; give the judgements of each way to draw, one for each seed, and keep its pictures."""
    path = make_student(work, size)
    teacher, student = load(), load(path)
    adapters = {
        "its adapter of own pictures": train_adapter(student, path.name, work, size),
        "its extracted adapter": extract_adapter(path, work),
    }
    shown = {
        f"tiny flow model, {STEPS * SUBSTEPS} steps, cfg {CFG:g}": [draw_with(teacher, None, STEPS * SUBSTEPS, CFG)],
        "tiny flow model": [draw_with(teacher, None)],
        "student": [draw_with(student, None)],
        **{f"student with {name}": [draw_with(student, adapter)] for name, adapter in adapters.items()},
    }
    for name, adapter in {"alone": None, **{f"on {name}": each for name, each in adapters.items()}}.items():
        shown[f"LoRA trained {name}"] = drawn = list[torch.Tensor]()
        for seed in seeds:
            file = work / f"{adapter.stem if adapter else 'alone'}-{seed}.safetensors"
            drawn.append(draw_with(student, train_concept(student, path.name, file, size, seed, adapter)))
    goal, undistilled, own = (each[0] for each in list(shown.values())[:3])
    for name, drawn in shown.items():
        rows = [torch.cat(list(drawn[0][i : i + 6]), 1) for i in range(0, len(drawn[0]), 6)]
        Image.fromarray(torch.cat(rows).numpy()).save(work / f"{name}.png")
    return {name: [judge(each, own, undistilled, goal) for each in drawn] for name, drawn in shown.items()}


def render(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Write the judgements as a table in Markdown: means over the seeds, with the lowest and the highest."""
    forms = {"motif": "{:.3f}", "followed": "{:.0%}", "undone": "{:.0%}", "away": "{:.1f}"}
    lines = [f"| drawn by | {' | '.join(forms)} |", "|---|---|---|---|---|"]
    for name, runs in found.items():
        cells = list[str]()
        for key, form in forms.items():
            values = [each[key] for each in runs]
            spread = f" ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else ""
            cells.append(form.format(sum(values) / len(values)) + spread)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make what is not there yet, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("tiny_turbo"), help="folder of the models and pictures")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    print(render(prove(options.work, Size())))


if __name__ == "__main__":
    main()
