"""Compare LoRAs: the grid of saves, strengths and prompts; drawn once; what is marked; what cannot be."""

import csv
import io
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vision import tiny_vision
from train_graph import node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")

SMALL = {"steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal"}


def base() -> dict:
    return {"base": node("CheckpointLoaderSimple", ckpt_name=TINY_BASE.name)}


def compare(of: str, **inputs: object) -> dict:
    """Return a Compare LoRAs of 64 pixels."""
    usual = {"strengths": "1", "prompt": "a red circle", "negative": "", "seeds": "5", "width": 64, "height": 64}
    links = {"model": ["base", 0], "clip": ["base", 1], "vae": ["base", 2]}
    return node("AtelierCompareLoras", of=of, **links, **{**usual, **SMALL, "choose": 0, **inputs})


def lora(seed: int) -> dict[str, torch.Tensor]:
    """Build a LoRA of one layer."""
    name, draws = "lora_unet_middle_block_1_proj_in", torch.Generator().manual_seed(seed)
    shape = next(t.shape for key, t in load_file(TINY_BASE).items() if key.endswith("middle_block.1.proj_in.weight"))
    down, up = (2, shape[1], *shape[2:]), (shape[0], 2, *shape[2:])
    return {
        f"{name}.lora_down.weight": torch.randn(down, generator=draws),
        f"{name}.lora_up.weight": torch.randn(up, generator=draws) * 0.3,
    }


def text(result) -> str:
    return result.outputs["x"]["text"][0]


def rows(result) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(result.outputs["table"]["text"][0])))


def shown(graph: dict) -> dict:
    """Return a graph that shows the single pictures, the table and the chosen name."""
    return graph | {
        "show": node("PreviewImage", images=["x", 1]),
        "table": node("PreviewAny", source=["x", 2]),
        "name": node("PreviewAny", source=["x", 4]),
    }


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def apart(one: Image.Image, other: Image.Image) -> int:
    """Return the largest difference of two pictures."""
    return int(np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max())


def test_the_saves_of_a_run_are_compared_and_drawn_once(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    name = pictures.name
    saves = {"save_every": 1, "save_unit": "steps", "keep_last": 3}
    trained = comfy.queue(train_graph(name, name=name, steps=3, batch_size=1, **saves))
    assert trained.ok, trained.error
    [run] = [
        path.name for path in (server.base / "output" / "atelier" / "runs").iterdir() if path.name.startswith(name)
    ]
    prompts = "a red circle\na blue square --w 96 --d 7"
    graph = base() | {
        "x": compare("saves of a run", **{"of.run": run, "of.every": 2}, strengths="0, 1", prompt=prompts)
    }
    graph["last"] = node("AtelierSaveLoraFile", lora=["x", 3], file_name=f"{name}-chosen", dtype="as it is")
    graph["last"]["inputs"] |= {"title": "", "trigger_words": "", "description": "", "author": ""}
    graph["loader"] = node(
        "LoraLoader",
        model=["base", 0],
        clip=["base", 1],
        lora_name=f"atelier/{name}.safetensors",
        strength_model=1.0,
        strength_clip=1.0,
    )
    graph["stock"] = sample(["loader", 0], ["loader", 1], ["base", 2], **SMALL)
    graph["show stock"] = node("PreviewImage", images=["stock", 0])
    result = comfy.queue(shown(graph))
    assert result.ok, result.error
    assert text(result).startswith("6 pictures: 6 drawn, 0 there already.")
    table = rows(result)
    assert [(row["lora"], row["strength"], row["seed"]) for row in table] == [
        (title, strength, seed)
        for title, strength in (("without LoRA", "0"), ("step 1", "1"), ("step 3", "1"))
        for seed in ("5", "7")
    ]
    drawn = comfy.images(result, "show")
    assert [picture.size for picture in drawn] == [(64, 64), (96, 64)] * 3
    # Previews cut a value to 8 bits, kept pictures round it.
    assert apart(drawn[4], comfy.images(result, "show stock")[0]) <= 1 < apart(drawn[0], drawn[4])
    assert result.outputs["name"]["text"] == ["step 3"]
    chosen = load_file(server.base / "models" / "loras" / f"{name}-chosen.safetensors")
    final = load_file(server.base / "models" / "loras" / "atelier" / f"{name}.safetensors")
    assert all(torch.equal(chosen[key], tensor) for key, tensor in final.items())

    # The same saves, found by the LoRA that is linked.
    linked = base() | {"one": node("AtelierLoadLoraFile", lora_name=f"atelier/{name}.safetensors")}
    linked["x"] = compare("saves of lora_1", **{"of.every": 1}, lora_1=["one", 0])
    found = comfy.queue(shown(linked))
    assert found.ok, found.error
    assert [row["lora"] for row in rows(found)] == ["step 1", "step 2", "step 3"]
    assert text(found).startswith("3 pictures: 1 drawn, 2 there already.")

    # Drawn once: only what is missing or damaged is drawn again, and more strengths add to it.
    folder = server.base / "output" / "atelier" / "compare"
    (folder / table[1]["file"]).unlink()
    (folder / table[2]["file"]).write_bytes(b"no picture")
    with Image.open(folder / table[3]["file"]) as picture:
        assert json.loads(picture.info["atelier_sample"])["prompt"] == "a blue square"
    graph["x"]["inputs"] |= {"strengths": "0, 1, -1", "choose": 2}
    again = comfy.queue(shown(graph))
    assert again.ok, again.error
    assert text(again).startswith("10 pictures: 6 drawn, 4 there already.")
    assert again.outputs["name"]["text"] == ["step 1"]
    for one, other in zip(comfy.images(again, "show")[:4], drawn[:4], strict=True):
        assert same(one, other)


def test_files_and_links_are_compared(comfy: ComfyClient, server: ComfyServer) -> None:
    for number in (1, 2):
        save_file(lora(number), server.base / "models" / "loras" / f"compare-{number}.safetensors", {})
    graph = base() | {"x": compare("files", **{"of.files": "compare-*\n\ncompare-1"}, seeds="1, 2")}
    result = comfy.queue(shown(graph))
    assert result.ok, result.error
    assert [row["lora"] for row in rows(result)] == ["compare-1"] * 2 + ["compare-2"] * 2
    files = comfy.images(result, "show")
    linked = base() | {"one": node("AtelierLoadLoraFile", lora_name="compare-2.safetensors")}
    linked["x"] = compare("linked LoRAs", lora_1=["one", 0], seeds="2")
    result = comfy.queue(shown(linked))
    assert result.ok, result.error
    assert "1 picture: 0 drawn, 1 there already." in text(result)  # its content is the same
    assert same(comfy.images(result, "show")[0], files[3])


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"strengths": "1, x"}, "'x' in strengths of Compare LoRAs is no number from -10 to 10"),
        ({"seeds": "1.5"}, "'1.5' in seeds of Compare LoRAs is no number"),
        ({"of": "saves of lora_1", "of.every": 1}, "is saves of lora_1, and none is linked"),
        ({"prompt": " "}, "prompt of Compare LoRAs is empty"),
        ({"prompt": "a --q 1"}, "--q in line 1 of prompt of Compare LoRAs is none of"),
        ({"of.files": "../../secret"}, "No file of models/loras is called '../../secret'"),
        ({"of.files": "compare-bad", "choose": 9}, "choose of Compare LoRAs is 9, and Compare LoRAs has 1 column"),
        (  # the product is counted, and nothing is built of it: 18 million rows would fill the memory
            {"of.files": "compare-bad", "prompt": "\n".join(["a"] * 1000), "seeds": ",".join(map(str, range(18_000)))},
            "would draw 18000000 pictures, and draws 1000 at most",
        ),
        ({"of.files": "compare-bad", "width": 8192, "height": 8192, "seeds": "1,2,3,4,5"}, "million pixels"),
    ],
)
def test_wrong_input_gets_one_sentence(comfy: ComfyClient, server: ComfyServer, inputs: dict, said: str) -> None:
    save_file(lora(3), server.base / "models" / "loras" / "compare-bad.safetensors", {})
    result = comfy.queue(base() | {"x": compare(**{"of": "files", "of.files": "compare-bad", **inputs})})
    assert not result.ok and said in str(result.error), result.error


def test_the_column_that_is_most_alike_is_marked(comfy_modules: ModuleType, tmp_path: Path) -> None:
    from lora_atelier.nodes import comparison
    from lora_atelier.nodes.comfyui import comparing, sampling
    from lora_atelier.trainer_core.config.prompt_lines import PromptLine

    vision = tiny_vision()
    red, blue, dull = (
        torch.tensor(colour).expand(40, 56, 3).contiguous()
        for colour in ((0.9, 0.1, 0.1), (0.1, 0.1, 0.9), (0.4, 0.4, 0.4))
    )
    columns = [comparing.Column(title, 1.0, title, dict) for title in ("dull", "blue", "red")]
    row = comparing.GridRow(PromptLine(text="red", prompt="red"), sampling.SamplerPass(3), "", None, (56, 40))
    cells = [
        comparing.Cell(column, row, picture, tmp_path / "x.png", False)
        for column, picture in zip(columns, (dull, blue, red), strict=True)
    ]
    scores = comparing.likeness(vision, cells, [red, red * 0.98], None)
    best = comparison.best_column(columns, scores)
    assert best is not None and columns[best[0]].title == "red" and best[1] == pytest.approx(1, abs=1e-2)
    assert "Best by the sum: red at 1" in comparison.describe(cells, columns, scores, best)
    grid = comparison.draw_comparison(cells, 3, best[0])
    assert grid.height > 40 and max(grid.getcolors(1 << 24))[0] > 0

    class Words:
        """A text encoder whose pooled output is one of the vectors that the vision model gives."""

        tokenize = staticmethod(lambda text: text)

        @staticmethod
        def encode_from_tokens(text: str, return_pooled: bool) -> tuple[None, torch.Tensor]:
            assert return_pooled
            return None, comparing.embed(vision, [blue if "blue" in text else red])

    both = comparing.likeness(vision, cells, [], Words)
    assert [pair[0] for pair in both] == [None] * 3
    assert both[2][1] == pytest.approx(1, abs=1e-3) and both[2][1] > both[1][1]
    Words.encode_from_tokens = staticmethod(lambda text, return_pooled: (None, torch.ones(1, 5)))
    with pytest.raises(ValueError, match="gives 5 numbers a prompt, the CLIP vision model 8 a picture"):
        comparing.likeness(vision, cells, [], Words)
    assert comparison.best_column(columns, [(None, None)] * 3) is None


def test_cancel_keeps_what_is_drawn(comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_atelier.nodes.comfyui import comparing, sampling
    from lora_atelier.trainer_core.config.prompt_lines import PromptLine

    drawn = []

    def draw(*_: object) -> torch.Tensor:
        drawn.append(len(drawn))
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return torch.full((1, 8, 8, 3), 0.5)

    monkeypatch.setattr(sampling, "draw", draw)
    monkeypatch.setattr(comparing, "digest_of_base", lambda _: "base")
    passes = (sampling.SamplerPass(seed) for seed in (1, 2))
    rows = [comparing.GridRow(PromptLine(text="red", prompt="red"), each, "", None, (8, 8)) for each in passes]
    given = (sampling.Models(None, None, None), [comparing.Column("none", 0.0, "", dict)], rows, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(comparing.draw_cells(*given))
    assert [cell.kept for cell in comparing.draw_cells(*given)] == [True, False] and len(drawn) == 3


VISIONS = [  # ComfyUI's settings of vision models, numbers that they make of a picture, how their weights are stored
    ("clip_vision_config_vitl.json", 768, torch.float16),
    ("clip_vision_config_h.json", 1024, torch.bfloat16),
    ("clip_vision_siglip_384.json", 128, torch.float16),
    ("clip_vision_siglip2_base_naflex.json", 128, torch.bfloat16),
    ("image_encoders/dino2_large.json", 128, torch.bfloat16),
]
NARROW = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(("name", "width", "dtype"), VISIONS)
def test_every_vision_model_gives_one_vector_a_picture(
    comfy_modules: ModuleType, comfyui: Path, name: str, width: int, dtype: torch.dtype
) -> None:
    """With two narrow layers of random weights, and of few patches where their number is set."""
    import comfy.clip_vision

    from lora_atelier.nodes.comfyui import comparing

    config = json.loads((comfyui / "comfy" / name).read_text(encoding="utf-8"))
    few = {"image_size": 8 * config["patch_size"]} if config["image_size"] > 0 else {}
    vision = comfy.clip_vision.ClipVisionModel({**config, **few, **NARROW})
    draws = torch.Generator().manual_seed(0)
    for parameter in vision.model.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=draws) * 0.02).to(dtype)
    pictures = [torch.rand(size, generator=draws) for size in ((96, 64, 3), (64, 128, 3), (96, 64, 3))]
    found = comparing.embed(vision, [*pictures, pictures[0]])
    assert found.shape == (4, width) and found.isfinite().all()
    assert not found.requires_grad  # whose graphs of full models take gigabytes
    like = found @ found.t()
    torch.testing.assert_close(like.diagonal(), torch.ones(4))
    torch.testing.assert_close(like[0, 3], torch.ones(()))
    assert not torch.equal(found[0], found[2])
    assert comparing.has_text_side(vision) is name.startswith("clip_vision_config")


def test_likeness_to_prompts_needs_the_projection_of_clip(comfy_modules: ModuleType, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from lora_atelier.nodes import comparison
    from lora_atelier.nodes.comfyui import comparing, sampling
    from lora_atelier.trainer_core.config.prompt_lines import PromptLine

    row = comparing.GridRow(PromptLine(text="red", prompt="red"), sampling.SamplerPass(3), "", None, (8, 8))
    column = comparing.Column("one", 1.0, "one", dict)
    cells = [comparing.Cell(column, row, torch.rand(8, 8, 3), tmp_path / "x.png", False)]
    # SigLIP as ComfyUI loads it: a vector for each patch, and a projection that is none.
    siglip = SimpleNamespace(
        model=SimpleNamespace(visual_projection=lambda a: a),
        encode_image=lambda picture: {"image_embeds": torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])},
    )
    scores = comparing.likeness(siglip, cells, [], "a text encoder that is not asked")
    assert scores == [(None, None)]
    said = comparison.describe(cells, [column], scores, None, wordless=True)
    assert "no text side, so likeness to the prompt is left out" in said
    assert "left out" not in comparison.describe(cells, [column], scores, None)
    torch.testing.assert_close(comparing.embed(siglip, [cells[0].picture]), torch.full((1, 2), 0.5**0.5))
    clip = SimpleNamespace(
        model=SimpleNamespace(visual_projection=torch.nn.Linear(1, 1)), encode_image=siglip.encode_image
    )
    encoder = SimpleNamespace(return_projected_pooled=False)
    text = SimpleNamespace(cond_stage_model=SimpleNamespace(clip="clip_l", clip_l=encoder))
    with pytest.raises(ValueError, match="lacks CLIP's projection; link one of Load CLIP"):
        comparing.likeness(clip, cells, [], text)


def test_captions_are_ranked_by_their_likeness_to_the_pictures(
    comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a small vision model, and a stand-in of a text encoder that knows the pictures of three colours."""
    from types import SimpleNamespace

    from lora_atelier.nodes import preview
    from lora_atelier.nodes.comfyui import comparing
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, TrainConfig
    from lora_atelier.trainer_core.data.plan import build_plan
    from lora_atelier.trainer_core.data.scan import scan
    from lora_atelier.trainer_core.preflight.curation import describe_likeness
    from lora_atelier.trainer_core.preflight.preview import render_preview
    from lora_atelier.trainer_core.preflight.report import manifest_table

    vision, read = tiny_vision(), []
    colours = {"red": (230, 25, 25), "blue": (25, 25, 230), "green": (25, 230, 25)}
    captions = ("red", "blue (deep)", "blue", "")  # the third picture is green
    for i, (caption, shown) in enumerate(zip(captions, ("red", "blue", "green", "red"), strict=True)):
        Image.new("RGB", (64, 64), colours[shown]).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(caption)

    def encode(text: str, return_pooled: bool) -> tuple[None, torch.Tensor]:
        read.append(text)
        known = torch.tensor(colours[text.split()[0]]).expand(64, 64, 3) / 255
        return None, comparing.embed(vision, [known])

    words = SimpleNamespace(tokenize=lambda text: text, encode_from_tokens=encode)
    own = CaptionConfig(prefix="mossling", missing="empty", dropout=0.0)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path), captions=own),))
    plan = build_plan(scan(dataset), dataset, TrainConfig(resolution=64, bucket_step=64))
    told = []
    alike = preview.like_captions(
        plan, vision, words, Callbacks(phase=lambda _, done, total: told.append((done, total)))
    )
    assert read == ["red", "blue \\(deep\\)", "blue"]  # brackets are text, and no CLIP knows the trigger word
    assert sorted(alike) == [0, 1, 2] and told == [(i, 4) for i in range(4)]
    assert min(alike[0], alike[1]) == pytest.approx(1, abs=1e-3) and alike[2] < 0.99
    (said,) = describe_likeness(plan, alike, 4)
    assert f'the worst first: 2.png {alike[2]:.3f} ("blue"), ' in said and describe_likeness(plan, {}, 4) == []
    assert describe_likeness(plan, alike, 3)[1] == "Only the first 3 of 4 pictures are compared with their captions."
    rows = list(csv.DictReader(manifest_table(plan, alike).splitlines()))
    shown = {row["file"]: row["likeness"] for row in rows if row["file"].endswith(".png")}
    assert shown == {f"{i}.png": f"{alike[i]:.4f}" if i in alike else "" for i in range(4)}
    assert render_preview(plan, alike=alike).tobytes() != render_preview(plan).tobytes()

    monkeypatch.setattr(preview, "MOST_COMPARED", 2)
    assert sorted(preview.like_captions(plan, vision, words, Callbacks())) == [0, 1]
    asked = iter((None,))
    with pytest.raises(StopIteration):  # a Cancel at the second picture ends it
        preview.like_captions(plan, vision, words, Callbacks(check=lambda: next(asked)))
    wide = SimpleNamespace(tokenize=str, encode_from_tokens=lambda _, return_pooled: (None, torch.ones(1, 5)))
    with pytest.raises(ValueError, match="clip_of_vision of Dataset Preview gives 5 numbers a prompt, the CLIP vision"):
        preview.like_captions(plan, vision, wide, Callbacks())
    preview.check_vision(None, None)
    with pytest.raises(ValueError, match="clip_of_vision of Dataset Preview is not linked; link both, or none"):
        preview.check_vision(vision, None)
    siglip = SimpleNamespace(model=SimpleNamespace(visual_projection=lambda a: a))
    with pytest.raises(ValueError, match="clip_vision of Dataset Preview has no text side"):
        preview.check_vision(siglip, words)
