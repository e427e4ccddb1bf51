"""Noise & Loss in a real ComfyUI: the picture of its timesteps that the editor asks for."""

import itertools

import pytest
from train_graph import chosen

from comfy_client import ComfyClient, answer_of

WIDGETS = {
    "min_snr_gamma": 0.0,
    "min_timestep": 0,
    "max_timestep": 999,
    "weighting": "debiased",
    "pyramid_noise": "on",
    "pyramid_noise.pyramid_iterations": 6,
    "stratified_timesteps": False,
    "timestep_distribution": "auto",
    "timestep_shift": 0,
}
BETA = chosen("timestep_distribution", "beta", beta_a=2.0, beta_b=2.0)


def ask(comfy: ComfyClient, values: object, **more: object) -> dict:
    """Ask for a picture as the editor does."""
    return answer_of(comfy.request("/api/atelier/levels", {"values": values, **more}))


def test_the_picture_is_of_what_the_run_draws(comfy: ComfyClient) -> None:
    plain = ask(comfy, WIDGETS, connected=False)
    assert plain == {"levels": 1000, "shares": [1.0] * 50, "family": "as Stable Diffusion is trained"}
    half = ask(comfy, {**WIDGETS, "min_timestep": 500, "timestep_distribution": "uniform"})
    assert half == {"levels": 1000, "shares": [0.0] * 25 + [2.0] * 25, "family": ""}
    hump = ask(comfy, {**WIDGETS, **BETA})["shares"]
    cumulative = [3 * (k / 50) ** 2 - 2 * (k / 50) ** 3 for k in range(51)]
    assert hump == pytest.approx([50 * (b - a) for a, b in itertools.pairwise(cumulative)], abs=1e-3)
    shifted = ask(comfy, {**WIDGETS, "timestep_distribution": "uniform", "timestep_shift": 3.0})["shares"]
    assert sum(shifted[:37]) / 50 == pytest.approx(0.74 / (0.74 + 3 * 0.26), abs=1e-4)  # t / (t + 3 (1 - t)) at 0.74


def test_what_a_connected_model_decides_is_said(comfy: ComfyClient) -> None:
    assert "depends on the connected model" in ask(comfy, WIDGETS, connected=True)["error"]
    assert ask(comfy, {**WIDGETS, **BETA}, connected=True)["family"] == "without the shift of the model's family"
    assert ask(comfy, {**WIDGETS, **BETA, "timestep_shift": 1.0}, connected=True)["family"] == ""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**WIDGETS, "min_timestep": 600, "max_timestep": 500}, "min_timestep 600 is above max_timestep 500"),
        ({**WIDGETS, "timestep_shift": "3"}, "timestep_shift of Noise & Loss cannot be '3'"),
        ({**WIDGETS, "stratified_timesteps": 1}, "stratified_timesteps of Noise & Loss cannot be 1"),
        ({**WIDGETS, "path": "/etc"}, "path of Noise & Loss cannot be"),
        ({**WIDGETS, "min_timestep.beta_a": 1.0}, "beta_a of Noise & Loss cannot be 1.0"),
        (
            {**WIDGETS, "timestep_distribution": "gauss"},
            "timestep_distribution of Noise & Loss is 'gauss'; choose one of",
        ),
        ([], "needs the values of Noise & Loss"),
    ],
)
def test_a_picture_that_there_is_not_is_a_sentence(comfy: ComfyClient, values, sentence: str) -> None:
    assert sentence in ask(comfy, values)["error"]
