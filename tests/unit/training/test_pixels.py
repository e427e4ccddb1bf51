"""Files are read and cut while the autoencoder works."""

import threading

import torch
from PIL import Image

from lora_atelier.trainer_core.data.crops import Crop
from lora_atelier.trainer_core.training import pixels


def test_threads_cut_what_is_cut_once_and_more_cuts_wait_until_they_are_asked_for(monkeypatch):
    image, own, here = Image.linear_gradient("L").convert("RGB"), pixels.cut, threading.get_ident()
    cuts = []
    monkeypatch.setattr(pixels, "cut", lambda *of: cuts.append(threading.get_ident()) or own(*of))
    crops = [Crop(resized=(80, 64), offset=(left, 0), bucket=(64, 64)) for left in (0, 16)]
    items = [("once", crops[0]), ("twice", crops[0]), ("twice", crops[1])]
    found = pixels.prepared_pixels(items, lambda _: image)
    next(found)
    assert len(cuts) == 1 and cuts[0] != here
    given = [each for _, each in found]
    assert cuts[1:] == [here, here]
    assert all(torch.equal(each[0], pixels.pixels(own(image, crop))) for each, crop in zip(given, crops, strict=True))
