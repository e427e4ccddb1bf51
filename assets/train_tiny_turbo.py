"""Distil the tiny flow model to four steps, and measure what training does to them: alone, and on a training adapter.

    COMFYUI_PATH=COMFYUI python assets/train_tiny_turbo.py --work DIR

The student learns where the tiny flow model's guided sampler goes between four of its levels. The adapter is a LoRA
that is trained on pictures by the student itself. Then a LoRA learns the example concept on the student, once alone
and once with the adapter beneath, and draws on the student in four steps. What is in DIR is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
RATE, FIGURES = 2e-3, 6  # of the runs: the learning rate; plain figures beside the example concept
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
    pictures: int = 48  # by the student, for its adapter
    adapter: int = 250  # steps of the adapter
    steps: int = 250  # of each LoRA


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


def draw_concept(student: Loaded, folder: Path, count: int) -> ConceptConfig:
    """Let the student draw captioned pictures in its four steps, as *Drawn Pictures* does."""
    folder.mkdir(exist_ok=True)
    prompts = captions(count)
    for number, pixels in enumerate(draw(student, prompts, cfg=1.0, steps=STEPS)):
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(prompts[number], encoding="utf-8")
    return ConceptConfig(folder=str(folder))


def run_of(name: str, steps: int, *others: ConceptConfig, beneath: Path | None = None) -> RunConfig:
    """Describe a run on the student, whose file has that name; beneath: the adapter."""
    base = BaseModelConfig(path=name, connected=ConnectedConfig(guidance=GUIDANCE))
    run = concept.learning_run(base, SampleConfig(), *others, rank=32, rate=RATE, steps=steps)
    adapter = (BeneathConfig(path=str(beneath), training_only=True),) if beneath else ()
    return run.replace(lora=run.lora.replace(beneath=adapter))


def train(student: Loaded, run: RunConfig, path: Path) -> Path:
    """Train a LoRA on the student, unless it is there."""
    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedSource
    from lora_atelier.trainer_core.train import train_lora

    if not path.exists():
        source = ConnectedSource(run.base_model, LinkedModels(student.model, student.clip, student.vae))
        train_lora(run, path, path.parent / "cache", source=source)
    return path


def train_loras(student: Loaded, name: str, work: Path, size: Size) -> dict[str, Path]:
    """Train the adapter on the student's pictures, then a LoRA on the example concept without it, and one with it."""
    drawn = work / "drawn"
    adapter = work / "adapter.safetensors"
    if not adapter.exists():
        own = draw_concept(student, drawn, size.pictures)
        run = run_of(name, size.adapter)
        train(student, run.replace(dataset=DatasetConfig(concepts=(own,))), adapter)
    (plain := work / "plain").mkdir(exist_ok=True)
    concept.draw_plain_figures(plain, FIGURES)
    beside = ConceptConfig(folder=str(plain), role="regularisation")
    return {
        "adapter": adapter,
        "alone": train(student, run_of(name, size.steps, beside), work / "alone.safetensors"),
        "on the adapter": train(student, run_of(name, size.steps, beside, beneath=adapter), work / "on.safetensors"),
    }


def draw_with(model: Loaded, lora: Path | None, steps: int = STEPS, cfg: float = 1.0) -> torch.Tensor:
    """Draw pictures with the trigger word, one on each of GROUNDS, then one of each of PLAIN; (N, 128, 128, 3)."""
    if lora:
        patched, _ = comfy.sd.load_lora_for_models(model.model, None, load_file(lora), 1.0, 0.0)
        model = replace(model, model=patched)
    prompts = [*(f"a mossling on a {ground} background" for ground in GROUNDS), *concept.plain_prompts(PLAIN)]
    return torch.from_numpy(draw(model, prompts, cfg=cfg, steps=steps, seed=SEED))


def judge(pictures: torch.Tensor, own: torch.Tensor) -> dict[str, float]:
    """Judge pictures of `draw_with`; own: those of the student alone.

    motif: mean score of those with the trigger word. followed: share of the others' shapes, colours and grounds that
    are as asked for. moved: by how many grey levels the others differ from the student's own.
    """
    motifs, plain = pictures[: len(GROUNDS)], pictures[len(GROUNDS) :]
    read = [read_picture(each.numpy()) for each in plain]
    right = sum(a == b for got, wanted in zip(read, PLAIN, strict=True) for a, b in zip(got, wanted, strict=True))
    moved = (plain.float() - own[len(GROUNDS) :].float()).abs().mean()
    return {
        "motif": float(concept.motif_score(motifs / 255).mean()),
        "followed": right / (3 * len(PLAIN)),
        "moved": float(moved),
    }


def prove(work: Path, size: Size) -> dict[str, dict[str, float]]:
    """Make what is not there yet; give the judgement of each way to draw, and keep its pictures."""
    path = make_student(work, size)
    teacher, student = load(), load(path)
    loras = train_loras(student, path.name, work, size)
    shown = {
        "tiny flow model, 20 steps, cfg 4": draw_with(teacher, None, STEPS * SUBSTEPS, CFG),
        "tiny flow model, 4 steps, cfg 4": draw_with(teacher, None, STEPS, CFG),
        "tiny flow model, 4 steps, cfg 1": draw_with(teacher, None),
        "student, 4 steps, cfg 1": draw_with(student, None),
        "student with its adapter, 4 steps, cfg 1": draw_with(student, loras["adapter"]),
        "LoRA trained alone, 4 steps, cfg 1": draw_with(student, loras["alone"]),
        "LoRA trained on the adapter, 4 steps, cfg 1": draw_with(student, loras["on the adapter"]),
    }
    for name, pictures in shown.items():
        rows = [torch.cat(list(pictures[i : i + 6]), 1) for i in range(0, len(pictures), 6)]
        Image.fromarray(torch.cat(rows).numpy()).save(work / f"{name}.png")
    return {name: judge(pictures, shown["student, 4 steps, cfg 1"]) for name, pictures in shown.items()}


def render(found: Mapping[str, Mapping[str, float]]) -> str:
    """Write the judgements as a table in Markdown."""
    lines = ["| drawn by | motif | captions followed | moved, grey levels |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['motif']:.3f} | {row['followed']:.0%} | {row['moved']:.1f} |" for name, row in found.items()
    ]
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
