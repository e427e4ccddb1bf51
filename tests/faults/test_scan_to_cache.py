"""What happens to files and disks between the scan and the cache."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scan_folder import draw, mask, masked_folder
from tiny_runs import run, tiny_config

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import BucketConfig, ConceptConfig, DatasetConfig, MaskConfig, TrainConfig
from lora_atelier.trainer_core.data import cache as cache_module
from lora_atelier.trainer_core.data.cache import Cache, CacheError
from lora_atelier.trainer_core.data.plan import Plan, build_plan
from lora_atelier.trainer_core.data.scan import Index, fingerprint, scan
from lora_atelier.trainer_core.models import LatentFormat
from lora_atelier.trainer_core.models.sd.autoencoder import ScaledAutoencoder
from lora_atelier.trainer_core.preflight.report import report
from lora_atelier.trainer_core.training import pixels
from lora_atelier.trainer_core.training.encode import encode_plan
from lora_atelier.trainer_core.training.encode_text import encode_texts
from lora_atelier.trainer_core.training.encoded import EncodingContext


class Halves(torch.nn.Module):
    """An autoencoder that keeps the mean of each 8 x 8 pixels."""

    dtype = torch.float32

    def encode(self, batch: torch.Tensor) -> SimpleNamespace:
        means = torch.nn.functional.avg_pool2d(batch, 8)
        return SimpleNamespace(latents=torch.cat([means, means[:, :1]], dim=1))


BASE: Any = SimpleNamespace(
    name="base",
    autoencoder=ScaledAutoencoder(Halves(), identity="means", scale=1.0),
    latents=LatentFormat(channels=4, pixels=8, step=8),
    text=SimpleNamespace(seen_as=""),
    inpainting=None,
    controls=None,
)
TRAIN = TrainConfig(
    epochs=1, resolution=64, bucket_step=32, buckets=BucketConfig(resolutions=("64", "96"), resolution_mode="all")
)


def dataset_of(folder: Path) -> DatasetConfig:
    return DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))


def planned(folder: Path) -> Plan:
    dataset = dataset_of(folder)
    return build_plan(scan(dataset), dataset, TRAIN)


def encode(plan: Plan, cache: Path, **callbacks: Any) -> dict[str, torch.Tensor]:
    """Encode a plan and return mean and mask of everything that it asks for."""
    with Cache(cache) as stored:
        encoded = encode_plan(BASE, plan, stored, torch.device("cpu"), Callbacks(**callbacks), prompts=None)
        samples = [sample for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples]
        found = {f"{s.picture} {s.crop}": encoded.latents(s)[0].clone() for s in samples}
        for sample in samples:
            covered = encoded.mask(sample)
            assert covered is not None
            found[f"mask {sample.picture} {sample.crop}"] = covered.clone()
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


UNIX = hasattr(os, "mkfifo")


def pipe(folder: Path) -> None:
    (folder / "2.png").unlink()
    os.mkfifo(folder / "2.png")


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a picture is deleted": (lambda f: (f / "2.png").unlink(), r"2\.png has vanished since the scan"),
    "a picture is changed": (lambda f: draw(f / "2.png", (9, 9, 9), (96, 64)), r"2\.png has changed since the scan"),
    "a picture is cut short": (lambda f: (f / "2.png").write_bytes(b""), r"2\.png has changed since the scan"),
    **({"a pipe takes a picture's place": (pipe, r"2\.png has vanished since the scan \(not a file")} if UNIX else {}),
    "a mask is deleted": (lambda f: (f / "2-masklabel.png").unlink(), r"2-masklabel\.png has vanished since the scan"),
    "a mask is changed": (
        lambda f: mask(f / "2-masklabel.png", 9, (96, 64)),
        r"2-masklabel\.png has changed since the scan",
    ),
    "the folder vanishes": (shutil.rmtree, r"1\.png has vanished since the scan"),
    "a sub-folder vanishes": (lambda f: shutil.rmtree(f / "sub"), r"sub/3\.png has vanished since the scan"),
}


@pytest.mark.parametrize(("change", "sentence"), GONE.values(), ids=GONE)
def test_what_changes_after_the_scan_is_named_and_never_stored(
    tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    plan, cache = planned(folder), tmp_path / "cache"
    expected = encode(plan, tmp_path / "other cache")
    shutil.copytree(folder, tmp_path / "kept")
    change(folder)
    with pytest.raises(ValueError, match=sentence) as error:
        encode(plan, cache)
    assert str(error.value).count(". ") == 0
    assert str(error.value).endswith(".")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", folder)
    assert equal(encode(plan, cache), expected)  # nothing wrong was stored under the old names


@pytest.mark.parametrize("name", ["a picture is changed", "a mask is changed"])
def test_a_changed_file_never_meets_what_was_stored_of_the_old_one(tmp_path: Path, name: str) -> None:
    folder = masked_folder(tmp_path / "pictures")
    before = encode(planned(folder), tmp_path / "cache")
    GONE[name][0](folder)
    after = encode(planned(folder), tmp_path / "cache")
    assert equal(after, encode(planned(folder), tmp_path / "empty cache"))
    assert {item for item in after if not torch.equal(after[item], before[item])} == {
        item for item in after if item.startswith("mask 1" if "mask" in name else "1 ")
    }


def test_a_run_says_in_one_sentence_what_changed_under_its_feet(tmp_path: Path, checkpoint: Path) -> None:
    folder = masked_folder(tmp_path / "pictures")
    config = tiny_config(checkpoint).replace(dataset=dataset_of(folder), train=TRAIN)
    notes: list[str] = []

    def vanish(note: str) -> None:
        """Take the folder away as soon as the scan has told its report."""
        notes.append(note)
        shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(
        ValueError, match=rf"^1\.png has vanished since the scan .*{folder}.*put it back, or start again"
    ):
        run(config, tmp_path, note=vanish)
    assert "4 pictures" in notes[0]
    assert not list(tmp_path.glob("*.safetensors"))


def test_nothing_is_ever_written_into_the_folder_of_the_pictures(tmp_path: Path) -> None:
    folder = masked_folder(tmp_path / "pictures")

    def state() -> dict[str, tuple[int, int]]:
        """Return size and time of every file and folder; a file that came and went changes its folder's time."""
        paths = [folder, *folder.rglob("*")]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before = state()
    with Index(tmp_path / "index") as index:
        dataset = dataset_of(folder)
        fingerprint(dataset, index)
        plan = build_plan(scan(dataset, index), dataset, TRAIN)
    encode(plan, tmp_path / "cache")
    report(plan)
    assert state() == before


def test_a_full_disk_is_reported_before_anything_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(masked_folder(tmp_path / "pictures"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(pixels, "load_picture", lambda *_: pytest.fail("a picture was read"))
    with pytest.raises(
        ValueError, match=r"Encoded pictures need \d+ MB and 0 MB are free in .*cache; make room, or set encodings"
    ):
        encode(plan, tmp_path / "cache")


def test_what_was_encoded_before_the_disk_was_full_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, cache = planned(masked_folder(tmp_path / "pictures")), tmp_path / "cache"
    expected = encode(plan, tmp_path / "other cache")
    monkeypatch.setattr(cache_module, "SHARD_BYTES", 0)  # every entry is written at once
    write, written = Path.write_bytes, []

    def fill(path: Path, data: bytes) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(CacheError, match=rf"{cache} cannot be written \(No space left on device\): .* are free"):
            encode(plan, cache)
    assert len(list(cache.glob("shard-*"))) == len(written) == 3
    done: list[tuple[str, int, int]] = []
    assert equal(encode(plan, cache, phase=lambda *phase: done.append(phase)), expected)
    assert done[-1] == ("encoding pictures", 8 - 3, 8 - 3)


@pytest.mark.parametrize(
    ("limit", "free", "said"), [(0, 10**9, ""), (5_000, 10**9, "more than the limit"), (0, 5_000, "")]
)
def test_captions_that_take_too_much_room_are_told_before_they_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, free: int, said: str
) -> None:
    encoded: list[str] = []

    def encode_text(text: str, device: torch.device) -> dict[str, torch.Tensor]:
        encoded.append(text)
        return {"cross": torch.zeros(250)}  # 1000 bytes

    base: Any = SimpleNamespace(text=SimpleNamespace(encoders=(), identity="words", encode=encode_text))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    notes: list[str] = []
    texts = {f"caption {number}" for number in range(10)}
    plan: Any = None  # of which captions need nothing
    with Cache(tmp_path, limit) as cache:
        told = Callbacks(note=notes.append)
        work = EncodingContext(base=base, plan=plan, cache=cache, device=torch.device("cpu"), callbacks=told)
        if free < 10_000:
            with pytest.raises(ValueError, match=r"10 encoded captions need 0 MB.*set caption_variants"):
                encode_texts(work, texts)
            assert len(encoded) == 1
            return
        encode_texts(work, texts)
    assert len(encoded) == 10 and all(said in note for note in notes) and len(notes) == bool(said)
