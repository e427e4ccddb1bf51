"""The bucket rule sd_scripts gives the sizes that sd-scripts' own BucketManager gave for these pictures."""

from __future__ import annotations

import pytest

from lora_atelier.trainer_core.config import BucketConfig
from lora_atelier.trainer_core.data.buckets import BucketChoice, parse_resolution
from lora_atelier.trainer_core.data.shapes import shape_of

# picture, resolution, min_bucket_reso, max_bucket_reso, bucket_reso_steps, bucket_no_upscale, bucket, resized
THEIRS = [
    ((832, 256), 512, 256, 1024, 64, False, (832, 256), (832, 256)),  # as it stands
    ((1664, 512), 512, 256, 1024, 64, False, (832, 256), (832, 256)),
    ((832, 256), 512, 256, 1024, 32, False, (896, 288), (936, 288)),
    ((832, 256), 1024, 256, 2048, 64, False, (1792, 576), (1872, 576)),
    ((2048, 512), 512, 256, 1024, 64, False, (1024, 256), (1024, 256)),
    ((900, 700), 512, 320, 768, 32, False, (576, 448), (576, 448)),
    ((832, 256), 512, 256, 1024, 64, True, (832, 256), (832, 256)),
    ((833, 257), 512, 256, 1024, 48, True, (816, 240), (833, 257)),
]


@pytest.mark.parametrize(("size", "resolution", "least", "most", "step", "no_upscale", "bucket", "resized"), THEIRS)
def test_pictures_get_the_sizes_of_sd_scripts(size, resolution, least, most, step, no_upscale, bucket, resized) -> None:
    options = BucketConfig(shapes="sd_scripts", min_side=least, max_side=most, no_upscale=no_upscale)
    assert shape_of(size, parse_resolution(str(resolution)), options, step) == BucketChoice(bucket, resized)


def test_our_own_rule_crops_what_theirs_keeps_whole() -> None:
    own = shape_of((832, 256), parse_resolution("512"), BucketConfig(), 64)
    assert own.bucket == (960, 256) and own.resized == (960, 295)
