"""Fixtures of the whole suite: real ComfyUI servers, and which tests need a GPU.

How tests import the pack: lora_atelier.py beside this file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import NEWEST, OLDEST, comfyui_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch finds no CUDA device."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """Return ComfyUI's folder, whose tokenizer files and classes some tests read."""
    return comfyui_folder(NEWEST)


@pytest.fixture(scope="session")
def start_comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ComfyServer]]:
    """Give `start(*extra_arguments, version=..., base=...)` -> a running server, ended with the session."""
    servers: list[ComfyServer] = []

    def start(*extra: str, version: str = NEWEST, base: Path | None = None) -> ComfyServer:
        server = ComfyServer(comfyui_folder(version), base or tmp_path_factory.mktemp("comfy"), *extra)
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
