"""export: what cannot be written is refused before any model is loaded."""

import json

from lora_atelier.dev import FLOW, QUICKSTART
from lora_atelier.trainer_core.commands import main


def test_a_workflow_of_linked_models_has_no_toml(tmp_path, capsys):
    assert main(["export", str(FLOW), str(tmp_path / "x.toml")]) == 2
    said = capsys.readouterr().err
    assert "trains on a model that ComfyUI's own nodes load, which a TOML cannot name" in said and said.count("\n") == 1


def test_a_workflow_stays_as_it_is_unless_it_changes(tmp_path):
    for name, changes in (("same.json", []), ("other.json", ["--set", "train.steps=7"])):
        assert main(["export", str(QUICKSTART), str(tmp_path / name), *changes]) == 0
    same, other = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("same.json", "other.json"))
    assert same == json.loads(QUICKSTART.read_text(encoding="utf-8"))
    train = next(node for node in other["nodes"] if node["type"] == "AtelierTrain")
    assert train["widgets_values"][:2] == ["mossling", 7]
    assert main(["export", str(QUICKSTART), str(tmp_path / "x.yaml")]) == 2
