"""The estimate from small passes against counted bytes of a large one, at every way of keeping activations."""

import comfy.model_management
import pytest
import torch
from zoo.linked import linked

from lora_atelier.nodes.comfyui.connected import register_connected_models
from lora_atelier.trainer_core.config import LoraConfig, OptimizerConfig, RunConfig
from lora_atelier.trainer_core.memory import recompute
from lora_atelier.trainer_core.models import source_of
from lora_atelier.trainer_core.networks.of_model import build_network, learning_rates
from lora_atelier.trainer_core.preflight import measured

register_connected_models()
CPU = torch.device("cpu")


@pytest.mark.parametrize("level", ["0", "2", "full"])
@pytest.mark.parametrize(
    ("row", "references"),
    [("flux_dev", 0), ("flux_dev", 1), *((row, 0) for row in ("z_image", "qwen_image", "wan21_t2v", "chroma"))],
)
def test_the_estimate_is_within_15_percent_of_what_a_large_batch_takes(row, references, level):
    config = RunConfig(base_model=linked(row), dataset={"concepts": ()}, lora=LoraConfig(rank=4))
    base = source_of(config.base_model).load(torch.float32)
    network = build_network(base, config, learning_rates(OptimizerConfig(), base))
    caption = base.encode_text("a mossling on a stone", CPU)
    largest = (768, 512)
    with base.session(CPU), network.attached():
        recompute(base.units(base.denoiser), level, copies=base.writes_inputs)
        found = measured.measure_peak(base, network, caption, largest, CPU, references).at(3, largest)
        counted = measured._pass_bytes(base, network, [caption] * 3, largest, CPU, references)
    assert abs(found - counted) <= 0.15 * counted, (found, counted)


def test_more_recomputed_blocks_take_less():
    config = RunConfig(base_model=linked("flux_dev"), dataset={"concepts": ()}, lora=LoraConfig(rank=4))
    base = source_of(config.base_model).load(torch.float32)
    network = build_network(base, config, learning_rates(OptimizerConfig(), base))
    caption = base.encode_text("a mossling", CPU)
    peaks = []
    with base.session(CPU), network.attached():
        for level in ("0", "2", "full"):
            recompute(base.units(base.denoiser), level, copies=base.writes_inputs)
            peaks.append(measured.measure_peak(base, network, caption, (512, 512), CPU).at(2, (512, 512)))
    assert peaks[0] > 1.1 * peaks[1] > 1.2 * peaks[2]


def test_comfyui_is_asked_to_leave_room_for_a_step(monkeypatch):
    asked = []
    load = comfy.model_management.load_models_gpu
    monkeypatch.setattr(
        comfy.model_management, "load_models_gpu", lambda models, **given: asked.append(given) or load(models, **given)
    )
    base = source_of(linked("flux_dev")).load(torch.float32)
    base.reserve(123_000_000)
    with base.session(CPU):
        pass
    assert [given["memory_required"] for given in asked] == [0, 123_000_000]
