"""What each test of the zoo runs on, and what of it the oldest ComfyUI proves in every run."""

import pytest

from lora_atelier.dev import OLDEST

# What the oldest ComfyUI proves in every run of the tests; the newest proves the rest, and --thorough all on both.
FILES = ("test_insides", "test_names", "test_offline", "test_session")
# Of these files, what it proves of each architecture: its layers, our own files, and that a session leaves nothing.
EACH = (
    "test_an_outline_has_the_names_of_the_model",
    "test_a_trained_file_does_in_comfyui_what_it_did_in_training",
    "test_a_fresh_network_changes_nothing_and_a_session_leaves_nothing",
)
# What it proves of one architecture for each kind of prediction: a whole run, and the gradients.
OF_ONE = (
    "test_a_run_ends_in_a_file_that_comfyui_draws_with_and_leaves_the_model_alone",
    "test_gradients_are_central_differences",
)
# What the newest proves in every run of these rows alone: each kind of prediction, of size, of axes and of blocks.
# Names, a session and our own file it proves of each.
SHOWN = (
    *("sd15", "sdxl", "hunyuan_dit", "cosmos_t2v", "flux_dev", "sd3", "wan21_t2v", "ltxav", "z_image", "qwen_image"),
    *("cascade_c", "pixart_sigma", "auraflow", "hidream", "hidream_o1"),
    *("odd_written", "odd_convolutions", "odd_weights"),
)
OF_ROWS = (
    *OF_ONE,
    "test_a_batch_gives_what_its_samples_give",
    "test_a_picture_is_drawn_and_enlarged",
    "test_every_program_s_file_changes_a_model_by_the_same",
    "test_nothing_of_a_weight_is_kept_for_the_backward_pass",
)


def pytest_pycollect_makemodule() -> None:
    """Import ComfyUI before the tests, which import parts of it; not above, as what hands out the tests needs none."""
    import zoo.comfy_here  # noqa: F401


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a `name` once for each architecture that this ComfyUI has."""
    from zoo.zoo import ZOO

    own = any("name" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "name" in metafunc.fixturenames and not own:
        metafunc.parametrize("name", list(ZOO))


def pytest_itemcollected(item: pytest.Function) -> None:
    """Leave most of the oldest ComfyUI to --thorough, and what another row proves."""
    from zoo.comfy_here import VERSION
    from zoo.zoo import OF_EACH_KIND, ZOO

    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if VERSION != OLDEST:
        again = item.originalname in OF_ROWS and any(row in ZOO and row not in SHOWN for row in values)
    elif item.path.stem in FILES:
        again = bool(values) and item.originalname not in EACH
    else:
        again = item.originalname not in OF_ONE or not any(row in values for row in OF_EACH_KIND.values())
    if again:
        item.add_marker(pytest.mark.thorough)
