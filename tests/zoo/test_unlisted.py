"""Architectures in no list, written as custom nodes may write them: trained right, or refused in a sentence."""

import inspect
import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import comfy.conds
import comfy.model_management
import comfy.ops
import pytest
import torch
import torch.nn.functional as F
from durable import Cut, cut_at, equal
from torch import nn
from zoo.again import again
from zoo.linked import linked, live_of
from zoo.odd import CHANNELS, TEXT, WIDTH, Odd, OddModel
from zoo.test_train import configure, drawn_with, pictures, run_measured, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_train import run_unmeasured as run  # each is tried: they have the same name, and may differ in each pass
from zoo.zoo import ZOO, Row, build, fill, patcher_of

from lora_atelier.nodes.comfyui.connected.architecture import architecture_of
from lora_atelier.nodes.comfyui.connected.layers import blocks, list_layers
from lora_atelier.nodes.comfyui.connected.text import count_tokens
from lora_atelier.trainer_core.config import MemoryConfig

ROW = Row("Odd", (CHANNELS, 4, 6), (8, TEXT), {})


class Block(nn.Module):
    """Attention and MLP, as most transformers have them."""

    def __init__(self, ops):
        super().__init__()
        self.norm = ops.LayerNorm(WIDTH)
        self.attn_q, self.attn_k, self.attn_v = (ops.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = self.make_mlp(ops)

    def make_mlp(self, ops):
        return ops.Linear(WIDTH, WIDTH)

    def attend(self, tokens, keys=None):
        found = self.norm(tokens)
        keys = self.attn_k(found) if keys is None else keys
        return (self.attn_q(found) @ keys.mT / WIDTH**0.5).softmax(-1) @ self.attn_v(found)

    def forward(self, tokens):
        return tokens + self.attend(tokens) + F.gelu(self.mlp(tokens))


class Transformer(nn.Module):
    """Blocks of one kind, or of several in turn, on the tokens of a caption and a picture."""

    kinds, count = (Block,), 4

    def __init__(self, ops):
        super().__init__()
        self.enter, self.leave = ops.Linear(CHANNELS, WIDTH), ops.Linear(WIDTH, CHANNELS)
        self.read = ops.Linear(TEXT, WIDTH)
        self.blocks = nn.ModuleList([self.kinds[i % len(self.kinds)](ops) for i in range(self.count)])

    def run(self, tokens):
        for block in self.blocks:
            tokens = block(tokens)
        return tokens

    def forward(self, x, timesteps, context, **_):
        b, c, h, w = x.shape
        tokens = torch.cat([self.read(context), self.enter(x.flatten(2).mT)], dim=1)
        tokens = self.run(tokens + timesteps.to(tokens).view(-1, 1, 1).cos())
        return self.leave(tokens[:, -h * w :]).mT.reshape(b, c, h, w)


def transformer(*kinds, **methods):
    return type("Unlisted", (Transformer,), {"kinds": kinds or (Block,), **methods})


def made(network, model=OddModel):
    """Build a MODEL of a network, with random weights."""
    config = type("UnlistedConfig", (Odd,), {"network": network})({})
    config.set_inference_dtype(torch.float32, None)
    own = config.get_model({}, "", device="cpu")
    own.__class__ = model
    fill(own, 0)
    return patcher_of(own)


@pytest.fixture
def link(monkeypatch):
    """Link a MODEL as one of a row that the zoo has for this test alone."""
    monkeypatch.setitem(ZOO, "unlisted", ROW)
    monkeypatch.setattr("zoo.odd.Odd.network", Transformer, raising=False)
    monkeypatch.setattr("zoo.linked.settings", lambda row: SimpleNamespace(latent_format=Odd.latent_format()))

    def link(network, model=OddModel):
        return linked("unlisted", made(network, model))

    return link


def notes_of(config, folder, run=run):
    result, notes = run(config, folder)
    assert all(map(math.isfinite, result.losses))
    return result, " ".join(notes)


# --- trained right ---------------------------------------------------------------------------------------------


class GeluInside(comfy.ops.manual_cast.Linear):
    def forward(self, input):
        return super().forward(F.gelu(input))


class Normed(comfy.ops.manual_cast.Linear):
    def forward(self, input):
        return F.linear(input, F.normalize(self.weight, dim=1), self.bias)


class Scaled(comfy.ops.manual_cast.Linear):
    def forward(self, input, scale):
        return super().forward(input) * scale


class WithGelu(Block):
    def make_mlp(self, ops):
        return GeluInside(WIDTH, WIDTH)


class WithNormed(Block):
    def make_mlp(self, ops):
        return Normed(WIDTH, WIDTH)


class WithScale(Block):
    def make_mlp(self, ops):
        return Scaled(WIDTH, WIDTH)

    def forward(self, tokens):
        return tokens + self.attend(tokens) + self.mlp(tokens, 0.5)


class ByKeyword(Block):
    def forward(self, tokens):
        return tokens + self.attend(tokens) + self.mlp(input=tokens)


class Asked(Block):
    def forward(self, tokens, twice=False):
        return super().forward(tokens) + (self.mlp(tokens) if twice else 0)


def asking(self, tokens):
    for block in self.blocks:
        known = "twice" in inspect.signature(block.forward).parameters
        tokens = block(tokens, twice=True) if known else block(tokens)
    return tokens


class Turning(Block):
    """Complex numbers between blocks."""

    def forward(self, tokens):
        real = torch.view_as_real(tokens).flatten(-2) if tokens.is_complex() else tokens
        return torch.view_as_complex(super().forward(real).unflatten(-1, (-1, 2)).contiguous())


def turning(self, tokens):
    for block in self.blocks:
        tokens = block(tokens)
    return torch.view_as_real(tokens).flatten(-2)


class Counting(Block):
    """Writes into whole numbers that it is given."""

    def forward(self, tokens, count):
        count += 1
        return super().forward(tokens) * (1 + count / 10)


def counting(self, tokens):
    count = torch.zeros((), dtype=torch.long)
    for block in self.blocks:
        tokens = block(tokens, count)
    return tokens


@dataclass
class Out:
    tokens: torch.Tensor
    more: dict = field(default_factory=dict)


class Giving(Block):
    def forward(self, tokens):
        found = super().forward(tokens)
        return Out(found, {"half": found / 2})


def giving(self, tokens):
    for block in self.blocks:
        out = block(tokens)
        tokens = out.tokens + out.more["half"]
    return tokens


class Mixed(Transformer):
    """Blocks of all the kinds above whose layers a LoRA changes, each called in its own way."""

    kinds, count = (ByKeyword, Asked, Turning, Counting, Giving), 5

    def run(self, tokens):
        keyword, asked, turning, counting, giving = self.blocks
        tokens = asked(keyword(tokens), twice="twice" in inspect.signature(asked.forward).parameters)
        tokens = torch.view_as_real(turning(tokens)).flatten(-2)
        out = giving(counting(tokens, torch.zeros((), dtype=torch.long)))
        return out.tokens + out.more["half"]


class InDict(Block):
    """Keeps its keys in a dictionary, for all passes to come."""

    def __init__(self, ops):
        super().__init__(ops)
        self.cache = {}

    def forward(self, tokens):
        if "keys" not in self.cache:
            self.cache["keys"] = self.attn_k(self.norm(tokens))
        return tokens + self.attend(tokens, self.cache["keys"]) + F.gelu(self.mlp(tokens))


class InObject(Block):
    """Keeps its keys in an object."""

    def __init__(self, ops):
        super().__init__(ops)
        self.cache = SimpleNamespace(keys=None)

    def forward(self, tokens):
        if self.cache.keys is None:
            self.cache.keys = self.attn_k(self.norm(tokens))
        return tokens + self.attend(tokens, self.cache.keys) + F.gelu(self.mlp(tokens))


class CallingInTraining(Block):
    """As ComfyUI's fused operators for 8 bits, which draw with a layer's weight alone."""

    def forward(self, tokens):
        own = self.mlp.weight, self.mlp.bias
        found = self.mlp(tokens) if comfy.model_management.in_training else F.linear(tokens, *own)
        return tokens + self.attend(tokens) + F.gelu(found)


class OfTorch(nn.TransformerEncoderLayer):
    def __init__(self, ops):
        super().__init__(WIDTH, 2, 48, dropout=0.0, batch_first=True)


# Models that compute with the keys of their first pass for ever, also in ComfyUI.
STALE = ("keys kept in a dictionary", "keys kept in an object")
TRAINED = {  # a network, and the layers of its blocks that a LoRA cannot change
    "a gelu in its layers": (transformer(WithGelu), {"mlp"}),
    "a norm in its layers": (transformer(WithNormed), {"mlp"}),
    "layers that take a scale": (transformer(WithScale), {"mlp"}),
    "layers called by keyword": (transformer(ByKeyword), set()),
    "blocks whose signature is asked for": (transformer(Asked, run=asking), set()),
    "complex numbers between blocks": (transformer(Turning, run=turning), set()),
    "counts that blocks write into": (transformer(Counting, run=counting), set()),
    "objects with dictionaries": (transformer(Giving, run=giving), set()),
    "keys kept in a dictionary": (transformer(InDict), set()),
    "keys kept in an object": (transformer(InObject), set()),
    "layers called in training alone": (transformer(CallingInTraining), set()),
    "torch's own transformer layers": (transformer(OfTorch), {"proj"}),  # whose weight torch reads itself
    "blocks of two kinds in turn": (transformer(Block, ByKeyword), set()),
    "blocks of many kinds": (Mixed, set()),
}


# Layers and blocks as another case has them; what an object keeps is seen where it is resumed.
LIKE_OTHERS = (
    *("a norm in its layers", "keys kept in an object", "blocks of two kinds in turn"),
    *("layers called by keyword", "blocks whose signature is asked for"),
    *("counts that blocks write into", "objects with dictionaries"),
)


@pytest.mark.parametrize("case", [*(case for case in TRAINED if case not in LIKE_OTHERS), *again(*LIKE_OTHERS)])
def test_it_is_trained_recomputed_and_drawn_with_as_its_file(case, link, pictures, tmp_path):  # noqa: F811
    network, left_out = TRAINED[case]
    whole, said = notes_of(sampled(link(network), pictures), tmp_path / "whole", run_measured)
    base = link(network)
    layers = {name.partition(".")[0] for name in whole.tensors}
    listed = {layer.name for layer in list_layers(live_of(base).model.model) if "attn-mlp" in layer.presets}
    assert layers and {layer.rpartition("_")[2] for layer in listed - layers} >= left_out
    assert all(any(layer.endswith(part) for part in left_out) for layer in listed - layers if "norm" not in layer)
    assert ("so the LoRA leaves them out" in said) == bool(left_out)
    drawn = drawn_with(live_of(base), whole.tensors)
    assert case in STALE or (whole.samples - drawn).abs().max() <= 1.5 / 255
    config = sampled(link(network), pictures).replace(memory=MemoryConfig(checkpointing="full"))
    recomputed, notes = run(config, tmp_path / "recomputed")
    assert case in STALE or not any("gradient checkpointing stays off" in note for note in notes), notes
    assert recomputed.losses == pytest.approx(whole.losses, rel=1e-4)
    pairs = [(tensor.double(), recomputed.tensors[name].double()) for name, tensor in whole.tensors.items()]
    difference = sum((one - other).square().sum() for one, other in pairs)
    assert difference < 0.05**2 * sum(one.square().sum() for one, _ in pairs)


STATEFUL = ("keys kept in an object",)


@pytest.mark.parametrize("case", [*STATEFUL, *again(*(case for case in TRAINED if case not in STATEFUL))])
def test_it_is_resumed_to_the_last_bit(case, link, pictures, tmp_path):  # noqa: F811
    network, _ = TRAINED[case]
    whole, _ = run(sampled(link(network), pictures), tmp_path / "whole")
    with pytest.raises(Cut):
        run(sampled(link(network), pictures), tmp_path / "cut", step=cut_at(1))
    result, _ = run(sampled(link(network), pictures), tmp_path / "cut")
    assert whole.losses == result.losses and equal(whole.tensors, result.tensors)


class Remembering(Block):
    """What it computes depends on how often it ran in this pass."""

    def __init__(self, ops):
        super().__init__(ops)
        self.ran = 0

    def forward(self, tokens):
        self.ran += 1
        return super().forward(tokens) * (1 if self.ran % 2 else 0.3)


def remembering(self, tokens):
    for block in self.blocks:
        block.ran = 0
        tokens = block(tokens)
    return tokens


def test_blocks_that_compute_something_else_the_second_time_are_not_recomputed(link, pictures, tmp_path):  # noqa: F811
    network = transformer(Remembering, run=remembering)
    plain, said = notes_of(sampled(link(network), pictures), tmp_path / "plain")
    assert "gradient checkpointing stays off" in said
    config = sampled(link(network), pictures).replace(memory=MemoryConfig(checkpointing="full"))
    asked, _ = run(config, tmp_path / "asked")
    assert asked.losses == plain.losses and equal(asked.tensors, plain.tensors)


def test_blocks_of_two_kinds_and_encoders_with_decoders_are_found():
    model = made(transformer(Block, WithScale)).model
    assert blocks(model.diffusion_model) == [f"blocks.{i}" for i in range(4)]

    class Halves(Transformer):
        def __init__(self, ops):
            super().__init__(ops)
            self.encoder, self.decoder = self.blocks[:2], self.blocks[2:]
            del self.blocks

    assert blocks(made(Halves).model.diffusion_model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


class Seeing(OddModel):
    """Reads what ComfyUI's sampler always gives."""

    def extra_conds(self, **kwargs):
        assert kwargs["denoise_mask"] is None
        return {**super().extra_conds(**kwargs), "seen": comfy.conds.CONDConstant(kwargs["seed"] * 0)}


def test_a_model_reads_what_the_sampler_gives(link, pictures, tmp_path):  # noqa: F811
    result, _ = run(sampled(link(Transformer, Seeing), pictures), tmp_path)
    assert result.finished


@pytest.mark.parametrize("patch", [None, nn.Conv2d(1, 1, 1), (), 2, (1, 2, 2)], ids=str)
def test_a_patch_of_any_kind_gives_a_step(patch):
    patcher = made(Transformer)
    patcher.model.diffusion_model.patch_size = patch
    wanted = 16 if patch in (2, (1, 2, 2)) else 8
    assert architecture_of(patcher).step == wanted


class Tokenized:
    def __init__(self, tokens):
        self.tokens = tokens

    def tokenize(self, text):
        return self.tokens


@pytest.mark.parametrize(
    ("tokens", "number"), [({"a": [1, 2, 3]}, 3), ([1, 2], 2), ({"a": [[(1, 1.0)] * 5]}, 5), ({}, 0)]
)
def test_tokens_of_any_form_are_counted(tokens, number):
    assert count_tokens(Tokenized(tokens), "text", weights=False) == number


# --- refused, or told ------------------------------------------------------------------------------------------


class OwnFormula(OddModel):
    """Makes clean latents itself, and ignores its sampling."""

    def _apply_model(self, x, t, c_concat=None, c_crossattn=None, *_, **__):
        return x - t.view(-1, 1, 1, 1) * self.diffusion_model(x, t, context=c_crossattn)


class Wide(Transformer):
    def forward(self, x, timesteps, context, **_):
        return torch.cat([super().forward(x, timesteps, context)] * 2, dim=1)


class Steep(Block):
    def forward(self, tokens):
        zero = (tokens - tokens.detach()) * 0
        return super().forward(tokens) + zero.sqrt().nan_to_num()


class Chance(Block):
    def forward(self, tokens):
        return super().forward(tokens) + torch.randn_like(tokens)


@torch.library.custom_op("atelier_zoo::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


UNKNOWN = torch.library.Library("atelier_zoo", "FRAGMENT")  # torch goes on without gradients, with a warning
UNKNOWN.define("halved(Tensor x) -> Tensor")
UNKNOWN.impl("halved", lambda x: torch.from_numpy(x.detach().numpy() / 2), "CPU")


class GivingNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def hiding(hide):
    """Blocks that do something to tokens before their MLP."""

    class Hiding(Block):
        def forward(self, tokens):
            return super().forward(tokens) + self.mlp(hide(tokens))

    return transformer(Hiding, count=2)


@torch.no_grad()
def halved_in_place(tokens):
    return tokens.mul_(0.5)


def scaled_by_number(tokens):
    return tokens * tokens.square().mean().item()


HIDING = {  # what gives no gradient: the words of the refusal, and what it does
    "atelier_zoo.doubled in Hiding (blocks.1)": lambda tokens: torch.ops.atelier_zoo.doubled(tokens),
    "atelier_zoo.halved in Hiding (blocks.1)": lambda tokens: torch.ops.atelier_zoo.halved(tokens),
    "GivingNone in Hiding (blocks.1)": lambda tokens: GivingNone.apply(tokens),
    "detach in Hiding (blocks.1)": lambda tokens: tokens.detach() * 2,
    "mul_ under no_grad in Hiding (blocks.1)": lambda tokens: halved_in_place(tokens + 0),
    "item in Hiding (blocks.1)": scaled_by_number,
}


# In every run: of a custom operator with and without a warning, of a function of autograd, a write, and a number;
# detach is as data in test_right_or_refused.py.
NAMED = [sentence for sentence in HIDING if not sentence.startswith("detach")]


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered.*:UserWarning")
@pytest.mark.parametrize("sentence", [*NAMED, *again(*(each for each in HIDING if each not in NAMED))])
def test_operators_without_a_gradient_are_named(sentence, link, pictures, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=re.escape(sentence)) as found:
        run(configure(link(hiding(HIDING[sentence])), pictures), tmp_path)
    assert "this MODEL cannot be trained" in str(found.value) and "link another MODEL" in str(found.value)


def test_a_detached_number_that_cancels_out_does_no_harm(link, pictures, tmp_path):  # noqa: F811
    network = hiding(lambda tokens: (tokens - tokens.detach().amax()).softmax(-1))
    _, said = notes_of(configure(link(network), pictures, steps=1), tmp_path)
    assert "hands none on" not in said and "leaves them out" not in said


class Reading(Block):
    """Computes its MLP twice, and calls it once; its spare layer never."""

    def __init__(self, ops):
        super().__init__(ops)
        self.spare = ops.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return super().forward(tokens) + F.linear(tokens, self.mlp.weight, self.mlp.bias)


def test_layers_that_are_not_called_are_named_and_not_saved(link, pictures, tmp_path):  # noqa: F811
    result, said = notes_of(configure(link(transformer(Reading)), pictures, steps=1), tmp_path)
    assert "4 layers are never called by the MODEL, so the LoRA leaves them out: lora_unet_blocks_0_spare" in said
    assert "4 layers are computed by other code as well, so the LoRA leaves them out: lora_unet_blocks_0_mlp" in said
    parts = {name.partition(".")[0].rpartition("_")[2] for name in result.tensors}
    assert {"q", "k", "v"} == parts - {"norm", "enter", "leave", "read"}


REFUSED = {
    "its code changes what its network predicts": (Transformer, OwnFormula),
    "latents and its predictions differ": (Wide, OddModel),
    "gradients of this MODEL are not finite": (transformer(Steep), OddModel),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_trained_is_refused_before_the_first_step(sentence, link, pictures, tmp_path):  # noqa: F811
    network, model = REFUSED[sentence]
    with pytest.raises(ValueError, match=sentence):
        run(configure(link(network, model), pictures), tmp_path)


def test_a_model_that_draws_random_numbers_is_told(link, pictures, tmp_path):  # noqa: F811
    _, said = notes_of(configure(link(transformer(Chance)), pictures, steps=1), tmp_path)
    assert "draws random numbers of its own" in said


def test_tensors_of_inference_mode_in_lists_and_objects_are_trained_with(link, pictures, tmp_path):  # noqa: F811
    class Holding(Transformer):
        def __init__(self, ops):
            super().__init__(ops)
            self.scales = [torch.ones(WIDTH) * 1.1, {"more": SimpleNamespace(shift=torch.ones(WIDTH) * 0.1)}]

        def run(self, tokens):
            return super().run(tokens * self.scales[0] + self.scales[1]["more"].shift)

    with torch.inference_mode():
        base = link(Holding)
    result, _ = run(configure(base, pictures), tmp_path)
    assert result.finished and live_of(base).model.model.diffusion_model.scales[0].is_inference()


def test_a_network_is_neutral_where_a_model_computes_under_autocast(link, pictures, tmp_path):  # noqa: F811
    class Cast(Block):
        def forward(self, tokens):
            with torch.autocast("cpu", torch.bfloat16):
                return tokens + super().forward(tokens).float()

    result, _ = run(configure(link(transformer(Cast)), pictures, steps=2), tmp_path)
    assert result.finished and all(map(math.isfinite, result.losses))


def test_the_zoo_is_as_it_was():
    assert "unlisted" not in ZOO and build("flux_dev")
