"""The tools for LoRAs in a real ComfyUI: from a trained LoRA or a file to the file that is shared."""

import json
import shutil
import threading
import urllib.error
from pathlib import Path

import pytest
import torch
from lora_runs import metadata_in
from PIL import Image
from safetensors.torch import load_file, save_file
from train_graph import node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer, answer_of
from lora_atelier.dev import TINY_BASE
from lora_atelier.trainer_core.lora_files.write import delta_norms

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")

RANK = {"mode": "rank", "mode.rank": 2, "mode.conv_rank": 1}


def save(lora: list, file_name: str, **inputs: object) -> dict:
    """Return a Save LoRA File."""
    texts = {"title": "", "trigger_words": "", "description": "", "author": ""}
    return node("AtelierSaveLoraFile", lora=lora, file_name=file_name, **{"dtype": "as it is", **texts, **inputs})


def text(result, name: str) -> str:
    """Return the text that a node shows."""
    return result.outputs[name]["text"][0]


def test_a_trained_lora_is_looked_at_changed_and_saved(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    name, loras = pictures.name, server.base / "models" / "loras"
    graph = train_graph(
        name,
        {"name.text_encoder_learning_rate": 0.01},
        name=name,
        steps=3,
        save_every=1,
        save_unit="steps",
    )
    graph["looked at"] = node("AtelierInspectLora", lora=["train", 2], model=["base", 1], clip=["base", 2])
    graph["smaller"] = node("AtelierResizeLora", lora=["train", 2], **RANK)
    both = "fro_ckpt=1,thr=-9\nspn_lora=1,thr=-0.3"
    graph["recipes"] = node(
        "AtelierResizeLora",
        lora=["train", 2],
        model=["base", 1],
        clip=["base", 2],
        **{"mode": "recipe", "mode.recipe": both},
    )
    graph["parts"] = node(
        "AtelierLoraBlocks",
        lora=["train", 2],
        model=["base", 1],
        clip=["base", 2],
        rules="te*=0\nmiddle_block=0.5",
        rest=1.0,
        strength=1.0,
    )
    graph["merged"] = node(
        "AtelierMergeLoras",
        lora_1=["train", 2],
        strength_1=1.0,
        lora_2=["parts", 0],
        strength_2=-1.0,
        strength_3=1.0,
        strength_4=1.0,
        method="sum",
        rank=4,
        density=0.5,
        seed=0,
    )
    graph["save smaller"] = save(
        ["smaller", 0], f"tools/{name}-small", model=["base", 1], clip=["base", 2], trigger_words="moss"
    )
    graph["save recipes"] = save(["recipes", 0], f"{name}-recipe")
    graph["save merged"] = save(["merged", 0], f"{name}-merged", dtype="float8_e4m3fn")
    graph["drawn"] = sample(["parts", 1], ["parts", 2], ["base", 3])
    graph["save parts"] = save(["parts", 0], f"{name}-parts", dtype="float32", thumbnail=["drawn", 0])
    graph["show drawn"] = node("PreviewImage", images=["drawn", 0])
    result = comfy.queue(graph)
    assert result.ok, result.error

    trained = load_file(loras / "atelier" / f"{name}.safetensors")
    blocks = result.outputs["parts"]["blocks"]  # the page makes sliders of them, and the report names them
    assert blocks == [line.partition(":")[0] for line in text(result, "parts").splitlines()[1:]]
    assert "middle_block" in blocks

    report = text(result, "looked at")
    assert f"title: {name}" in report and "All layers have their weight in the linked model" in report
    assert len(comfy.images(result, "looked at")) == 1
    small = load_file(loras / "tools" / f"{name}-small.safetensors")
    assert {len(t) for key, t in small.items() if key.endswith("down.weight")} == {
        1,
        2,
    } and small.keys() == trained.keys()
    about = metadata_in(loras / "tools" / f"{name}-small.safetensors")
    assert about["modelspec.trigger_phrase"] == "moss" and about["ss_output_name"] == f"{name}-small"
    assert about["atelier.run"] == metadata_in(loras / "atelier" / f"{name}.safetensors")["atelier.run"]
    assert json.loads(about["atelier.history"]) == [{"tool": "resize", "mode": "rank", "rank": 2, "conv_rank": 1}]

    # Several recipes are several LoRAs, and so several files: the second name gets a number.
    whole, cut = (load_file(loras / f"{name}-recipe{number}.safetensors") for number in ("", "-2"))
    assert sum(map(torch.numel, cut.values())) < sum(map(torch.numel, whole.values()))
    assert all(
        norm == pytest.approx(delta_norms(trained)[key], rel=1e-2, abs=1e-4) for key, norm in delta_norms(whole).items()
    )

    # What the rules leave is what MODEL draws; what they took is what a merge gives.
    norms, left, taken = (
        delta_norms(tensors)
        for tensors in (
            trained,
            load_file(loras / f"{name}-parts.safetensors"),
            load_file(loras / f"{name}-merged.safetensors"),
        )
    )
    for key, norm in norms.items():
        share = 0.0 if key.startswith("lora_te") else 0.5 if "_mid_block_" in key else 1.0
        assert left.get(key, 0.0) == pytest.approx(share * norm, rel=1e-2, abs=1e-4)
        assert taken[key] == pytest.approx((1 - share) * norm, rel=0.1, abs=0.02 * norm + 1e-4)
    (drawn,) = comfy.images(result, "show drawn")
    with Image.open(loras / f"{name}-parts.png") as beside:
        assert beside.size == drawn.size

    # Files are listed at once; the loaded one draws what MODEL drew.
    again = {key: graph[key] for key in ("base",)}
    again["file"] = node("AtelierLoadLoraFile", lora_name=f"{name}-parts.safetensors")
    again["on"] = node("LoraModelLoader", model=["base", 1], lora=["file", 0], strength_model=1.0, bypass=False)
    again["drawn"] = sample(["on", 0], ["base", 2], ["base", 3])
    again["show"] = node("PreviewImage", images=["drawn", 0])
    loaded = comfy.queue(again)
    assert loaded.ok, loaded.error
    (other,) = comfy.images(loaded, "show")
    assert other.tobytes() == drawn.tobytes()

    # The saves of the run as one LoRA.
    runs = [path.name for path in (server.base / "output" / "atelier" / "runs").iterdir() if path.name.startswith(name)]
    averaging = {"average": node("AtelierAverageSaves", run=runs[0], width=0.2)}
    averaging["save"] = save(["average", 0], f"{name}-average")
    averaged = comfy.queue(averaging)
    assert averaged.ok, averaged.error
    assert "step 3: " in text(averaged, "average")
    assert load_file(loras / f"{name}-average.safetensors").keys() == trained.keys()


def test_a_lora_is_extracted_and_converted(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    name, loras = pictures.name, server.base / "models" / "loras"
    graph = train_graph(name, {"name.text_encoder_learning_rate": 0.01}, name=name, steps=2)
    graph["difference"] = node(
        "AtelierExtractLora",
        source="linked models",
        tuned_model=["train", 0],
        tuned_clip=["train", 1],
        base_model=["base", 1],
        base_clip=["base", 2],
        **{"mode": "rank", "mode.rank": 4, "mode.conv_rank": 0},
    )
    graph["save difference"] = save(["difference", 0], f"{name}-difference", dtype="float32")
    for program in ("kohya", "comfyui", "diffusers", "ai-toolkit", "onetrainer"):
        graph[program] = node(
            "AtelierConvertLora",
            lora=["train", 2],
            model=["base", 1],
            clip=["base", 2],
            program=program,
            plain_rank=0,
        )
        graph[f"save {program}"] = save([program, 0], f"{name}-{program}", dtype="float32")
    result = comfy.queue(graph)
    assert result.ok, result.error
    trained = delta_norms(load_file(loras / "atelier" / f"{name}.safetensors"))
    difference = delta_norms(load_file(loras / f"{name}-difference.safetensors"))
    assert difference.keys() <= trained.keys()
    for key, norm in trained.items():
        assert difference.get(key, 0.0) == pytest.approx(norm, rel=0.02, abs=1e-4)
    assert "differ and hold 100.00%" in text(result, "difference")
    assert "does not read" in text(result, "diffusers") and "does not read" not in text(result, "comfyui")
    for program in ("kohya", "comfyui", "diffusers"):
        norms = delta_norms(load_file(loras / f"{name}-{program}.safetensors"))
        assert sorted(norms.values()) == pytest.approx(sorted(trained.values()), rel=1e-2, abs=1e-4)

    # From files; other files and the same file twice get a sentence.
    tuned = load_file(TINY_BASE)
    matrix = next(key for key in tuned if key.endswith("middle_block.1.proj_in.weight"))
    tuned[matrix] = (tuned[matrix].float() * 1.5).to(tuned[matrix].dtype)
    save_file(tuned, server.base / "models" / "checkpoints" / "tools-tuned.safetensors")
    save_file({"weight": torch.ones(4)}, server.base / "models" / "checkpoints" / "tools-no-model.safetensors")
    rule = {"mode": "sv_fro", "mode.share": 0.9, "mode.most": 0, "mode.most_conv": 0}
    for first, said in (
        ("tools-tuned.safetensors", ""),
        (TINY_BASE.name, "have equal weights"),
        ("tools-no-model.safetensors", "holds no weights of a model"),
        ("../../../secret.safetensors", "Value not in list"),
    ):
        files = {"source": "files", "source.tuned": first, "source.base": TINY_BASE.name, "source.text_encoders": True}
        extracted = {"x": node("AtelierExtractLora", **files, **rule)}
        extracted["save"] = save(["x", 0], f"{name}-of-files")
        result = comfy.queue(extracted)
        assert result.ok is not bool(said) and said in str(result.error), (first, result.error)
    [layer] = delta_norms(load_file(loras / f"{name}-of-files.safetensors"))
    assert layer.startswith("lora_unet_mid_block_attentions_0_proj_in")


def test_wrong_input_gets_one_sentence(comfy: ComfyClient, server: ComfyServer) -> None:
    loras = server.base / "models" / "loras"
    pair = {"x.lora_up.weight": torch.ones(4, 2), "x.lora_down.weight": torch.ones(2, 4)}
    save_file(pair, loras / "tools-pair.safetensors")
    save_file(
        {"y.lora_up.weight": torch.ones(4, 2), "y.lora_down.weight": torch.ones(2, 4)},
        loras / "tools-other.safetensors",
    )
    save_file({"weight": torch.ones(4)}, loras / "tools-none.safetensors")
    base = {
        "base": node(
            "AtelierLoadBaseModel", checkpoint=TINY_BASE.name, prediction="auto", clip_skip=1, precision="auto"
        )
    }
    file = {
        name: node("AtelierLoadLoraFile", lora_name=f"tools-{name}.safetensors") for name in ("pair", "other", "none")
    }
    merge = {
        "strength_1": 1.0,
        "strength_2": 1.0,
        "strength_3": 1.0,
        "strength_4": 1.0,
        "method": "sum",
        "rank": 4,
        "density": 0.5,
        "seed": 0,
    }
    cases = [
        ({"file": file["none"]}, ["file", 0], "tools-none.safetensors is no LoRA"),
        (
            {
                "file": file["pair"],
                "x": node("AtelierResizeLora", lora=["file", 0], mode="recipe", **{"mode.recipe": "fro_ckpt=1;thr=2"}),
            },
            ["x", 0],
            "character 1",
        ),
        (
            {
                "file": file["pair"],
                "x": node("AtelierResizeLora", lora=["file", 0], mode="recipe", **{"mode.recipe": "fro_ckpt=1,thr=2"}),
            },
            ["x", 0],
            "link the MODEL",
        ),
        (
            {
                **base,
                "file": file["pair"],
                "x": node(
                    "AtelierResizeLora",
                    lora=["file", 0],
                    model=["base", 1],
                    mode="recipe",
                    **{"mode.recipe": "fro_ckpt=1,thr=2"},
                ),
            },
            ["x", 0],
            "1 of 1 layers have no weight of their name",
        ),
        (
            {
                "file": file["pair"],
                "x": node("AtelierLoraBlocks", lora=["file", 0], rules="nothing=1", rest=1.0, strength=1.0),
            },
            ["x", 0],
            "nothing of LoRA Blocks matches no layer",
        ),
        (
            {
                "a": file["pair"],
                "b": file["other"],
                "x": node("AtelierMergeLoras", lora_1=["a", 0], lora_2=["b", 0], **merge),
            },
            ["x", 0],
            "share no layer",
        ),
        ({"x": file["pair"], **base, "model": base["base"]}, ["x", 0], "finds no weight for 1 of 1 layers"),
    ]
    for graph, lora, said in cases:
        inputs = {"model": ["base", 1]} if "finds no weight" in said else {}
        result = comfy.queue({**graph, "save": save(lora, "tools-never", **inputs)})
        assert not result.ok and said in result.error, (said, result.error)
    for name in ("../out", "a/../../b", "/etc/x", "con", ""):
        result = comfy.queue({"x": file["pair"], "save": save(["x", 0], name)})
        assert not result.ok, name
    result = comfy.queue(
        {"x": node("AtelierLoadLoraFile", lora_name="../../x.safetensors"), "save": save(["x", 0], "tools-never")}
    )
    assert not result.ok
    assert not list(loras.rglob("tools-never*")) and not list(server.base.rglob("out.safetensors"))
    result = comfy.queue(
        {"x": node("AtelierAverageSaves", run="../runs", width=0.1), "save": save(["x", 0], "tools-never")}
    )
    assert not result.ok


class Cancel(Exception):
    """What ComfyUI raises."""


@pytest.mark.parametrize("tool", ["Save LoRA File", "the others"])
def test_cancel_is_heard_while_a_lora_is_copied_and_checked(comfy_modules, tool: str, monkeypatch, tmp_path) -> None:
    from lora_atelier.nodes import save_lora
    from lora_atelier.nodes.comfyui import folders, tools

    begun, over, ended = threading.Event(), threading.Event(), []

    def checked(*_: object) -> None:
        begun.set()
        over.wait(20)
        ended.append(tool)

    def cancelled() -> None:
        if begun.is_set():
            raise Cancel

    monkeypatch.setattr(comfy_modules.model_management, "throw_exception_if_processing_interrupted", cancelled)
    monkeypatch.setattr(folders, "lora_file", lambda name, *_: tmp_path / f"{name}.safetensors")
    for module in (save_lora, tools):
        monkeypatch.setattr(module, "layers_of", checked)
    lora = {"x.alpha": torch.tensor(1.0)}
    with pytest.raises(Cancel):
        if tool == "the others":
            tools.layers_in(lora, "x")
        else:
            texts = dict.fromkeys(("title", "trigger_words", "description", "author"), "")
            save_lora.AtelierSaveLoraFile.execute(lora=lora, file_name="x", dtype="as it is", **texts)
    assert not ended
    over.set()


def test_the_page_is_told_the_blocks_of_a_file_by_its_header(comfy: ComfyClient, server: ComfyServer) -> None:
    def ask(question: object) -> dict:
        try:
            return answer_of(comfy.request("/atelier/blocks", question))
        except urllib.error.HTTPError as error:
            return answer_of(error.read())

    loras, uploads = server.base / "models" / "loras", server.base / "input" / "loras"
    uploads.mkdir(parents=True)
    layers = [f"lora_unet_double_blocks_{i}_img_attn_proj" for i in (10, 2)]
    layers += ["lora_te1_text_model_encoder_layers_3_mlp_fc1", "lora_unet_final_layer_linear"]
    parts = {"lora_up": torch.full((4, 2), torch.nan), "lora_down": torch.ones(2, 4)}  # which a node refuses to load
    tensors = {f"{layer}.{part}.weight": tensor.clone() for layer in layers for part, tensor in parts.items()}
    save_file(tensors, uploads / "mine.safetensors")
    save_file({"x": torch.ones(2)}, loras / "blocks-none.safetensors")
    (loras / "blocks-broken.safetensors").write_bytes(b"{" * 30)
    found = {"blocks": ["te1.layers.3", "double_blocks.2", "double_blocks.10", "other"]}
    assert ask({"lora_name": "uploaded: mine.safetensors"}) == found
    for name, said in {
        "blocks-none.safetensors": "blocks-none.safetensors is no LoRA",
        "blocks-broken.safetensors": "blocks-broken.safetensors",
        "../../input/loras/mine.safetensors": "There is no file",
        "uploaded: ../loras/mine.safetensors": "There is no file",
        str(uploads / "mine.safetensors"): "There is no file",
    }.items():
        answer = ask({"lora_name": name})
        assert answer.keys() == {"error"} and said in answer["error"]
    for question in ({"lora_name": 5}, {}, [], "x"):
        assert ask(question) == {"error": "lora_name must be a text."}
    shutil.rmtree(uploads)


def test_an_uploaded_file_is_a_lora(comfy: ComfyClient, server: ComfyServer) -> None:
    uploads = server.base / "input" / "loras"
    uploads.mkdir(parents=True)
    save_file(
        {"x.lora_up.weight": torch.ones(4, 2), "x.lora_down.weight": torch.ones(2, 4)}, uploads / "mine.safetensors"
    )
    result = comfy.queue(
        {"x": node("AtelierLoadLoraFile", lora_name="uploaded: mine.safetensors"), "save": save(["x", 0], "tools-mine")}
    )
    assert result.ok, result.error
    shutil.rmtree(uploads)
