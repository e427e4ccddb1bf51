"""Drawn Pictures: drawn once, kept by content, trained beside the others; what cannot be drawn."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from train_graph import concept, node, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
SMALL = {"width": 64, "height": 64, "steps": 1, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal"}


def graph(of: dict[str, str], **inputs: object) -> dict:
    links = {name: ["base", number] for number, name in enumerate(("model", "clip", "vae"))}
    usual = {"pictures": 1, "negative": "", "seed": 3, "loss_weight": 0.5, "role": "regularisation", **SMALL}
    data = {"data": inputs.pop("data")} if "data" in inputs else {}
    return data | {
        "base": node("CheckpointLoaderSimple", ckpt_name=TINY_BASE.name),
        "x": node("AtelierDrawnPictures", **links, **of, **{**usual, **inputs}),
        "see": node("PreviewAny", source=["x", 0]),
    }


def test_pictures_are_drawn_of_captions_and_trained_beside_the_others(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    for path in pictures.glob("*.txt"):
        path.write_text(f"mossling (big), on {path.stem}", encoding="utf-8")
    of = {"of": "captions of dataset", "of.trigger": "Mossling", "of.class_word": "creature"}
    both = train_graph(pictures.name, name=pictures.name, steps=1)
    both["base model"] = both.pop("base")
    both["train"]["inputs"] |= {"base_model": ["base model", 0], "dataset": ["x", 0]}
    both |= {key: each for key, each in graph(of, dataset=["data", 0]).items() if key in ("base", "x")}
    result = comfy.queue(both)
    assert result.ok, result.error
    assert result.outputs["x"]["text"] == ["3 pictures: 3 drawn, 0 there already."]
    (folder,) = (
        each
        for each in (server.base / "user" / "__atelier" / "drawn").iterdir()
        if {path.read_text() for path in each.glob("*.txt")} == {f"creature (big), on {i}" for i in range(3)}
    )
    with Image.open(next(folder.glob("*.png"))) as picture:
        assert picture.size == (64, 64)
    with safe_open(server.base / "models" / "loras" / "atelier" / f"{pictures.name}.safetensors", "pt") as file:
        assert file.metadata()["ss_num_reg_images"] == "3"


def test_pictures_of_a_prompt_are_a_dataset_of_their_own(comfy: ComfyClient) -> None:
    result = comfy.queue(graph({"of": "prompts", "of.prompt": "a red circle"}, role="train"))
    assert result.ok, result.error
    (said,) = result.outputs["see"]["text"]
    assert said.count("ConceptConfig(") == 1 and "role='train'" in said


def test_wrong_input_gets_one_sentence(comfy: ComfyClient, pictures: Path) -> None:
    def said(of: dict[str, str], **inputs: object) -> str:
        return str(comfy.queue(graph(of, **inputs)).error)

    assert "prompt of Drawn Pictures is empty" in said({"of": "prompts", "of.prompt": "#"})
    many = said({"of": "prompts", "of.prompt": "\n".join(map(str, range(11)))}, pictures=1000)
    assert "would draw 11000 pictures, and draws 10000 at most" in many

    def of_captions(trigger: str, **inputs: object) -> str:
        return said({"of": "captions of dataset", "of.trigger": trigger, "of.class_word": ""}, **inputs)

    assert "none is linked; link Concept Dataset" in of_captions("")
    (pictures / "0.txt").write_text("circle")
    data = {"dataset": ["data", 0], "data": concept(pictures.name)}
    assert "trigger of Drawn Pictures is empty" in of_captions(" ", **data)
    assert "No caption of dataset contains 'zzz'; set trigger" in of_captions("zzz", **data)
    assert "A caption of dataset is empty without 'circle'; set class_word" in of_captions("circle", **data)


@pytest.fixture
def drawing(comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Draw flat pictures instead of a model's, into a folder of the test; list what was drawn."""
    from lora_atelier.nodes.comfyui import drawn, folders, sampling

    asked: list[str] = []

    def draw(models: object, prompt: sampling.Prompt, *rest: object) -> torch.Tensor:
        if prompt.text == "cancel":
            raise KeyboardInterrupt
        asked.append(prompt.text)
        return torch.full((1, 8, 8, 3), len(asked) / 10)

    monkeypatch.setattr(sampling, "draw", draw)
    monkeypatch.setattr(drawn, "digest_of_base", lambda models: models)
    monkeypatch.setattr(folders, "drawn_folder", lambda: tmp_path)
    monkeypatch.setattr(folders, "kept_limit", lambda: 0)
    return asked


def test_only_what_is_new_is_drawn(drawing: list[str], tmp_path: Path) -> None:
    from lora_atelier.nodes.comfyui import sampling
    from lora_atelier.nodes.comfyui.drawn import draw_set
    from lora_atelier.nodes.drawn import rows_of
    from lora_atelier.trainer_core.config.prompt_lines import PromptLine

    def wanted(*prompts: str, seed: int = 1, pictures: int = 1, size: int = 64) -> list:
        lines = [PromptLine(text=prompt, prompt=prompt) for prompt in prompts]
        usual = sampling.SamplerPass(seed)
        return [(line.prompt, row) for line in lines for row in rows_of(line, usual, "", (size, size), pictures)]

    def draw(*prompts: str, base: str = "base", **settings: int) -> tuple[Path, list[str]]:
        drawing.clear()
        folder, drawn = draw_set(base, wanted(*prompts, **settings), lambda share: None)
        assert drawn == len(drawing)
        assert len(list(folder.glob("*.png"))) == len(list(folder.glob("*.txt"))) == len(wanted(*prompts, **settings))
        return folder, list(drawing)

    with pytest.raises(KeyboardInterrupt):
        draw("a", "b (c)", "cancel")
    assert drawing == ["a", "b \\(c\\)"]  # brackets are text
    first, drawn = draw("a", "b (c)", "d")
    assert drawn == ["d"]  # what was there before the Cancel is kept
    assert draw("a", "b (c)", "d") == (first, [])
    second, drawn = draw("d", "a", "e")
    assert drawn == ["e"] and second != first
    assert {path.read_text() for path in second.glob("*.txt")} == {"a", "d", "e"}
    copies = [path for path in tmp_path.glob("*/*.txt") if path.read_text() == "b (c)"]
    assert len(copies) == 2  # of the set that was not finished, too
    for damaged in copies:
        damaged.with_suffix(".png").write_bytes(b"no picture")
    assert draw("a", "b (c)", "d") == (first, ["b \\(c\\)"])
    assert draw("a", pictures=3)[1] == ["a", "a"]
    assert draw("a", seed=2)[1] == draw("a", size=72)[1] == draw("a", base="other")[1] == ["a"]
    seeds = [row.first.seed for _, row in wanted("a", "b", pictures=2)]
    assert len(set(seeds)) == 4 and seeds[2:] == [row.first.seed for _, row in wanted("b", pictures=2)]
