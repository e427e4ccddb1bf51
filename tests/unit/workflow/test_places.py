"""Where the files of a workflow are looked for: ComfyUI's folders, and those of its extra_model_paths.yaml."""

from pathlib import Path

import pytest

from lora_atelier.dev import TINY_BASE
from lora_atelier.trainer_core.data.masks import folder_beside
from lora_atelier.trainer_core.data.scan import resolve_folder
from lora_atelier.trainer_core.workflow import places as module
from lora_atelier.trainer_core.workflow.places import ASSETS, Folders
from lora_atelier.trainer_core.workflow.settings import plain_path, read_concept, slashed


@pytest.fixture
def comfy(tmp_path: Path) -> Path:
    """Lay out a ComfyUI with models and pictures, also elsewhere."""
    for place in ("ComfyUI/models/checkpoints/sd/a.safetensors", "ComfyUI/models/clip/t.safetensors",
                  "big/ckpt/b.safetensors", "big/more/c.safetensors", "ComfyUI/models/vae/v.safetensors"):  # fmt: skip
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(b"x")
    for place in ("ComfyUI/input/cats", "ComfyUI/datasets/dogs", "big/pictures/birds", "ComfyUI/comfy/sd1_tokenizer"):
        (tmp_path / place).mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "ComfyUI/comfy/sd1_tokenizer" / name).write_bytes(b"x")
    text = f"mine:\n  base_path: {tmp_path}/big\n  checkpoints: |\n    ckpt\n    more\n  datasets: pictures\n"
    (tmp_path / "ComfyUI" / "extra_model_paths.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "ComfyUI"


def test_models_are_found_by_their_names(comfy: Path) -> None:
    places, big = Folders(comfy), comfy.parent / "big"
    assert places.checkpoint_path("sd/a.safetensors") == comfy / "models" / "checkpoints" / "sd" / "a.safetensors"
    assert places.checkpoint_path("b.safetensors") == big / "ckpt" / "b.safetensors"
    assert places.checkpoint_path("c.safetensors") == big / "more" / "c.safetensors"
    assert places.checkpoint_path(TINY_BASE.name) == ASSETS / TINY_BASE.name
    assert places.file_path("text_encoders", "t.safetensors", "x") == comfy / "models" / "clip" / "t.safetensors"
    assert places.checkpoint_path("sd\\a.safetensors") == comfy / "models" / "checkpoints" / "sd" / "a.safetensors"
    nowhere = comfy / "models" / "checkpoints" / "z.safetensors"
    assert places.checkpoint_path("z.safetensors") == nowhere and not nowhere.exists()
    assert places.known(Path("/elsewhere/b.safetensors"), ("checkpoints",)) == big / "ckpt" / "b.safetensors"
    assert places.known(Path("/elsewhere/z.safetensors"), ("checkpoints",)) is None
    with pytest.raises(ValueError, match=r"^lora_name of Existing LoRA is l.safetensors, which is not at"):
        places.file_path("loras", "l.safetensors", "lora_name of Existing LoRA")


def test_pictures_and_tokenizer_are_found(comfy: Path, tmp_path: Path) -> None:
    places = Folders(comfy)
    assert places.find_folder("cats", "x") == comfy / "input" / "cats"
    assert places.find_folder("dogs", "x") == comfy / "datasets" / "dogs"
    assert places.find_folder("birds", "x") == comfy.parent / "big" / "pictures" / "birds"
    (comfy / "input" / "cats" / "white").mkdir()
    assert places.find_folder("cats\\white", "x") == comfy / "input" / "cats" / "white"
    assert places.find_folder(str(tmp_path), "x") == tmp_path
    assert places.tokenizer_path() == comfy / "comfy" / "sd1_tokenizer"
    assert Folders(comfy, tmp_path).tokenizer_path() == tmp_path


def test_a_link_is_followed(comfy: Path) -> None:
    cats = comfy / "input" / "cats"
    (comfy / "link").symlink_to(cats, target_is_directory=True)
    found = Folders(comfy).find_folder(str(comfy / "link"), "x"), resolve_folder(f"{comfy / 'link'}")
    assert (*found, folder_beside(comfy, "link")) == (cats, cats, cats)


def test_a_mapped_drive_is_kept(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cats = comfy / "input" / "cats"
    monkeypatch.setattr(module.os.path, "realpath", lambda path: rf"\\nas\{path}")  # as of Z: on Windows
    found = (Folders(comfy).find_folder("cats", "x"), resolve_folder(f"{cats}"), folder_beside(cats.parent, "cats"))
    assert found == (cats, cats, cats)


def test_a_path_below_a_folder_has_the_slashes_of_every_system(comfy: Path) -> None:
    places = Folders(comfy)
    dataset = read_concept(places, "cats", captions_from={"captions_from": "table", "caption_file": "texts\\all.csv"})
    assert dataset.concepts[0].captions.file == "texts/all.csv"
    for kept in ("C:\\my cats", "C:my cats\\all.csv", "/data/a\\b", "~/a\\b", ""):
        assert slashed(kept) == kept


@pytest.mark.parametrize("text", ["\\\\?\\C:\\my cats", "//?/C:\\my cats", ' "\\\\?\\C:\\my cats" '])
def test_the_long_form_of_a_path_of_windows_is_a_path(text: str) -> None:
    assert plain_path(text, "folder of x") == "C:\\my cats"
    for other in ("\\\\?\\UNC\\nas\\cats", "\\\\.\\C:\\cats", "\\\\?\\\\nas\\cats"):
        with pytest.raises(ValueError, match=r"^folder of x is a network address; "):
            plain_path(other, "folder of x")


def test_a_damaged_list_of_folders_is_named(comfy: Path) -> None:
    (comfy / "extra_model_paths.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"extra_model_paths.yaml cannot be read; repair it"):
        Folders(comfy).checkpoint_path("a.safetensors")
