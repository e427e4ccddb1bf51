"""The cache gives back exactly what was put, by content, shares its folder and heals itself."""

import copy
import dataclasses
import errno
import io
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.data import cache as module
from lora_atelier.trainer_core.data.cache import Cache, CacheError, latent_key, mask_key, text_key
from lora_atelier.trainer_core.data.crops import fit

CROP = fit((1500, 1000), (640, 384))
BASE: dict[str, Any] = {
    "picture_digest": "d1",
    "crop": CROP,
    "background": "white",
    "vae_id": "v1",
    "dtype": torch.float32,
}
MASK: dict[str, Any] = {"mask_digest": "d1", "crop": CROP, "source": "file", "invert": False, "threshold": 0.0}
TEXT: dict[str, Any] = {"caption": "a", "encoder_id": "e"}
KEY = latent_key(**BASE)
STARTS = 300  # seconds at most until a process has imported torch, which Windows' way of starting does anew
TENSORS = {
    "mean": torch.arange(24, dtype=torch.float32).reshape(1, 4, 2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "fp16": torch.tensor([[0.25], [float("nan")]], dtype=torch.float16),
    "wide": torch.tensor([2**40 + 1]),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "folder/name": torch.tensor([3], dtype=torch.uint8),
}


def same(left: dict[str, torch.Tensor] | None, right: dict[str, torch.Tensor]) -> bool:
    """Tell whether all names, types, shapes and bytes are equal."""
    return left is not None and module._checksum("", left) == module._checksum(
        "", {name: tensor.detach().contiguous() for name, tensor in right.items()}
    )


def keys(count: int) -> list[str]:
    return [text_key(**(TEXT | {"caption": str(i)})) for i in range(count)]


def numbered(i: int, size: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size,), float(i)), "y": torch.tensor([i])}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def put_now(folder: Path, key: str, tensors: dict[str, torch.Tensor]) -> Path:
    """Write an entry as a shard of its own and return the file."""
    before = set(shards(folder))
    with Cache(folder) as cache:
        cache.put(key, tensors)
    (path,) = set(shards(folder)) - before
    return path


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# What comes back


def test_what_is_put_comes_back_bitwise_also_in_another_store(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get(KEY) is None
    assert not cache.has(KEY)
    cache.put(KEY, TENSORS)
    cache.flush()
    assert same(cache.get(KEY), TENSORS)
    other = Cache(cache.folder)
    assert other.has(KEY)
    assert same(other.get(KEY), TENSORS)
    assert files(tmp_path) == shards(cache.folder)
    assert len(files(tmp_path)) == 1


def test_many_entries_share_a_shard(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        for i, key in enumerate(keys(300)):
            cache.put(key, numbered(i))
        cache.put(KEY, {})
    assert len(shards(tmp_path)) == 1
    for reader in (cache, Cache(tmp_path)):
        assert all(same(reader.get(key), numbered(i)) for i, key in enumerate(keys(300)))
        assert reader.get(KEY) == {}
        assert not reader.has(keys(301)[-1])


def test_views_and_shared_tensors_can_be_put(tmp_path: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    views = {"a": base.T, "b": base[:, ::2], "c": base}
    put_now(tmp_path, KEY, views)
    assert same(Cache(tmp_path).get(KEY), views)


def test_a_tensor_changed_after_it_was_put_changes_nothing(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    with Cache(tmp_path) as cache:
        cache.put(KEY, {"x": tensor})
        tensor.zero_()
        assert same(cache.get(KEY), {"x": torch.ones(3)})
    assert same(Cache(tmp_path).get(KEY), {"x": torch.ones(3)})


def test_a_second_put_replaces_the_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for flush in (False, True, True):
        for i in range(2):
            cache.put(KEY, numbered(i))
            if flush:
                cache.flush()
            assert same(cache.get(KEY), numbered(i))


def test_later_reads_share_the_mapped_memory(tmp_path: Path) -> None:
    put_now(tmp_path, KEY, TENSORS)
    cache = Cache(tmp_path)
    first, second = cache.get(KEY), cache.get(KEY)
    assert first is not None
    assert second is not None
    assert first["mean"].data_ptr() == second["mean"].data_ptr()


def test_an_opened_entry_survives_the_deletion_of_its_file(tmp_path: Path) -> None:
    put_now(tmp_path, KEY, TENSORS)
    cache = Cache(tmp_path)
    entry = cache.get(KEY)
    shards(tmp_path)[0].unlink()
    assert same(cache.get(KEY), TENSORS)
    del cache
    assert same(entry, TENSORS)


def test_a_key_with_a_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a/b' contains a slash"):
        Cache(tmp_path).put("a/b", TENSORS)


# When shards are written


def test_pending_entries_are_readable_and_on_no_disk(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS)
    assert cache.has(KEY)
    assert same(cache.get(KEY), TENSORS)
    assert not files(tmp_path)
    cache.flush()
    cache.flush()
    assert len(shards(tmp_path)) == 1


def test_a_shard_is_written_when_its_bytes_are_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    cache = Cache(tmp_path)
    for i, key in enumerate(keys(100)):
        cache.put(key, numbered(i, size=2500))
    # 10 000 bytes, 8 bytes and about 500 bytes of header each: the tenth entry exceeds the 100 000
    assert len(shards(tmp_path)) == 10
    assert not cache._pending
    assert cache.size() == sum(path.stat().st_size for path in shards(tmp_path)) > 100 * 10_008


def test_replacing_a_pending_entry_does_not_count_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    cache = Cache(tmp_path)
    for i in range(100):
        cache.put(KEY, numbered(i, size=2500))
    assert not files(tmp_path)


def test_tiny_entries_cannot_make_a_header_beyond_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    with Cache(tmp_path) as cache:
        for key in keys(500):
            cache.put(key, {"x": torch.zeros(0)})
    assert len(shards(tmp_path)) > 5
    assert max(path.stat().st_size for path in shards(tmp_path)) < 2 * 20_000


def test_a_shard_is_written_when_its_oldest_entry_has_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    cache = Cache(tmp_path)
    written = []
    for i, key in enumerate(keys(8)):
        now = 1000.0 + 4 * i
        cache.put(key, numbered(i))
        written.append(len(shards(tmp_path)))
    # entries of 0, 4, 8 and 12 s make the first shard, those of 16 to 28 s the second
    assert written == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_pending_entries_are_written_when_an_exception_passes(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Cache(tmp_path) as cache:
        cache.put(KEY, TENSORS)
        raise error
    assert same(Cache(tmp_path).get(KEY), TENSORS)


def test_a_failing_last_write_is_reported_but_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(CacheError), Cache(tmp_path) as cache:
        cache.put(KEY, TENSORS)
    with pytest.raises(ZeroDivisionError), Cache(tmp_path) as cache:
        cache.put(KEY, TENSORS)
        raise ZeroDivisionError


# Keys


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value[:-1], changed(value[-1])) if value else (1,)
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CROP)])
def test_every_field_of_a_crop_counts(name: str) -> None:
    crop = copy.copy(CROP)
    object.__setattr__(crop, name, changed(getattr(CROP, name)))
    assert latent_key(**(BASE | {"crop": crop})) != KEY
    same = mask_key(**(MASK | {"crop": crop})) == mask_key(**MASK)
    assert same == (name == "frames")  # all frames of a clip have one mask


def test_every_part_of_a_key_counts() -> None:
    found = [KEY, mask_key(**MASK), text_key(**TEXT), latent_key(**(BASE | {"dtype": torch.bfloat16}))]
    for key, parts in ((latent_key, BASE), (mask_key, MASK), (text_key, TEXT)):
        found += [key(**(parts | {n: changed(v)})) for n, v in parts.items() if n not in ("crop", "dtype")]
    assert len(set(found)) == len(found) == 4 + 3 + 4 + 2
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in found)


# few values, so that equal parts are drawn as often as different ones; texts include quotes and lone surrogates
WORDS = st.one_of(st.sampled_from(["", "a", "b", '"', '","', "\ud800", "\udc00", "\U00010000"]), st.text(max_size=4))
COUNTS = st.integers(0, 3)
CROPS = st.builds(
    lambda x, y, flip: replace(CROP, offset=(x, y), flip=flip), COUNTS, COUNTS | COUNTS.map(float), st.booleans()
)
PARTS = st.one_of(
    st.tuples(
        st.just(latent_key),
        st.fixed_dictionaries(
            {"picture_digest": WORDS, "crop": CROPS, "background": WORDS, "vae_id": WORDS, "dtype": WORDS}
        ),
    ),
    st.tuples(
        st.just(mask_key),
        st.fixed_dictionaries(
            {
                "mask_digest": WORDS,
                "crop": CROPS,
                "source": WORDS,
                "invert": st.booleans(),
                "threshold": st.sampled_from([0, 0.0, -0.0, 0.5, 1, 1.0, 1e-9]),
            }
        ),
    ),
    st.tuples(
        st.just(text_key),
        st.fixed_dictionaries({"caption": WORDS, "encoder_id": WORDS}),
    ),
)


@examples(100)
@given(left=PARTS, right=PARTS, data=st.data())
def test_keys_are_equal_exactly_when_their_parts_are(left: Any, right: Any, data: st.DataObject) -> None:
    key, parts = left
    other, others = right
    assert (key(**parts) == other(**others)) == (left == right)
    name = data.draw(st.sampled_from(sorted(parts)))  # nearly equal parts, which independent draws seldom are
    if key is other:
        mixed = parts | {name: others[name]}
        assert (key(**mixed) == key(**parts)) == (mixed == parts)


def test_the_same_type_can_be_named_or_given() -> None:
    assert latent_key(**(BASE | {"dtype": "float32"})) == KEY


def test_a_new_format_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert latent_key(**BASE) != KEY


def test_odd_captions_have_keys() -> None:
    captions = ["", "\ud800", "\udc00", "?", "猫", "a\nb", '"', "a" * 50_000, "a" * 50_001]
    assert len({text_key(**(TEXT | {"caption": caption})) for caption in captions}) == len(captions)


# Damage


def flip_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda d: b"",
    "no length": lambda d: d[:4],
    "no header": lambda d: d[:60],
    "header alone": lambda d: d[: 8 + int.from_bytes(d[:8], "little")],
    "short": lambda d: d[:-1],
    "long": lambda d: d + b"x",
    "noise": lambda d: b"\xff" * 99,
    "text": lambda d: b"not a tensor file at all",
    "brackets": lambda d: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "a list": lambda d: (2).to_bytes(8, "little") + b"[]",
    "no metadata": lambda d: (2).to_bytes(8, "little") + b"{}",
    "zeros": lambda d: bytes(len(d)),
    "one bit": flip_last_byte,
}


@pytest.mark.parametrize("early", [True, False], ids=["before it is opened", "after it is opened"])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_shard_is_a_miss_is_deleted_and_can_be_rebuilt(
    tmp_path: Path, spoil: Callable[[bytes], bytes], early: bool
) -> None:
    tensors = {"mean": torch.randn(1, 4, 8, 8)}
    path = put_now(tmp_path, KEY, tensors)
    cache = None if early else Cache(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    cache = cache or Cache(tmp_path)
    assert cache.get(KEY) is None
    assert not path.exists()
    cache.put(KEY, tensors)
    cache.flush()
    assert same(cache.get(KEY), tensors)
    assert same(Cache(tmp_path).get(KEY), tensors)


@pytest.mark.parametrize("how", ["empty", "no header", "header alone", "short", "long"])
def test_a_shard_of_wrong_length_is_deleted_when_the_store_is_opened(tmp_path: Path, how: str) -> None:
    path = put_now(tmp_path, KEY, TENSORS)
    path.write_bytes(SPOILED[how](path.read_bytes()))
    Cache(tmp_path)
    assert not path.exists()


def test_a_wrong_entry_drops_its_shard_and_what_was_read_before_stays(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        for i, key in enumerate(keys(3)):
            cache.put(key, {"x": torch.full((100,), i, dtype=torch.uint8)})
    (path,) = shards(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"\1" * 100, b"\1" * 50 + b"\3" + b"\1" * 49))
    cache = Cache(tmp_path)
    first, second, third = keys(3)
    early = cache.get(first)
    assert cache.get(second) is None
    assert not path.exists()
    assert cache.get(third) is None
    for entry in (early, cache.get(first)):
        assert same(entry, {"x": torch.full((100,), 0, dtype=torch.uint8)})


SHARD = {key: numbered(i) for i, key in enumerate(keys(3))} | {KEY: TENSORS}


@pytest.fixture(scope="module")
def shard_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("shard")
    with Cache(folder) as cache:
        for key, tensors in SHARD.items():
            cache.put(key, tensors)
    return shards(folder)[0].read_bytes()


@examples(250)
@given(data=st.data())
def test_a_flipped_bit_anywhere_gives_no_wrong_tensor_and_is_noticed(shard_bytes: bytes, data: st.DataObject) -> None:
    place, bit = data.draw(st.integers(0, len(shard_bytes) - 1)), data.draw(st.integers(0, 7))
    spoiled = bytearray(shard_bytes)
    spoiled[place] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"shard-{'0' * 32}.safetensors"
        path.write_bytes(spoiled)
        cache = Cache(Path(folder))
        for key, tensors in SHARD.items():
            entry = cache.get(key)
            assert entry is None or same(entry, tensors)
        assert not path.exists()


@pytest.mark.parametrize("metadata", [None, {}, {"checksums": "{}"}, {"checksums": "[]"}, {"checksums": "no json"}])
def test_a_foreign_file_under_our_name_is_a_miss(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / f"shard-{'0' * 32}.safetensors"
    safetensors.torch.save_file({f"{KEY}/mean": torch.ones(3)}, path, metadata)
    assert Cache(tmp_path).get(KEY) is None
    assert not path.exists()


def test_files_of_others_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    names = [
        "lora.safetensors",
        "notes.txt",
        "shard-1.safetensors",
        f"shard-{'0' * 32}.safetensors.bak",
        ".shard-1.tmp",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
        os.utime(tmp_path / name, (0, 0))
    cache = Cache(tmp_path, limit=1)
    assert cache.size() == 0
    assert cache.prune() == 0
    assert sorted(path.name for path in files(tmp_path)) == sorted(names)


def test_opening_reads_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, key in enumerate(keys(5)):
        put_now(tmp_path, key, numbered(i, size=10_000))
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1) -> bytes | None:
            read.append(size or 0)
            return super().read(size)

    monkeypatch.setattr(module, "open", Counting, raising=False)
    monkeypatch.setattr(module, "safe_open", failing(errno.EIO))
    assert len(Cache(tmp_path)._index) == 5
    assert len(read) == 10
    assert sum(read) < 5 * 1000


# Disks that do not do what is asked


FAULTS = {
    "full at write": (module.os, "fsync", errno.ENOSPC),
    "full at rename": (module.os, "replace", errno.ENOSPC),
    "over quota": (module.os, "fsync", errno.EDQUOT),
    "read-only": (module.Path, "write_bytes", errno.EROFS),
    "no rights": (module.Path, "write_bytes", errno.EACCES),
    "no folder": (module.Path, "mkdir", errno.EROFS),
}


@pytest.mark.parametrize(("place", "name", "number"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("by_put", [True, False], ids=["put", "flush"])
def test_a_failed_write_says_so_leaves_nothing_behind_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int, by_put: bool
) -> None:
    cache = Cache(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing(number), raising=False)
        patch.setattr(module, "SHARD_BYTES", 0 if by_put else 10**9)
        with pytest.raises(CacheError) as caught:
            cache.put(KEY, TENSORS)
            cache.flush()
    assert isinstance(caught.value, RuntimeError)
    start = f"Encoded pictures cannot be cached: {tmp_path / 'cache'} cannot be written ({os.strerror(number)})"
    assert str(caught.value).startswith(start) and str(caught.value).endswith(".")
    assert not files(tmp_path)
    assert same(cache.get(KEY), TENSORS)
    cache.flush()
    assert same(Cache(tmp_path / "cache").get(KEY), TENSORS)


def test_a_file_in_the_folders_place_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(CacheError, match="cache cannot be read or written"):
        Cache(tmp_path / "cache")


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    path = put_now(tmp_path / "cache", keys(1)[0], TENSORS)
    cache = Cache(tmp_path / "cache")
    path.unlink()
    cache.folder.rmdir()
    assert not cache.has(keys(1)[0])
    cache.put(KEY, TENSORS)
    cache.flush()
    assert same(Cache(cache.folder).get(KEY), TENSORS)


def test_a_folder_that_refuses_every_change_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = put_now(tmp_path, KEY, TENSORS), put_now(tmp_path, keys(1)[0], TENSORS)
    bad.write_bytes(flip_last_byte(bad.read_bytes()))
    monkeypatch.setattr(module.os, "utime", failing(errno.EROFS))
    monkeypatch.setattr(module.Path, "unlink", failing(errno.EROFS))
    cache = Cache(tmp_path, limit=1)
    assert same(cache.get(KEY), TENSORS)
    assert cache.get(keys(1)[0]) is None
    cache.refresh()
    assert cache.get(keys(1)[0]) is None
    assert cache.prune() == 0
    assert set(shards(tmp_path)) == {good, bad}


def test_pruning_skips_what_the_system_refuses_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [put_now(tmp_path, key, numbered(i)) for i, key in enumerate(keys(3))]
    for i, path in enumerate(paths):
        os.utime(path, (i, i))
    unlink = Path.unlink

    def mapped(self: Path, missing_ok: bool = False) -> None:
        if self == paths[0]:
            raise PermissionError(errno.EACCES, "mapped elsewhere, as on Windows")
        unlink(self, missing_ok)

    monkeypatch.setattr(module.Path, "unlink", mapped)
    size = paths[0].stat().st_size
    assert Cache(tmp_path, limit=2 * size).prune() == size
    assert set(shards(tmp_path)) == {paths[0], paths[2]}


# Several stores on one folder


def test_refresh_finds_the_shards_of_others_and_reads_no_header_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    put_now(tmp_path, KEY, TENSORS)
    assert not cache.has(KEY)
    cache.refresh()
    assert same(cache.get(KEY), TENSORS)
    put_now(tmp_path, keys(1)[0], TENSORS)
    (second,) = {path for path in shards(tmp_path) if path.name not in cache._known}
    read, read_header = [], module._read_header
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read_header", lambda path: read.append(path) or failing(errno.EIO)())
        cache.refresh()  # the header cannot be read now: a miss until it can
        assert not cache.has(keys(1)[0])
    monkeypatch.setattr(module, "_read_header", lambda path: read.append(path) or read_header(path))
    cache.refresh()
    cache.refresh()
    assert same(cache.get(keys(1)[0]), TENSORS)
    assert read == [second, second]


def test_a_shard_that_another_pruned_is_a_miss_unless_it_was_read(tmp_path: Path) -> None:
    for i, key in enumerate(keys(2)):
        put_now(tmp_path, key, numbered(i))
    cache = Cache(tmp_path)
    assert cache.has(keys(2)[0])
    cache.put(KEY, TENSORS)
    cache.flush()
    assert Cache(tmp_path, limit=1).prune() > 0
    assert not files(tmp_path)
    assert same(cache.get(keys(2)[0]), numbered(0))
    assert same(cache.get(KEY), TENSORS), "what was written here is as safe as what was read"
    assert cache.get(keys(2)[1]) is None
    cache.put(keys(2)[1], numbered(1))
    cache.flush()
    assert same(cache.get(keys(2)[1]), numbered(1))


@pytest.mark.parametrize("error", [FileNotFoundError, RuntimeError])  # of safetensors' look at the file, of torch's
def test_a_shard_that_another_prunes_at_once_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def too_late(path: Path, framework: str) -> None:
        path.unlink()
        raise error("unable to open file")

    cache, other = Cache(tmp_path), Cache(tmp_path)
    cache.put(KEY, TENSORS)
    with monkeypatch.context() as patch:
        patch.setattr(module, "safe_open", too_late)
        cache.flush()
        assert not files(tmp_path)
        path = tmp_path / f"shard-{'0' * 32}.safetensors"
        other._adopt(module._Shard(path, {KEY: ("", ["mean"])}))
        path.write_bytes(b"")
        assert not other.has(KEY)
    assert same(cache.get(KEY), TENSORS)
    cache.flush()
    assert same(cache.get(KEY), TENSORS)
    assert same(Cache(tmp_path).get(KEY), TENSORS)
    assert len(shards(tmp_path)) == 1


def test_a_later_shard_of_another_does_not_displace_a_read_entry(tmp_path: Path) -> None:
    put_now(tmp_path, KEY, TENSORS)
    cache = Cache(tmp_path)
    assert cache.has(KEY)
    later = put_now(tmp_path, KEY, TENSORS)
    cache.refresh()
    later.write_bytes(flip_last_byte(later.read_bytes()))
    assert same(cache.get(KEY), TENSORS)


def work(folder: Path, number: int, together: Barrier) -> None:
    """Write a common and an own entry again and again while the other process does so and both prune."""
    cache = Cache(folder, limit=40_000)
    together.wait(STARTS)
    common = {"mean": torch.full((64, 64), 3.0)}
    for i in range(25):
        cache.put(KEY, common)
        cache.put(f"{number}-{i}", numbered(i))
        cache.flush()
        cache.refresh()
        assert same(cache.get(KEY), common)
        assert same(cache.get(f"{number}-{i}"), numbered(i))
        theirs = cache.get(f"{1 - number}-{i}")
        assert theirs is None or same(theirs, numbered(i))
        other = Cache(folder, limit=40_000)
        found = other.get(KEY)
        assert found is None or same(found, common)
        other.prune()


def test_processes_may_write_read_and_prune_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    together = context.Barrier(2)
    writers = [context.Process(target=work, args=(tmp_path, number, together)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(2 * STARTS)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert sorted(files(tmp_path)) == shards(tmp_path), "no temporary file is left"
    assert all(module._read_header(path) for path in shards(tmp_path))
    cache = Cache(tmp_path, limit=40_000)
    cache.prune()
    assert 0 < cache.size() <= 40_000


# Pruning


def test_reading_makes_a_shard_the_last_to_go(tmp_path: Path) -> None:
    paths = [put_now(tmp_path, key, numbered(i)) for i, key in enumerate(keys(5))]
    for i, path in enumerate(paths):
        os.utime(path, (1000 + i, 1000 + i))
    reader = Cache(tmp_path)
    assert reader.get(keys(5)[0]) is not None
    assert reader.has(keys(5)[2])
    size = paths[0].stat().st_size
    left = []
    for limit in (4, 3, 2, 1):
        assert Cache(tmp_path, limit=limit * size).prune() == size
        left.append([i for i, path in enumerate(paths) if path.exists()])
    assert left[:3] == [[0, 2, 3, 4], [0, 2, 4], [0, 2]]


def test_a_shard_is_marked_as_used_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_now(tmp_path, KEY, TENSORS)
    marked = []
    monkeypatch.setattr(module.os, "utime", marked.append)
    cache = Cache(tmp_path)
    assert all(cache.get(KEY) is not None for _ in range(3))
    assert marked == shards(tmp_path)


@examples(25)
@given(ages=st.permutations(range(6)), sizes=st.lists(st.integers(0, 2000), min_size=6, max_size=6), data=st.data())
def test_pruning_deletes_the_oldest_as_far_as_needed_and_nothing_in_use(
    ages: list[int], sizes: list[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [put_now(folder, key, numbered(i, sizes[i])) for i, key in enumerate(keys(6))]
        for age, path in zip(ages, paths, strict=True):
            os.utime(path, (1000 + age, 1000 + age))
        bytes_of = {path: path.stat().st_size for path in paths}
        total = sum(bytes_of.values())
        cache = Cache(folder, limit=data.draw(st.integers(1, total + 1000)))
        used = data.draw(st.sets(st.integers(0, 5)))
        for i in used:
            assert cache.get(keys(6)[i]) is not None
        pending = data.draw(st.booleans())
        if pending:
            cache.put(KEY, {"x": torch.zeros(200)})
        freed = cache.prune()

        # what must go, told the other way round: the shortest run of the oldest that brings the rest to the limit
        free_to_go = sorted((i for i in range(6) if i not in used), key=lambda i: ages[i])
        need = total + (800 + module._HEADER_BYTES if pending else 0) - cache.limit
        runs = [free_to_go[:n] for n in range(len(free_to_go) + 1)]
        gone = next((run for run in runs if sum(bytes_of[paths[i]] for i in run) >= need), free_to_go)
        assert {path for path in paths if not path.exists()} == {paths[i] for i in gone}
        assert freed == total - cache.size() == sum(bytes_of[paths[i]] for i in gone)
        assert all(cache.has(key) == (i not in gone) for i, key in enumerate(keys(6)))
        cache.flush()
        if len(gone) < len(free_to_go):
            assert cache.size() <= cache.limit


def test_what_is_written_here_is_not_pruned_here(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1)
    cache.put(KEY, TENSORS)
    cache.flush()
    assert cache.prune() == 0
    assert same(Cache(tmp_path).get(KEY), TENSORS)


def test_what_is_used_of_a_mostly_unused_shard_is_written_anew_and_the_space_comes_back(tmp_path: Path) -> None:
    large = {"mean": torch.arange(50_000, dtype=torch.float32)}
    before: list[Path] = []
    for start in (0, 10, 20):  # three shards of ten entries
        with Cache(tmp_path) as cache:
            for key in keys(30)[start : start + 10]:
                cache.put(key, large)
        before += set(shards(tmp_path)) - set(before)
    whole = sum(path.stat().st_size for path in before)
    used = [*keys(30)[:10:5], *keys(30)[10:18], keys(30)[29]]  # few of the first and third shard, most of the second
    cache = Cache(tmp_path, limit=1)
    assert all(cache.has(key) for key in used)
    cache.put("new", TENSORS)
    cache.flush()
    freed = cache.prune()
    assert cache.size() <= whole - freed + 5000 and cache.size() < 0.5 * whole
    assert before[1] in shards(tmp_path) and not {before[0], before[2]} & set(shards(tmp_path))
    for reader in (cache, Cache(tmp_path)):
        assert all(same(reader.get(key), large) for key in used) and same(reader.get("new"), TENSORS)
        assert reader.get(keys(30)[1]) is None
    assert cache.prune() == 0  # there is nothing more to gain


def test_nothing_is_written_anew_within_the_limit(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        for key in keys(10):
            cache.put(key, TENSORS)
    cache = Cache(tmp_path, limit=cache.size())
    assert cache.has(keys(1)[0]) and cache.prune() == 0 and cache.has(keys(2)[1])


def test_no_limit_prunes_no_shard(tmp_path: Path) -> None:
    put_now(tmp_path, KEY, TENSORS)
    assert Cache(tmp_path).prune() == 0
    assert Cache(tmp_path).has(KEY)
    assert Cache(tmp_path / "no folder", limit=1).prune() == 0


def test_pruning_removes_old_temporary_files_alone(tmp_path: Path) -> None:
    now = time.time()
    old, new = (tmp_path / f".{digit * 8}-1-{digit * 16}.tmp" for digit in "01")  # of other machines
    for path, age in ((old, 25 * 3600), (new, 23 * 3600)):
        path.write_bytes(b"half a shard")
        os.utime(path, (now - age, now - age))
    Cache(tmp_path).prune()
    assert files(tmp_path) == [new]


def test_the_header_can_be_read_by_any_reader_of_the_format(tmp_path: Path) -> None:
    path = put_now(tmp_path, KEY, TENSORS)
    loaded = safetensors.torch.load_file(path)
    assert same({name.removeprefix(f"{KEY}/"): tensor for name, tensor in loaded.items()}, TENSORS)
    with safetensors.safe_open(path, framework="pt") as file:
        assert list(json.loads(file.metadata()["checksums"])) == [KEY]


def test_entries_in_ram_are_read_and_never_written(tmp_path: Path) -> None:
    with Cache(tmp_path, limit=1) as disk:
        disk.put("old", {"x": torch.ones(3)})
    with Cache(tmp_path, limit=1, in_ram=True) as cache:
        assert cache.get("old") is not None  # what the disk has is used
        cache.put("new", {"x": torch.arange(3.0)})
        cache.flush()
        cache.prune()
    entry = cache.get("new")
    assert entry is not None and torch.equal(entry["x"], torch.arange(3.0)) and cache.has("old")
    assert len(list(tmp_path.glob("shard-*"))) == 1 and not Cache(tmp_path).has("new")
