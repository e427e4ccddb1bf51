"""Long work looks for a Cancel: in the thread that may be cancelled, and in those that work for it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from lora_atelier.trainer_core.common.cancel import NoLongerWanted, cancellable, look
from lora_atelier.trainer_core.common.files import BLOCK, file_digest
from lora_atelier.trainer_core.data.scan.folder import list_files
from lora_atelier.trainer_core.data.scan.index import Index, in_threads


class Cancel(BaseException):
    """What a person's Cancel raises."""


class Button:
    """A check that raises once, at its n-th call, as ComfyUI's does."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Cancel


def test_a_look_raises_what_the_innermost_check_raises():
    look()  # nobody may cancel
    outer, inner = Button(2), Button(1)
    with cancellable(outer):
        look()
        with cancellable(None):
            look()
        with pytest.raises(Cancel), cancellable(inner):
            look()
        assert (outer.calls, inner.calls) == (1, 1)
        with pytest.raises(Cancel):
            look()
    look()


def test_threads_stop_after_the_cancel_and_never_raise_it():
    button, begun, cancelled = Button(1), threading.Event(), threading.Event()

    def work() -> str:
        look()
        begun.set()
        cancelled.wait()
        look()
        return "worked on"

    with cancellable(button), ThreadPoolExecutor(1) as pool:
        future = pool.submit(copy_context().run, work)
        begun.wait()
        assert button.calls == 0  # a thread leaves the check alone
        with pytest.raises(Cancel):
            look()
        cancelled.set()
        with pytest.raises(NoLongerWanted):
            future.result()


def test_hashing_looks_at_every_block(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(5 * BLOCK))
    button = Button(3)
    with cancellable(button), pytest.raises(Cancel):
        file_digest(path)
    assert button.calls == 3


def test_a_cancel_ends_reading_in_threads_and_what_has_not_begun(tmp_path):
    """The check is called while a file is read, not only between files."""
    begun, read = threading.Event(), []

    def work(number: int) -> None:
        read.append(number)
        begun.set()
        while True:  # a file without end
            look()

    def check() -> None:
        if begun.is_set():
            raise Cancel

    with ThreadPoolExecutor(1) as pool, pytest.raises(Cancel):
        in_threads(pool, work, range(100), check=check)
    assert read == [0]


def test_listing_a_folder_and_its_index_can_be_cancelled(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number))
    with cancellable(Button(4)), pytest.raises(Cancel):
        list_files(tmp_path, True)
    files = list_files(tmp_path, True)
    with Index() as index:
        assert len(list(index.digests(files))) == 5
