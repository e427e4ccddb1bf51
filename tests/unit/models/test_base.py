"""What base models are made of: small pieces, and None for what a model does not have."""

import inspect

import pytest
from tiny_models import model_of

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
