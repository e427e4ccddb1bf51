"""Errors of the disk in two sentences: which folder, how much is missing, what to do."""

import errno
import os
import re
import shutil
from unittest import mock

import pytest
from safetensors import SafetensorError

from lora_atelier.trainer_core.common.disk_errors import describe_disk_error

REMEDIES = {
    errno.ENOSPC: "Make room there.",
    errno.EDQUOT: "Delete files of yours on this disk, or ask for a larger share of it.",
    errno.EROFS: "Make this disk writable, or choose another folder.",
    errno.EACCES: "Give yourself access to the folder, or choose another one.",
    errno.EIO: "Check that the disk answers and has room.",
}


@pytest.mark.parametrize("number", REMEDIES)
def test_each_error_has_its_own_remedy(tmp_path, number):
    sentence = describe_disk_error(OSError(number, os.strerror(number), str(tmp_path / "a" / "file")))
    assert sentence.startswith(f"{tmp_path / 'a'} cannot be ") and os.strerror(number) in sentence
    assert sentence.endswith(f". {REMEDIES[number]}")
    assert (" are free" in sentence) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_full_disk_says_how_much_is_free_and_needed(tmp_path):
    usage = mock.Mock(free=3_000_000)
    with mock.patch.object(shutil, "disk_usage", return_value=usage):
        number, said = 112 if os.name == "nt" else 28, os.strerror(errno.ENOSPC)
        error = SafetensorError(f"Error while serializing: I/O error: {said} (os error {number})")
        sentence = describe_disk_error(error, tmp_path / "missing", 2_500_000_000, ", then press Run again")
    assert sentence == (
        f"{tmp_path / 'missing'} cannot be written ({os.strerror(errno.ENOSPC)}): 3.0 MB are free, about 2.5 GB are "
        "needed. Make room there, then press Run again."
    )
    with mock.patch.object(shutil, "disk_usage", side_effect=OSError(errno.EIO, "away")):
        assert "about 1.0 kB are needed. " in describe_disk_error(error, tmp_path, 1000)


def test_an_unfinished_folder_is_not_named(tmp_path):
    place = tmp_path / "saves" / ".01234567-1-0123456789abcdef.tmp" / "words" / "x"
    sentence = describe_disk_error(OSError(errno.EIO, "bad", str(place.parent)))
    assert re.match(re.escape(f"{tmp_path / 'saves'} cannot"), sentence)
    assert describe_disk_error(OSError("odd")).startswith("A file cannot be read or written (odd). ")
