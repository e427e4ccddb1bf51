"""MODELs as nodes of others patch them: each is trained as it draws, or refused in a sentence."""

from types import MethodType

import comfy.lora
import comfy.model_patcher
import comfy.patcher_extension
import pytest
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection
from zoo import odd
from zoo.again import again
from zoo.linked import live_of
from zoo.test_train import drawn_with, pictures, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_unlisted import link, made, notes_of  # noqa: F401 (link is a fixture)

from lora_atelier.nodes.comfyui.connected.check import check_connected


def network_of(model):
    return model.model.diffusion_model


# --- refused -----------------------------------------------------------------------------------------------------


def caches_blocks(model):
    """A cache of the first block's change, which lets the others be skipped, in a wrapper of the network."""
    kept = {}

    def wrapped(executor, *args, **kwargs):
        if "made" not in kept:
            kept["made"] = executor(*args, **kwargs)
        return kept["made"]

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "cache", wrapped)


def caches_calls(model):
    model.set_model_unet_function_wrapper(lambda apply, given: apply(given["input"], given["timestep"], **given["c"]))


def couples_attention(model):
    """A prompt for each region, by queries and keys that it changes."""
    model.set_model_attn2_patch(lambda q, k, v, extra: (q, k * 2, v))


def adapts_pictures(model):
    """A picture beside the caption, in the attention of each block."""
    model.set_model_patch_replace(lambda q, k, v, extra: q, "attn2", "middle", 0)


def weakens_skips(model):
    model.set_model_output_block_patch(lambda h, skip, options: (h * 1.1, skip * 0.9))


def shrinks(model):
    model.set_model_input_block_patch(lambda h, options: h[..., ::2, ::2])


def bypasses(model):
    """A LoRA beside the layers, put in at each load."""
    layer = network_of(model).blocks[0].mlp
    own = layer.forward
    injection = PatcherInjection(
        inject=lambda patcher: setattr(layer, "forward", lambda x: own(x) * 2),
        eject=lambda patcher: setattr(layer, "forward", own),
    )
    model.set_injections("bypass_lora", [injection])


def exchanges_forward(model):
    def forward(network, *args, **kwargs):
        return type(network).forward(network, *args, **kwargs)

    model.add_object_patch("diffusion_model.forward", MethodType(forward, network_of(model)))


REFUSED = {  # what a node leaves, and what is named
    caches_blocks: "wrappers",
    caches_calls: "model_function_wrapper",
    couples_attention: "patches",
    adapts_pictures: "patches_replace",
    weakens_skips: "patches",
    shrinks: "patches",
    bypasses: "injections",
    exchanges_forward: "diffusion_model.forward",
}


@pytest.mark.parametrize("patch", REFUSED, ids=lambda each: each.__name__)
def test_what_changes_passes_is_refused_by_what_it_leaves(patch):
    model = made(odd.Rows)
    patch(model)
    with pytest.raises(
        ValueError, match=rf"is changed while it runs \({REFUSED[patch]}\), by a node that wraps it; link"
    ):
        check_connected(model, None, None)


# --- trained as they draw, or refused by the trial ---------------------------------------------------------------


def before_sampling(model):
    """Changes the network only while ComfyUI samples."""
    block = network_of(model).blocks[1]
    own = block.forward
    model.add_callback(CallbacksMP.ON_PRE_RUN, lambda _: setattr(block, "forward", lambda tokens: own(tokens) * 0.5))
    model.add_callback(CallbacksMP.ON_CLEANUP, lambda _: block.__dict__.pop("forward", None))


def wraps_weights(model):
    """Changes weights as they are used."""
    for n in range(4):
        model.add_weight_wrapper(f"diffusion_model.blocks.{n}.mlp.weight", lambda weight: weight * 0.5)


def reads_options(model):
    """Attention that is masked by what a node has put into transformer_options."""
    network = network_of(model)
    model.model_options["transformer_options"]["regions"] = {"strength": 0.5}

    def forward(self, x, timesteps, context, transformer_options, **more):
        return type(self).forward(self, x, timesteps, context * transformer_options["regions"]["strength"], **more)

    network.forward = MethodType(forward, network)


def overrides_attention(model):
    """A kernel of attention without gradients."""
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda own, *args, **kw: own(
        *(each.detach() for each in args[:3]), *args[3:], **kw
    )


def merges_lazily(model):
    """A merge of two models, which ComfyUI computes as it loads."""
    own = model.model.state_dict()
    keys = [f"diffusion_model.blocks.{n}.mlp.weight" for n in range(4)]
    model.add_patches({key: (torch.ones_like(own[key]) * 0.1,) for key in keys}, 0.5, 0.5)


def another_class(model):
    """A network whose class is exchanged, as samplers with memory of their own do."""
    network = network_of(model)
    network.__class__ = type(
        "Regional",
        (type(network),),
        {"step": lambda self, number, block, tokens, timesteps: block(tokens) * (1 + number / 10)},
    )


def in_pixels_of_its_own(model):
    """Latents that are scaled another way."""
    model.model.process_latent_in = lambda latent: latent * 2
    model.model.process_latent_out = lambda latent: latent / 2


AS_DRAWN = (reads_options, overrides_attention, merges_lazily, another_class, in_pixels_of_its_own)
# Ways that other networks of the zoo have, too, or, as attention, nodes of test_session.py.
AS_OTHERS = (merges_lazily, in_pixels_of_its_own, overrides_attention)
STOPPED = {  # what training would not see, or a LoRA's file would not do
    before_sampling: "a node changes it whenever ComfyUI samples, so that it would draw with another network",
    wraps_weights: "it computes with weights of its layers in ways of its own, .*first in blocks.0",
}


@pytest.mark.parametrize("patch", [*(p for p in AS_DRAWN if p not in AS_OTHERS), *again(*AS_OTHERS)])
def test_it_is_trained_as_it_draws(patch, link, pictures, tmp_path):  # noqa: F811
    base = link(odd.Rows)
    patch(live_of(base).model)
    result, said = notes_of(sampled(base, pictures), tmp_path)
    assert "leaves them out" not in said
    drawn, bare, plain = (
        drawn_with(live_of(each), tensors)
        for each, tensors in ((base, result.tensors), (base, {}), (link(odd.Rows), result.tensors))
    )
    assert (result.samples - drawn).abs().max() <= 1.5 / 255 < (result.samples - bare).abs().max()
    assert patch is overrides_attention or (result.samples - plain).abs().max() > 1.5 / 255


@pytest.mark.parametrize("patch", STOPPED)
def test_what_training_does_not_see_is_refused(patch, link, pictures, tmp_path):  # noqa: F811
    base = link(odd.Rows)
    patch(live_of(base).model)
    with pytest.raises(ValueError, match=STOPPED[patch]):
        notes_of(sampled(base, pictures), tmp_path)


def test_callbacks_that_change_nothing_do_no_harm(link, pictures, tmp_path):  # noqa: F811
    """As those of nodes that exchange attention, which training computes by torch."""
    base, ran = link(odd.Rows), []
    live_of(base).model.add_callback(CallbacksMP.ON_PRE_RUN, ran.append)
    result, _ = notes_of(sampled(base, pictures), tmp_path)
    assert result.finished and len(ran) > 2


class Quantized(torch.Tensor):
    """Codes of 8 bits in blocks, which names the shape of the weight that they stand for."""

    @property
    def shape(self):
        return torch.Size((odd.WIDTH, odd.WIDTH))


class QuantizedLinear(torch.nn.Linear):
    """Makes its weight of codes for each pass, and puts the patches of a LoRA on it then, as loaders of GGUF do."""

    def __init__(self):
        super().__init__(odd.WIDTH, odd.WIDTH, bias=False)
        draws = torch.Generator().manual_seed(4)
        codes = torch.randint(-127, 128, (odd.WIDTH, odd.WIDTH + 2), dtype=torch.int8, generator=draws)
        self.weight = torch.nn.Parameter(codes.as_subclass(Quantized), requires_grad=False)
        self.patches = []

    def forward(self, x):
        weight = self.weight.as_subclass(torch.Tensor)[:, :-2].to(x) / 700
        return torch.nn.functional.linear(x, comfy.lora.calculate_weight(self.patches, weight, "weight"))


class PatcherOfQuantized(comfy.model_patcher.ModelPatcher):
    """Hands patches of codes to their layers."""

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
        layer = self.model.get_submodule(key.rpartition(".")[0])
        if not isinstance(layer, QuantizedLinear):
            return super().patch_weight_to_device(key, device_to, inplace_update)
        layer.patches = self.patches.get(key, [])


def test_codes_that_nobody_can_decode_are_left_out_in_a_sentence(link, pictures, tmp_path):  # noqa: F811
    """Their layers are torch's own, which name no way to their weight; the others are trained as they draw."""
    base = link(odd.Rows)
    model = live_of(base).model
    for block in network_of(model).blocks:
        block.mlp = QuantizedLinear()
    model.__class__ = PatcherOfQuantized
    result, said = notes_of(sampled(base, pictures), tmp_path)
    assert "4 layers' weights are none that ComfyUI changes, so the LoRA leaves them out: " in said
    assert (result.samples - drawn_with(live_of(base), result.tensors)).abs().max() <= 1.5 / 255
