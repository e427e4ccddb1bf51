"""The store gives back exactly what was put, by content, and heals itself."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_atelier.trainer_core import store as module
from lora_atelier.trainer_core.buckets import fit
from lora_atelier.trainer_core.store import Store, latent_key, mask_key, text_key

CROP = fit((1500, 1000), (640, 384))
BASE: dict[str, Any] = {"picture_digest": "d1", "crop": CROP, "vae_id": "v1", "dtype": torch.float32}
KEY = latent_key(**BASE)
TENSORS = {
    "mean": torch.arange(24, dtype=torch.float32).reshape(1, 4, 2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}


def same(left: dict[str, torch.Tensor] | None, right: dict[str, torch.Tensor]) -> bool:
    return (
        left is not None
        and set(left) == set(right)
        and all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in right)
    )


def test_what_is_put_comes_back_bitwise_also_in_another_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get(KEY) is None
    assert not store.has(KEY)
    store.put(KEY, TENSORS)
    assert same(store.get(KEY), TENSORS)
    assert same(Store(tmp_path).get(KEY), TENSORS)
    assert Store(tmp_path).has(KEY)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")] == [Path(KEY[:2]) / f"{KEY}.safetensors"]


def test_views_and_shared_tensors_can_be_put(tmp_path: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    Store(tmp_path).put(KEY, {"a": base.T, "b": base[:, ::2], "c": base})
    assert same(Store(tmp_path).get(KEY), {"a": base.T, "b": base[:, ::2], "c": base})


def test_a_second_put_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(KEY, TENSORS)
    store.get(KEY)
    store.put(KEY, {"mean": torch.ones(2)})
    assert same(store.get(KEY), {"mean": torch.ones(2)})


def test_later_reads_return_the_same_object(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(KEY, TENSORS)
    assert store.get(KEY) is store.get(KEY)


def test_the_number_of_open_entries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OPEN", 3)
    store = Store(tmp_path)
    keys = [text_key(caption=str(i), encoder_id="e", clip_skip=1) for i in range(8)]
    for i, key in enumerate(keys):
        store.put(key, {"x": torch.tensor([i])})
    for _ in range(2):
        for i, key in enumerate(keys):
            assert same(store.get(key), {"x": torch.tensor([i])})
    assert len(store._open) == 3


def test_every_part_of_a_key_counts() -> None:
    changed = [
        BASE | {"picture_digest": "d2"},
        BASE | {"crop": replace(CROP, flip=True)},
        BASE | {"crop": replace(CROP, offset=(0, 20))},
        BASE | {"crop": fit((1500, 1000), (448, 320))},
        BASE | {"vae_id": "v2"},
        BASE | {"dtype": torch.bfloat16},
    ]
    keys = [KEY, *(latent_key(**parts) for parts in changed)]
    keys += [mask_key(mask_digest="d1", crop=CROP, invert=invert) for invert in (False, True)]
    keys += [text_key(caption=c, encoder_id=e, clip_skip=s) for c, e, s in [("", "e", 1), ("a", "e", 1)]]
    keys += [text_key(caption=c, encoder_id=e, clip_skip=s) for c, e, s in [("a", "f", 1), ("a", "e", 2)]]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


def test_equal_parts_give_equal_keys_and_names_are_no_part() -> None:
    assert latent_key(**(BASE | {"crop": fit((1500, 1000), (640, 384))})) == KEY
    assert latent_key(**(BASE | {"dtype": "float32"})) == KEY


def test_a_new_format_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert latent_key(**BASE) != KEY


def test_odd_captions_have_keys() -> None:
    captions = ["", "\ud800", "猫", "a\nb", '"', "a" * 10_000]
    assert len({text_key(caption=c, encoder_id="e", clip_skip=1) for c in captions}) == len(captions)


def flip_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: b"",
        lambda d: d[:4],
        lambda d: d[:60],
        lambda d: d[:-1],
        lambda d: d + b"x",
        lambda d: b"\xff" * 99,
        lambda d: b"not a tensor file at all",
        flip_last_byte,
    ],
    ids=["empty", "no length", "no header", "short", "long", "noise", "text", "one bit"],
)
def test_a_spoiled_entry_is_a_miss_is_deleted_and_can_be_rebuilt(tmp_path: Path, spoil) -> None:
    tensors = {"mean": torch.randn(1, 4, 8, 8)}
    Store(tmp_path).put(KEY, tensors)
    store = Store(tmp_path)
    path = store.path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    assert store.get(KEY) is None
    assert not path.exists()
    store.put(KEY, tensors)
    assert same(store.get(KEY), tensors)


def test_a_foreign_safetensors_file_without_checksum_is_a_miss(tmp_path: Path) -> None:
    import safetensors.torch

    store = Store(tmp_path)
    store.path(KEY).parent.mkdir(parents=True)
    safetensors.torch.save_file({"mean": torch.ones(3)}, store.path(KEY))
    assert store.get(KEY) is None


def test_an_opened_entry_survives_the_deletion_of_its_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(KEY, TENSORS)
    entry = store.get(KEY)
    store.path(KEY).unlink()
    assert same(entry, TENSORS)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Store(tmp_path).put(KEY, TENSORS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def write_often(folder: Path, number: int) -> None:
    store = Store(folder)
    for _ in range(25):
        store.put(KEY, {"mean": torch.full((64, 64), 3.0)})
        entry = Store(folder).get(KEY)
        assert entry is not None
        assert bool((entry["mean"] == 3).all())


def test_processes_may_write_the_same_key_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    writers = [context.Process(target=write_often, args=(tmp_path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert same(Store(tmp_path).get(KEY), {"mean": torch.full((64, 64), 3.0)})
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
