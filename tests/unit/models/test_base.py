"""What base models are made of: small pieces, and None for what a model does not have."""

import inspect
from fractions import Fraction

import pytest
from tiny_models import model_of

from lora_atelier.trainer_core.common.axes import Size
from lora_atelier.trainer_core.models import base

MOST = 12  # members of a piece
PIECES = (
    base.Autoencoder,
    base.ConditionsOfBatch,
    base.ControlPictures,
    base.Denoiser,
    base.Host,
    base.Inpainting,
    base.Layers,
    base.Sampler,
    base.Text,
    base.TrainableText,
)


def members(protocol: type) -> set[str]:
    """List what a protocol asks for, also by those that it extends."""
    found = {name for kind in protocol.__mro__ for name in vars(kind) if not name.startswith("_")}
    return found | set(inspect.get_annotations(protocol))


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_each_piece_is_small(piece: type) -> None:
    assert 0 < len(members(piece)) <= MOST


def test_stable_diffusion_has_what_it_needs_and_no_more() -> None:
    model = model_of()
    for name, piece in (
        ("layers", base.Layers),
        ("denoiser", base.Denoiser),
        ("conditions", base.ConditionsOfBatch),
        ("text", base.Text),
        ("autoencoder", base.Autoencoder),
    ):
        assert all(
            hasattr(type(getattr(model, name)), each) or each in vars(getattr(model, name)) for each in members(piece)
        )
    assert model.inpainting is model.controls is model.sampler is model.host is None
    model.paints = True
    assert all(hasattr(model.inpainting, each) for each in members(base.Inpainting))


@pytest.mark.parametrize(("pixels", "axes"), [(8, (48, 32)), (16, (24, 16)), (Fraction(128, 3), (9, 6))])
def test_latents_have_the_height_of_a_picture_before_its_width(pixels: int | Fraction, axes: tuple[int, int]) -> None:
    found = base.LatentFormat(channels=4, pixels=pixels, step=128).axes((256, 384))
    assert found == axes and all(type(axis) is int for axis in found)


@pytest.mark.parametrize(
    ("size", "small"), [((768, 512), (384, 256)), ((512, 1024), (256, 512)), ((200, 96), (200, 96))]
)
def test_a_picture_is_scaled_down_by_its_shorter_side(size: Size, small: Size) -> None:
    assert base.LatentFormat(channels=4, pixels=8, step=8).at_most(size, 256) == small
