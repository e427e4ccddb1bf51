"""The student of the tiny flow model: it is a distilled model, and its pictures are judged."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import concept  # noqa: F401 (puts assets/ on the path)
import pytest
import torch


@pytest.fixture(scope="module")
def turbo(comfy_modules: ModuleType, comfyui: Path) -> Iterator[ModuleType]:
    """Give the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFYUI_PATH", str(comfyui))
        import train_tiny_turbo

        yield train_tiny_turbo


@pytest.mark.thorough  # 15 seconds
def test_a_student_learns_where_the_teacher_goes_and_is_known_as_distilled(turbo: ModuleType, tmp_path: Path) -> None:
    from lora_atelier.nodes.comfyui.connected.architecture import sampling_of
    from lora_atelier.nodes.comfyui.connected.check import check_distilled

    teacher = turbo.load()
    found = {name: value.clone() for name, value in turbo.paths(teacher, turbo.captions(2), 64).items()}
    sampling = teacher.model.get_model_object("model_sampling")
    levels = turbo.comfy.samplers.calculate_sigmas(sampling, "simple", turbo.STEPS)
    assert torch.equal(found["sigmas"], levels)
    at = found["x"][:, 0]  # four steps of Euler's method along the targets
    assert abs(at.std() - 1) < 0.05
    for step, velocity in enumerate(turbo.targets(found).unbind(1)):
        at = at + (levels[step + 1] - levels[step]) * velocity
    assert torch.allclose(at, found["x"][:, -1], atol=1e-4)

    network = teacher.model.model.diffusion_model
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict({name: value.clone() for name, value in before.items()}, assign=True)
    losses = turbo.distil(network, found, 6, batch=8)
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    path = tmp_path / "tiny-turbo.safetensors"
    turbo.save_student(network, path)
    student = turbo.load(path)
    weights = student.model.model.diffusion_model.state_dict()
    assert all(torch.equal(weights[name], value.half().float()) for name, value in network.state_dict().items())
    assert any(not torch.equal(weights[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match=r"By its name \(turbo\) .* set train_distilled of Use Connected Model"):
        check_distilled(student.model, confirmed=False)
    assert (sampling_of(student.model).steps, sampling_of(student.model).cfg) == (8, 1.0)

    adapter = turbo.extract_adapter(path, tmp_path)
    drawn = [turbo.draw_with(model, lora).float() for model, lora in
             ((turbo.load(), None), (student, None), (student, adapter))]  # fmt: skip
    assert (drawn[2] - drawn[0]).abs().mean() < 0.3 * (drawn[1] - drawn[0]).abs().mean()


def test_pictures_are_judged_by_their_way_back_to_the_undistilled_models(turbo: ModuleType) -> None:
    own = torch.full((len(turbo.GROUNDS) + 2 * len(turbo.PLAIN), 128, 128, 3), 60, dtype=torch.uint8)
    found = turbo.judge(own + 10, own, own + 40, own + 4)
    assert found["undone"] == pytest.approx(0.25) and found["away"] == pytest.approx(6)
    assert found["motif"] < 0 and found["followed"] < 0.5
    text = turbo.render({"a": [found], "b": [found, {**found, "undone": 0.75}]})
    assert text.count("\n") == 3 and "| 50% (25% to 75%) |" in text and "| 25% | 6.0 |" in text
