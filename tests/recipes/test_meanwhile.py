"""While the UNet is read from the disk, the other parts of the model encode pictures and captions."""

import threading
import time

import pytest
import torch
from clip_tokenizer import TOKENIZER
from safetensors.torch import load_file, save_file
from tiny_runs import run, tiny_config

from lora_atelier.trainer_core.common.cancel import NoLongerWanted, look
from lora_atelier.trainer_core.common.side_by_side import begin, result_of
from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models.sd import load
from lora_atelier.trainer_core.models.sd.source import StableDiffusionFiles

pytestmark = pytest.mark.usefixtures("no_estimates")
LONG = 60  # seconds after which a test fails that would wait for ever


class Cancel(BaseException):
    """What a person's Cancel raises."""


def read_by(monkeypatch, reads):
    """Let `reads(fill)` read the UNet; fill() does it."""
    fill_unet = load.fill_unet

    def fill(*args, **options):
        return reads(lambda: fill_unet(*args, **options))

    monkeypatch.setattr(load, "fill_unet", fill)


def from_disk(checkpoint):
    """Settings whose model every run reads for itself."""
    return {"source": StableDiffusionFiles(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))}


def test_pictures_and_captions_are_encoded_before_the_unet_is_there(checkpoint, pictures, tmp_path, monkeypatch):
    config, encoded = tiny_config(checkpoint, pictures), threading.Event()
    usual = run(config, tmp_path / "usual")

    def reads(fill):
        assert encoded.wait(LONG), "the run waited for the UNet before it encoded"
        return fill()

    def phase(what, done, total):
        if str(what) == "encoding captions" and done == total:
            encoded.set()

    read_by(monkeypatch, reads)
    found = run(config, tmp_path / "meanwhile", phase=phase, **from_disk(checkpoint))
    ours, theirs = load_file(found.path), load_file(usual.path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_unet_that_cannot_be_used_ends_the_encoding(checkpoint, pictures, tmp_path, monkeypatch):
    tensors = load_file(checkpoint)
    tensors["model.diffusion_model.out.2.bias"][0] = float("nan")
    broken, phases = tmp_path / "broken.safetensors", []
    save_file(tensors, broken)

    def phase(what, done, total):
        phases.append(str(what))
        end = time.monotonic() + LONG
        while str(what) == "encoding pictures" and time.monotonic() < end:  # a long one
            look()

    with pytest.raises(
        ValueError, match=r"the UNet of broken.safetensors: out.2.bias holds values that are not finite"
    ):
        run(tiny_config(broken, pictures), tmp_path, phase=phase, **from_disk(broken))
    assert phases.count("encoding pictures") <= 1 and "encoding captions" not in phases


def test_later_threads_compute_with_as_many_of_torch_as_before():
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        assert result_of(begin(torch.get_num_threads)) == 1
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (found, torch.get_num_threads()) == ([2], 2)
    finally:
        torch.set_num_threads(before)


def test_a_cancel_ends_the_reading(checkpoint, pictures, tmp_path, monkeypatch):
    ended, begun = threading.Event(), threading.Event()

    def reads(fill):
        begun.set()
        try:
            while True:  # a file without end
                look()
        except NoLongerWanted:
            ended.set()
            raise

    def check():
        if begun.is_set():
            raise Cancel

    read_by(monkeypatch, reads)
    with pytest.raises(Cancel):
        run(tiny_config(checkpoint, pictures), tmp_path, check=check, **from_disk(checkpoint))
    assert ended.wait(LONG)
