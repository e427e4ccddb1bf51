"""A sweep: one setting over several values, each a run of its own; one table and one plot."""

import csv
import io
from pathlib import Path
from types import ModuleType

import pytest
from train_graph import node, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def sweep(name: str, values: str, **train: object) -> dict:
    graph = train_graph(name, {"name.learning_rate": ["sweep", 0]}, name=name, **train)
    graph["sweep"] = node("AtelierSweep", values=values)
    graph["results"] = node("AtelierSweepResults", lora=["train", 2], values=["sweep", 1])
    graph["table"] = node("PreviewAny", source=["results", 1])
    graph["best"] = node("PreviewAny", source=["results", 3])
    return graph


def test_each_value_is_a_run_and_all_are_in_one_table(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    name = pictures.name
    graph = sweep(name, "0.01\n1e-5", steps=2, batch_size=1)
    result = comfy.queue(graph)
    assert result.ok, result.error
    table = list(csv.DictReader(io.StringIO(result.outputs["table"]["text"][0])))
    assert [row["value"] for row in table] == ["0.01", "1e-5"] and {row["steps"] for row in table} == {"2"}
    runs = server.base / "output" / "atelier" / "runs"
    assert len({row["run"] for row in table}) == 2 and all((runs / row["run"] / "run.json").is_file() for row in table)
    lowest = min(table, key=lambda row: float(row["loss"]))["value"]
    assert result.outputs["best"]["text"] == [lowest]
    said = result.outputs["results"]["text"][0].splitlines()
    assert [line.endswith("the best") for line in said] == [row["value"] == lowest for row in table]
    assert comfy.images(result, "results")[0].size[0] > 500

    # More values: those that are trained are reused.
    more = sweep(name, "1e-5, 0.1", steps=2, batch_size=1)
    result = comfy.queue(more)
    assert result.ok, result.error
    again = list(csv.DictReader(io.StringIO(result.outputs["table"]["text"][0])))
    assert again[0]["run"] == table[1]["run"] and len(again) == 2
    assert result.outputs["best"]["text"] == ["1e-5"] == [lowest]  # the last before, now the first


def test_a_loop_around_train_lora_trains_each_turn_once(comfy: ComfyClient, pictures: Path) -> None:
    """As ComfyUI's Start Loop does: nodes that are copied for each turn, and that nothing keeps until the next run."""
    graph = train_graph(pictures.name, name=pictures.name, steps=1, batch_size=1)
    graph["loop"] = node("Loop", body=["train", 5])
    graph["path"] = node("PreviewAny", source=["loop", 0])
    first, again = comfy.queue(graph), comfy.queue(graph)
    for result in (first, again):
        assert result.ok, result.error
        reports = [output["text"][0] for name, output in result.outputs.items() if name.endswith("_train")]
        assert {about for about, _ in result.texts} == {"train"}  # the node that the copies stand for
        assert len(reports) == 2
        assert all(said.startswith("Already trained in ") for said in reports) == (result is again)
    assert first.outputs["path"] == again.outputs["path"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (" , ", "values of Sweep is empty"),
        (",".join(map(str, range(101))), "at most 100 values"),
        ("0.1, fast", "learning_rate of Optimizer is 'fast' and must be a number"),
    ],
)
def test_wrong_values_get_one_sentence(comfy: ComfyClient, pictures: Path, values: str, said: str) -> None:
    result = comfy.queue(sweep(pictures.name, values, steps=1))
    assert not result.ok and said in str(result.error), result.error


def test_the_best_curve_has_the_colour_of_the_best(comfy_modules: ModuleType) -> None:
    from lora_atelier.nodes.sweep_picture import draw_sweep

    falling = [(step, 1 / step) for step in range(1, 30)]
    picture = draw_sweep([("a", falling), ("b", [(step, 0.5) for step in range(1, 30)]), ("gone", [])], 0)
    colours = {colour for _, colour in picture.getcolors(1 << 24)}
    assert (255, 176, 66) in colours and (240, 120, 150) in colours
