"""Fixtures of the whole suite: real ComfyUI servers, a small model of random weights, and which tests need a GPU.

How tests import the pack: lora_atelier.py beside this file.
"""

import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import processor_time
import pytest
from hypothesis import HealthCheck, settings
from windows_rules import LEFT_OUT, rules

from comfy_client import PACE, ComfyClient, ComfyServer
from lora_atelier.dev import NEWEST, OLDEST, comfyui_folder

PROCESSOR_TIME = "processor time"  # the plugin's name
# No example is too slow, as that depends on what else the machine does; the same examples in every run.
for name, count in (("every run", 33), ("thorough", 100)):  # examples; tests/examples.py has a property's own number
    calm = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(name, max_examples=count, **calm)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the processor time of each file; choose how many examples properties are tried with."""
    settings.load_profile("thorough" if config.getoption("thorough") else "every run")
    shares = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    config.pluginmanager.register(processor_time.ProcessorTime(shares=shares), PROCESSOR_TIME)
    if config.getoption("without_asserts"):
        os.environ["PYTHONOPTIMIZE"] = "1"  # of what starts from here on: servers, and with -n the tests themselves


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    parser.addoption("--thorough", action="store_true", help="prove all again: every case, kill and odd prompt")
    parser.addoption("--windows-rules", action="store_true", help="treat files as Windows does (on Linux)")
    parser.addoption("--without-asserts", action="store_true", help="start servers and programs as python -O does")
    parser.addoption("--nginx", help="prove with this nginx what its users may do")


# Files that take longest. Processes that share the tests begin with them, so that none works alone at the end.
# The first two share runs, so they belong to one process.
LONGEST = (
    *("test_recipes", "test_live", "test_learning", "test_kills", "test_faults", "test_io_errors", "test_bench"),
    *("test_second_device", "test_train", "test_saves", "test_mutations", "test_elsewhere", "test_resume"),
    *("test_tiny_base", "test_readme"),
)


@pytest.hookimpl(tryfirst=True)  # pytest then brings together what shares a fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first; leave out what no option asks for, and `gpu` where there is none."""
    for option in ("thorough", "nginx"):
        if not config.getoption(option):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(option)])
            items[:] = [item for item in items if not item.get_closest_marker(option)]
    if config.getoption("windows_rules") or os.name == "nt":
        left = [item for item in items if any(item.nodeid.startswith(name) for name in LEFT_OUT)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    places = {name: place for place, name in enumerate(LONGEST)}
    # Those of the browser follow one another, as it ends behind the last of them.
    items.sort(key=lambda item: (item.path.parent.name != "browser", places.get(item.path.stem, len(places))))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the processes that share the tests from one that has imported these, where the system can."""
    if not forked.POSSIBLE:
        return
    folder = Path(tempfile.mkdtemp())
    config.add_cleanup(lambda: shutil.rmtree(folder))
    untold = {**os.environ, processor_time.TOLD: ""}  # its time is added below
    process, command = forked.source(folder, config.invocation_params.args, untold)
    config.add_cleanup(process.wait)
    config.add_cleanup(process.terminate)
    config.pluginmanager.get_plugin(PROCESSOR_TIME).source = process.pid
    for spec in specs:
        spec.python = command


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where processes share servers (--dist loadscope), give those tests to one process that need the same server."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            frontend = re.search(r"\bbrowser/.*\[.*\b(comfyui|newest)\b", nodeid)
            if frontend:
                return f"{frontend[1]} frontend"
            return "oldest" if "oldest" in nodeid else nodeid.split("::")[0]

    return ByServer(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import what is tested without looking for garbage: imports take a tenth less time, and leave hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_frozen = False


def pytest_runtest_setup() -> None:
    """Set aside the objects of imported libraries once: every run collects garbage, and need not look at those."""
    global _frozen
    if not _frozen and "diffusers.models.unets" in sys.modules:
        gc.collect()
        gc.freeze()
        _frozen = True


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Let files reach the disk when the system likes: it keeps them whatever is killed, and no test cuts the power."""
    with mock.patch.object(os, "fsync", os.fstat):  # which refuses what is no open file as well
        yield


@pytest.fixture
def as_windows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Treat files as Windows does for the length of a test, but of one that it cannot take."""
    with nullcontext() if request.node.nodeid.startswith(tuple(LEFT_OUT)) else rules():
        yield


@pytest.fixture(autouse=True)
def wherever_asked(request: pytest.FixtureRequest) -> None:
    """Treat files so in every test, with --windows-rules."""
    if request.config.getoption("windows_rules"):
        request.getfixturevalue("as_windows")


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """Return ComfyUI's folder, whose tokenizer files and classes some tests read."""
    return comfyui_folder(NEWEST)


@pytest.fixture(scope="session")
def start_comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ComfyServer]]:
    """Give `start(*extra_arguments, version=..., base=...)` -> a running server, ended with the session."""
    servers: list[ComfyServer] = []

    def start(*extra: str, version: str = NEWEST, base: Path | None = None) -> ComfyServer:
        base = base or tmp_path_factory.mktemp("comfy")
        pace = base / "custom_nodes" / "pace" / "__init__.py"
        pace.parent.mkdir(parents=True, exist_ok=True)
        pace.write_text(PACE, encoding="utf-8")
        server = ComfyServer(comfyui_folder(version), base, *extra, warmed=True)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_comfy: Callable[..., ComfyServer]) -> ComfyServer:
    """Return the shared server of the newest supported ComfyUI."""
    return start_comfy()


@pytest.fixture(scope="session")
def server_oldest(start_comfy: Callable[..., ComfyServer]) -> ComfyServer:
    """Return the shared server of the oldest supported ComfyUI."""
    return start_comfy(version=OLDEST)


@pytest.fixture(params=["newest", "oldest"])
def any_server(request: pytest.FixtureRequest) -> ComfyServer:
    """Run a test once on each supported ComfyUI."""
    return request.getfixturevalue("server" if request.param == "newest" else "server_oldest")


@pytest.fixture
def comfy(server: ComfyServer) -> ComfyClient:
    """Return a fresh client of the newest supported ComfyUI."""
    return ComfyClient(server.url)


@pytest.fixture
def comfy_oldest(server_oldest: ComfyServer) -> ComfyClient:
    """Return a fresh client of the oldest supported ComfyUI."""
    return ComfyClient(server_oldest.url)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Give the path of a whole random checkpoint."""
    from safetensors.torch import save_file
    from tiny_models import checkpoint_tensors

    path = tmp_path_factory.mktemp("models") / "random-tiny.safetensors"
    save_file(checkpoint_tensors(), path)
    return path


@pytest.fixture(scope="session")
def checkpoint_xl(tmp_path_factory) -> Path:
    """Give the path of a whole random checkpoint in the shape of Stable Diffusion XL."""
    from safetensors.torch import save_file
    from tiny_models import family_tensors

    path = tmp_path_factory.mktemp("models") / "toy.safetensors"
    save_file(family_tensors("sdxl"), path)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Give a folder of six captioned pictures in two shapes, three of them with masks."""
    import torch
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    noise = torch.Generator().manual_seed(7)
    for i in range(6):
        height = 64 + 32 * (i % 2)
        values = torch.randint(0, 256, (height, 64, 3), generator=noise, dtype=torch.uint8)
        Image.fromarray(values.numpy()).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"thing, number {i}", encoding="utf-8")
        if i < 3:
            Image.new("L", (64, height), 60 * (i + 1)).save(folder / f"{i}-masklabel.png")
    return folder


@pytest.fixture(scope="session")
def held(pictures, tmp_path_factory) -> Path:
    """Give a folder of two of these pictures: enough to validate on."""
    folder = tmp_path_factory.mktemp("held")
    for path in pictures.glob("[01].*"):
        shutil.copy(path, folder)
    return folder


STAND_INS = Path(__file__).parent / "stand_ins"  # libraries that people may install


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Give a fresh stand-in of a library by its name."""
    from lora_atelier.trainer_core.outward import sender

    names = {path.stem for path in STAND_INS.iterdir()}

    def forgotten() -> dict[str, Any]:
        known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
        for name in known:
            del sys.modules[name]
        return known

    real = forgotten()
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr(sender, "_last", {})
    monkeypatch.setattr(sender, "problems", {})
    yield import_module
    if (apprise := sys.modules.get("apprise")) is not None:
        apprise.release.set()
    forgotten()
    sys.modules.update(real)
