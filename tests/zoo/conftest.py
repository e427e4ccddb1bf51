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
    """Leave most of the oldest ComfyUI to --thorough."""
    from zoo.comfy_here import VERSION
    from zoo.zoo import OF_EACH_KIND

    of_one = hasattr(item, "callspec")
    if VERSION != OLDEST or (item.path.stem in FILES and (not of_one or item.originalname in EACH)):
        return
    values = item.callspec.params.values() if of_one else ()
    if not any(row in values for row in OF_EACH_KIND.values()):
        item.add_marker(pytest.mark.thorough)
