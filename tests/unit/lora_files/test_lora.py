"""LoRAs in memory keep their metadata; what is done to them is added; files in 8 bits; the report; commands."""

import json

import pytest
import sdxl_sample
import torch
from lora_runs import metadata_in
from safetensors.torch import load_file, save_file

from lora_atelier.trainer_core.commands import main as command
from lora_atelier.trainer_core.commands import main as program
from lora_atelier.trainer_core.lora_files import loader
from lora_atelier.trainer_core.lora_files.cli import main as tools
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.inspect import describe_lora, inspect_lora
from lora_atelier.trainer_core.lora_files.lora import (
    HISTORY,
    Lora,
    layers_of,
    metadata_of,
    read_lora,
    remade,
    tensors_of,
)
from lora_atelier.trainer_core.lora_files.recipes import parse_recipes
from lora_atelier.trainer_core.lora_files.resize import resize_by_recipes
from lora_atelier.trainer_core.lora_files.write import delta_norms, save_lora

TEXT = {"ss_steps": "250", "modelspec.title": "moss", "modelspec.trigger_phrase": "mossling", "sshs_model_hash": "old"}


def main(arguments: list[str]) -> int:
    return command(["lora", *arguments])


def layer(name, rank=3, seed=0):
    return {
        f"{name}.lora_down.weight": sdxl_sample.noise(seed, rank, 6),
        f"{name}.lora_up.weight": sdxl_sample.noise(seed + 1, 5, rank) * 1e-4,
        f"{name}.alpha": torch.tensor(1.5),
    }


TENSORS = {**layer("lora_unet_double_blocks_1_q"), **layer("lora_te_text_model_encoder_layers_2_fc1", 2, 4)}


def write(path, tensors=TENSORS, metadata=TEXT):
    save_file(tensors, path, metadata)
    return path


def test_metadata_go_along_and_say_what_was_done(tmp_path):
    lora, file = read_lora(write(tmp_path / "a.safetensors"))
    assert dict(lora).keys() == TENSORS.keys() and metadata_of(lora) == TEXT and metadata_of(dict(lora)) == {}
    made = remade({**lora, "bundle_emb.moss.clip_l": torch.ones(2)}, file.layers.values(), "resize", {"rank": 3})
    assert made.keys() == {*TENSORS, "bundle_emb.moss.clip_l"}
    made = remade(Lora(made, TEXT | {HISTORY: '[{"tool": "merge"}]'}), file.layers.values(), "resize", {"rank": 3})
    assert json.loads(made.metadata[HISTORY]) == [{"tool": "merge"}, {"tool": "resize", "rank": 3}]
    assert "sshs_model_hash" not in made.metadata and made.metadata["ss_network_dim"] == "3"
    for stranger in ("{", '{"a": 1}', "[" * 100_000):
        assert len(json.loads(remade(Lora(lora, {HISTORY: stranger}), [], "x", {}).metadata[HISTORY])) == 1


def test_an_alpha_in_peft_s_settings_becomes_a_tensor(tmp_path):
    path = tmp_path / "adapter_model.safetensors"
    tensors = {
        "base_model.model.a.lora_A.weight": torch.ones(2, 4),
        "base_model.model.a.lora_B.weight": torch.ones(3, 2),
    }
    write(path, tensors, {})
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    assert float(read_lora(path)[0]["base_model.model.a.alpha"]) == 8


@pytest.mark.parametrize("dtype", ["", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_small_values_outlive_every_number_format(tmp_path, dtype):
    save_lora(tmp_path / "a.safetensors", TENSORS, {}, dtype)
    read = load_file(tmp_path / "a.safetensors")
    assert {t.dtype for t in read.values() if t.ndim} == {getattr(torch, dtype or "float32")}
    before = delta_norms(TENSORS)
    assert all(norm == pytest.approx(before[name], rel=0.05) for name, norm in delta_norms(read).items())


def test_float8_of_a_file_without_alphas_gets_them(tmp_path):
    tensors = {"a.b.lora_A.weight": torch.full((2, 4), 1e-3), "a.b.lora_B.weight": torch.full((3, 2), 1e-3)}
    save_lora(tmp_path / "a.safetensors", tensors, {}, "float8_e4m3fn")
    _, file = read_lora(tmp_path / "a.safetensors")
    [found] = file.layers.values()
    delta = found.scale(2) * found.tensors["up"].float() @ found.tensors["down"].float()
    torch.testing.assert_close(delta, torch.full((3, 4), 2e-6), rtol=0.1, atol=0)


def test_the_report_tells_what_a_lora_is():
    tensors = {
        **TENSORS,
        **{
            f"z.{part}": t
            for part, t in (("lora_up.weight", torch.zeros(5, 1)), ("lora_down.weight", torch.ones(1, 6)))
        },
    }
    file = layers_of(Lora(tensors, TEXT), "moss")
    found = inspect_lora(file)
    assert found.about == {"title": "moss", "trigger words": "mossling", "steps": "250"}
    assert {name: pytest.approx(norm) for name, norm in delta_norms(tensors).items()} == {
        each.name: each.norm for each in found.layers
    }
    assert list(found.blocks) == ["te.layers.2", "double_blocks.1", "other"]
    report = describe_lora(found, "moss", {"z": "no CLIP is linked", "y": "of a reason", "x": "of a reason"})
    for words in (
        "3 layers, 3 of LoRA",
        "trigger words: mossling",
        "ranks: 1 (1), 2 (1), 3 (1)",
        "without effect: 1 layer (z)",
        "1 layer would not be loaded, as no CLIP is linked: z",
        "2 layers would not be loaded, as of a reason: y, x",
    ):
        assert words in report
    assert "All layers have their weight" in describe_lora(found, "moss", {})
    turned = layers_of({"a.oft_blocks": torch.zeros(2, 2, 2)}, "x")
    assert "depend on the model (a); link the MODEL" in describe_lora(inspect_lora(turned), "x")


def test_rank_and_knee_of_known_singular_values():
    up = torch.diag(torch.tensor([8.0, 8.0, 8.0, 0.01, 0.008, 0.006]))
    [facts] = inspect_lora(layers_of({"a.lora_up.weight": up, "a.lora_down.weight": torch.eye(6)}, "x")).layers
    assert facts.effective_rank == pytest.approx(3, abs=0.1) and facts.knee == 4


def test_commands_write_new_files_alone(tmp_path, capsys):
    one = str(write(tmp_path / "a.safetensors"))
    other = str(write(tmp_path / "b.safetensors", {**layer("lora_unet_double_blocks_1_q", 4, 8)}))
    assert main(["inspect", one]) == 0 and "trigger words: mossling" in capsys.readouterr().out
    to = ["--to", str(tmp_path / "new")]
    assert main(["resize", one, *to, "--rank", "1"]) == 0
    assert "ranks add up to 2, before to 5" in capsys.readouterr().out
    new = tmp_path / "new.safetensors"
    assert json.loads(metadata_in(new)[HISTORY])[0]["tool"] == "resize" and metadata_in(new)["ss_steps"] == "250"
    whole = new.read_bytes()
    assert main(["blocks", one, *to, "--rules", "te*=0"]) == 2 and "exists already" in capsys.readouterr().err
    assert new.read_bytes() == whole
    assert main(["blocks", one, "--to", str(tmp_path / "c"), "--rules", "te*=0"]) == 0
    assert all(name.startswith("lora_unet") for name in load_file(tmp_path / "c.safetensors"))
    assert main(["merge", one, other, "--to", str(tmp_path / "d"), "--strength", "1", "-0.5"]) == 0
    a, b, d = (read_lora(tmp_path / f"{name}.safetensors")[1].layers["lora_unet_double_blocks_1_q"] for name in "abd")

    torch.testing.assert_close(delta_weight(d), delta_weight(a) - 0.5 * delta_weight(b))
    assert (
        main(["resize", one, "--to", str(tmp_path / "e"), "--recipe", "spn_lora=1,thr=-1", "--dtype", "float16"]) == 0
    )
    assert {t.dtype for t in load_file(tmp_path / "e.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resize", "{a}", "--to", "{new}"], "--rank is 0"),
        (["resize", "{a}", "--to", "{new}", "--recipe", "fro_ckpt=1,thr=-3"], "name the model's file by --model"),
        (["resize", "{a}", "--to", "{new}", "--recipe", "x"], "--recipe has 'x' at character 1"),
        (["resize", "{a}", "--to", "{new}", "--recipe", "params,thr=1:params,thr=2"], "several recipes"),
        (["merge", "{a}", "--to", "{new}"], "lora merge has one LoRA; give it at least two"),
        (["merge", "{a}", "{a}", "--to", "{new}", "--strength", "1"], "1 number stands, for 2 LoRAs"),
        (["inspect", "{folder}/none.safetensors"], "none.safetensors"),
        (["inspect", "{folder}/text.safetensors"], "text.safetensors"),
    ],
)
def test_wrong_commands_get_one_sentence(tmp_path, capsys, arguments, said):
    write(tmp_path / "a.safetensors")
    (tmp_path / "text.safetensors").write_text("not a LoRA")
    places = {"a": tmp_path / "a.safetensors", "new": tmp_path / "new", "folder": tmp_path}
    assert main([argument.format(**places) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and len(printed.err.splitlines()) == 1 and not (tmp_path / "new.safetensors").exists()


def test_recipes_of_a_shell_compare_with_a_model_s_file(tmp_path, capsys):
    write(tmp_path / "a.safetensors", {**layer("transformer.blocks.0.attn1.to_q"), **layer("blocks.0.out")})
    model = {"diffusion_model.blocks.0.out.weight": sdxl_sample.noise(9, 5, 6)}
    save_file(model, tmp_path / "model.safetensors")
    command = ["resize", str(tmp_path / "a.safetensors"), "--recipe", "fro_ckpt=1,thr=-4.6", "--to"]
    given = ["--model", str(tmp_path / "model.safetensors")]
    assert main([*command, str(tmp_path / "b"), *given]) == 2
    assert "model.safetensors has no layer transformer.blocks.0.attn1.to_q" in capsys.readouterr().err
    write(tmp_path / "a.safetensors", layer("blocks.0.out"))
    assert main([*command, str(tmp_path / "b"), *given]) == 0
    file = read_lora(tmp_path / "a.safetensors")[1]
    recipes = parse_recipes("fro_ckpt=1,thr=-4.6")
    [made] = resize_by_recipes(file, recipes, lambda _: model["diffusion_model.blocks.0.out.weight"])
    (kept,) = read_lora(tmp_path / "b.safetensors")[1].layers.values()
    assert len(kept.tensors["down"]) == made.ranks[0].new_rank < 3


def test_a_file_of_a_shell_is_checked_before_it_has_its_name(tmp_path, capsys):
    """By ComfyUI's loader where there is one; else the last line says that it was not."""
    one = str(write(tmp_path / "a.safetensors"))
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "sd.py").touch()
    said, seen = [], []

    def refuse(path):
        seen.append(len(load_file(path)))
        raise ValueError("ComfyUI finds no weight.")

    def missing(*_):
        raise ImportError("No module named 'torchsde'")

    for number, (start, expected) in enumerate(
        [
            (None, "so its loader has not checked the file; name its folder by --comfyui."),
            (missing, "has not checked the file: No module named 'torchsde'. Start with ComfyUI's Python."),
            (lambda *given: said.append(given) or loader.Loader(lambda _: None, bool, "All is well."), "All is well."),
            (lambda *_: loader.Loader(refuse, bool, ""), "ComfyUI finds no weight."),
        ]
    ):
        new = tmp_path / f"{number}.safetensors"
        command = ["resize", one, "--to", str(new), "--rank", "1", "--comfyui", str(tmp_path)]
        fails = number == 3
        assert tools(command, start) == (2 if fails else 0) and new.exists() is not fails
        printed = capsys.readouterr()
        assert (printed.err if fails else printed.out).strip().endswith(expected)
    assert said == [(tmp_path, None)] and seen == [6] and not list(tmp_path.glob(".*"))


def test_the_program_lists_its_commands(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["trainer_core", "lora", "--help"])
    with pytest.raises(SystemExit):
        program()
    assert "inspect" in capsys.readouterr().out


def test_names_and_endings_come_back():
    file = layers_of(TENSORS, "x")
    again = tensors_of(file.layers.values())
    assert again.keys() == TENSORS.keys() and all(torch.equal(again[name], TENSORS[name]) for name in TENSORS)
