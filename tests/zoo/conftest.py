"""What each test of the zoo runs on, and what of it the oldest ComfyUI proves in every run."""

import pytest

from lora_atelier.dev import OLDEST

# What the oldest ComfyUI proves in every run of the tests; the newest proves the rest, and --thorough all on both.
FILES = ("test_insides", "test_names", "test_offline", "test_session")
# Of these files, what it proves of each architecture: its layers, and our own files.
EACH = (
    "test_an_outline_has_the_names_of_the_model",
    "test_a_trained_file_does_in_comfyui_what_it_did_in_training",
)
SESSION = "test_a_fresh_network_changes_nothing_and_a_session_leaves_nothing"
# Rows of such a session there: each kind of prediction, and code that newer ComfyUIs have changed.
IN_SESSION = (
    *("sd15", "hunyuan_dit", "cosmos_t2v", "flux_dev"),
    *("wan21_t2v", "ltxav", "z_image", "qwen_image", "omnigen2", "chroma_radiance"),
)
# What asks no ComfyUI, or only its classes' names, and is the same on each.
OF_NEWEST = (
    "test_the_page_lists_every_name_that_is_touched",
    "test_the_page_lists_what_the_pages_own_modules_read",
    "test_the_page_lists_the_elements_and_events_of_comfyui_that_ours_look_for",
    "test_the_page_lists_every_attribute_that_is_read_of_what_comfyui_hands_over",
    "test_a_file_of_another_family_is_named",
    "test_layers_of_text_encoders_are_refused",
)
# What it proves of one architecture for each kind of prediction: a whole run, and the gradients.
OF_ONE = (
    "test_a_run_ends_in_a_file_that_comfyui_draws_with_and_leaves_the_model_alone",
    "test_gradients_are_central_differences",
)
# What the newest proves in every run of these rows alone: each kind of prediction, of size, of axes and of blocks.
# Names and our own file, which is drawn with, it proves of each; test_train.py has rows of its own for whole runs.
SHOWN = (
    *("sd15", "sdxl", "hunyuan_dit", "cosmos_t2v", "flux_dev", "wan21_t2v", "ltxav", "z_image", "qwen_image"),
    *("cascade_c", "hidream"),
    *("odd_written", "odd_convolutions", "odd_weights"),
)
OF_ROWS = (
    "test_gradients_are_central_differences",
    SESSION,
    "test_a_batch_gives_what_its_samples_give",
    "test_a_caption_is_stored_and_read_back_as_clip_gave_it",
    "test_a_level_is_the_timestep_that_the_network_is_told",
    "test_a_model_is_a_function_of_its_seed",
    "test_a_picture_is_drawn_and_enlarged",
    "test_captions_differ_by_seed_and_length",
    "test_each_level_recomputes_more_blocks",
    "test_every_program_s_file_changes_a_model_by_the_same",
    "test_nothing_of_a_weight_is_kept_for_the_backward_pass",
    "test_pictures_that_are_a_step_larger_are_taken",
    "test_the_core_mixes_and_unmixes_as_comfyui_does",
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
        ours = item.originalname == SESSION and any(row in IN_SESSION for row in values)
        again = item.originalname in OF_NEWEST or (bool(values) and item.originalname not in EACH and not ours)
    else:
        again = item.originalname not in OF_ONE or not any(row in values for row in OF_EACH_KIND.values())
    if again:
        item.add_marker(pytest.mark.thorough)
