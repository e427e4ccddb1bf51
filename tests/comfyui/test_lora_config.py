"""LoRA Config in a real ComfyUI: what it shows of a base model, and the sentences that refuse."""

import pytest
from train_graph import CHECKPOINT, node

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def config(**inputs: object) -> dict:
    """Return a LoRA Config with the inputs that every workflow has."""
    return node(
        "AtelierLoraConfig",
        **{"rank": 4, "alpha": 4.0, "preset": "full", "conv_rank": 0, "conv_alpha": 0.0, **inputs},
    )


def test_the_node_shows_layers_sizes_and_blocks(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    graph = {
        "base": node("AtelierLoadBaseModel", checkpoint=CHECKPOINT, prediction="auto", clip_skip=1, precision="auto"),
        "lora": config(
            base_model=["base", 0],
            **{"algorithm": "lora", "algorithm.rank_dropout": 0.1, "algorithm.init": "default"},
            include="conv_in, lora_unet_*_to_q",
            exclude="time_embedding.*",
            block_ranks="4*12",
        ),
        "report": node("PreviewAny", source=["lora", 1]),
        "picture": node("PreviewImage", images=["lora", 2]),
    }
    result = comfy.queue(graph)
    assert result.ok, result.error
    (text,) = result.outputs["lora"]["text"]
    assert "| text encoder CLIP-L |" in text and "total" in text and "if Optimizer sets a learning rate" in text
    assert "as they are all equal, 4 counts for every block" in text
    assert result.outputs["report"]["text"] == (text,) or result.outputs["report"]["text"] == [text]
    (shown,), (linked,) = comfy.images(result, "lora"), comfy.images(result, "picture")
    assert shown.size == linked.size and len(set(shown.convert("RGB").getdata())) > 5
    assert comfy.queue(graph).was_cached("lora")

    # Alone, as in a workflow from before, it is its configuration and nothing more.
    alone = comfy.queue({"lora": config(), "report": node("PreviewAny", source=["lora", 1])})
    assert alone.ok and "lora" not in alone.outputs and "report" not in alone.outputs


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"algorithm": "locon"}, "algorithm of LoRA Config is 'locon'; set it to one of lora, loha, lokr"),
        ({"algorithm": "lora", "block_weights": "1*x"}, "block_weights has '1*x', which is not understood"),
        ({"preset": "attn-mlp", "conv_rank": 4}, "conv_rank has no effect: the preset attn-mlp trains no 3x3"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(comfy: ComfyClient, inputs: dict, sentence: str) -> None:
    result = comfy.queue({"lora": config(**inputs), "report": node("PreviewAny", source=["lora", 1])})
    assert not result.ok and result.error.startswith(sentence)
