"""Models as custom nodes write them that trained wrong without a word: each is right now, or refused in a sentence."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from zoo import odd
from zoo.again import again
from zoo.linked import live_of
from zoo.test_train import drawn_with, pictures, run, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_unlisted import link, made, notes_of  # noqa: F401 (link is a fixture)
from zoo.trial import Trial
from zoo.zoo import build

from lora_atelier.nodes.comfyui.connected import gradients, identity
from lora_atelier.nodes.comfyui.connected.check import check_connected
from lora_atelier.nodes.comfyui.connected.denoiser import TOLERANCE
from lora_atelier.nodes.comfyui.connected.filed import Filed
from lora_atelier.nodes.comfyui.connected.identity import digest_of_model
from lora_atelier.nodes.comfyui.connected.layers import list_layers
from lora_atelier.nodes.comfyui.connected.observed import Observed
from lora_atelier.nodes.comfyui.connected.proof import prove, recomputes
from lora_atelier.nodes.comfyui.connected.trial import _compare_with_file

OUT = "so the LoRA leaves them out: lora_unet_blocks_0"
NONE = f"4 layers' weights are none that ComfyUI changes, {OUT}_mlp"
COMPUTED = "a weight that is computed, or complex, which no LoRA file changes: lora_unet_blocks_0"
LEFT_OUT = {  # networks with layers that a file does not change, and how many
    odd.InBuffers: NONE,
    odd.InInt8: NONE,
    odd.Tied: "1 layer is computed by other code as well, so the LoRA leaves them out: lora_unet_blocks_0_mlp",
    odd.Experts: "",
    odd.WritesOut: "",
    odd.WritesOutInBlocks: "",
    odd.GeneratedWeights: "",
    odd.WithAdapters: "",
    odd.MergesItsOwn: "",
    odd.InBetween: "",
    odd.IntoCaptions: "",
    odd.Compiled: "",
    odd.Recomputed: "",
    odd.InFourBits: NONE,
    odd.GainedByLevel: f"4 layers do more than multiply by a weight, {OUT}_mlp",
    odd.NoKeys: f"8 layers get no gradient from pictures with captions, {OUT}_attn_q",
}
OUT_OF_REACH = {  # and with layers whose weights no file names
    odd.Normed: f"8 layers have {COMPUTED}_attn_v",
    odd.InComplex: f"4 layers have {COMPUTED}_mlp",
}
REFUSED = {
    odd.RoundedWeights: "where a LoRA file does something else than training, first in blocks",
    odd.TiedUnseen: "where a LoRA file does something else than training, first in blocks.1",
    odd.DataResidual: "operators hand no gradient on: data in DataResidual",
    odd.WithoutBackward: "the loss does not follow its gradients, first before",
    odd.OwnCheckpoints: "no gradient leaves its code, .*: set gradient checkpointing of the node",
    odd.OfInference: "its code keeps tensors of inference mode to itself",
    odd.ThroughNumpy: r"as its code stops with an error in ThroughNumpy of odd\.py where gradients are on; the log has",
    odd.UnderNoGrad: "operators hand no gradient on: .*under no_grad in PlainPart .blocks.0",
    odd.Whole: "operators hand no gradient on: its layers under no_grad in Part .blocks.0",
    odd.GuidesItself: "operators hand no gradient on: its layers under no_grad in Part",
    odd.WrongBackward: "the loss does not follow its gradients, first before",
    odd.Cached: "reuses what it computed at another level of noise; link it without the node that lets it skip blocks",
    odd.Counting: "predicts something else each time that it is asked the same: .*counts its passes",
}


SAID = LEFT_OUT | OUT_OF_REACH
AS_OTHERS = (
    odd.WithAdapters,
    odd.MergesItsOwn,
    odd.Recomputed,
    odd.InFourBits,
    odd.Compiled,
    odd.GuidesItself,
    odd.InInt8,
    odd.WritesOut,
    odd.WrongBackward,
    odd.TiedUnseen,
)


def once(networks):
    """Mark the networks whose ways other networks have, too."""
    return [each for each in networks if each not in AS_OTHERS] + again(*(n for n in networks if n in AS_OTHERS))


@pytest.mark.parametrize("network", once(SAID), ids=lambda each: each.__name__)
def test_a_file_draws_what_training_drew(network, link, pictures, tmp_path):  # noqa: F811
    result, said = notes_of(sampled(link(network), pictures), tmp_path)
    assert SAID[network] in said and ("leaves them out" in said) == bool(LEFT_OUT.get(network))
    assert ("no LoRA file changes" in said) == (network in OUT_OF_REACH)
    assert (result.samples - drawn_with(live_of(link(network)), result.tensors)).abs().max() <= 1.5 / 255
    layers = {name.partition(".")[0] for name in result.tensors}
    assert len(layers) >= 16 - int((SAID[network] or "0").partition(" ")[0])
    kept = "attn_v" if network is odd.NoKeys else "attn_q"
    assert all(f"lora_unet_blocks_{n}_{kept}" in layers for n in range(4))


@pytest.mark.parametrize("network", [odd.Rounded, *again(odd.Sparse)], ids=lambda each: each.__name__)
def test_a_file_draws_what_training_drew_but_for_what_the_model_rounds(network, link, pictures, tmp_path):  # noqa: F811
    """A sum in another order falls on the other side of a step here and there, as with any change of the input."""
    result, said = notes_of(sampled(link(network), pictures), tmp_path)
    assert "leaves them out" not in said and len({name.partition(".")[0] for name in result.tensors}) >= 16
    drawn, without = (drawn_with(live_of(link(network)), each) for each in (result.tensors, {}))
    apart, bare = ((result.samples - each).abs().mean() for each in (drawn, without))
    assert apart <= bare / 10  # which machine it is decides on which side: 0.001 to 0.02, weights of 0.7 are at 0.85


class Steep(odd.Rows):
    """Makes something else of its tokens where their last bits differ."""

    def step(self, number, block, tokens, timesteps):
        return (super().step(number, block, tokens, timesteps) * 1000).sin()


@contextmanager
def filed(network):
    """A network on a MODEL in bfloat16: what tries it, its layers, the MODEL's, and what a file makes of them."""
    patcher = made(network)
    patcher.model.diffusion_model.to(torch.bfloat16)
    patcher.model.manual_cast_dtype = torch.bfloat16
    tried = Trial("unlisted", built=(patcher.model, patcher), dtype=torch.bfloat16)
    layers = tried.network._layers
    modules = {each.name: each.module for each in list_layers(tried.model) if each.name in layers}
    with gradients.session(patcher), tried.network.attached():
        yield tried, layers, modules, Filed(patcher, layers, modules)


def compared(network):
    with filed(network) as (tried, layers, modules, file):
        denoiser = SimpleNamespace(model=tried.model, patcher=tried.patcher, bound=TOLERANCE[torch.bfloat16])
        return _compare_with_file(denoiser, [tried.predict], layers, modules, file)


@pytest.mark.usefixtures("link")
def test_a_model_that_makes_much_of_rounding_is_told_from_one_that_reads_weights_past_their_layers():
    """Random networks of bfloat16 without norms draw white where their file draws black, whatever computes them."""
    _, unapplied, said = compared(Steep)
    assert not unapplied and "in bfloat16 differ by 1" in said and "load the MODEL in float32" in said
    assert compared(odd.Experts)[1:] == ([], "")
    with pytest.raises(ValueError, match=r"a LoRA file does something else than training, first in blocks\.1"):
        compared(odd.TiedUnseen)


@pytest.mark.usefixtures("link")
def test_each_layer_in_bfloat16_does_with_a_file_what_it_does_in_training_but_for_rounding():
    with filed(odd.Rows) as (_, layers, modules, file), torch.no_grad(), file.moved(list(layers)):
        for name, module in modules.items():
            draws = torch.Generator().manual_seed(0)
            given = torch.randn(64, module.in_features, generator=draws).to(torch.bfloat16)
            trained = module(given).float()
            with file.on([name]):
                drawn = module(given).float()
            assert 0 < (trained - drawn).norm() <= 0.01 * drawn.norm(), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("network", once(REFUSED), ids=lambda each: each.__name__)
def test_gradients_that_do_not_flow_are_refused(network, link, pictures, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=REFUSED[network]) as found:
        notes_of(sampled(link(network), pictures), tmp_path)
    said = str(found.value)
    assert "this MODEL cannot be trained" in said and "tracked by autograd" not in said
    assert "link another MODEL" in said or "ink it without the node that lets it skip blocks" in said


def compiled(module):
    return torch.compile(module, backend="eager")


COMPILED = {  # what a node does to a MODEL, by what it is
    "a block": lambda model, blocks: setattr(blocks, "0", compiled(blocks[0])),
    "a block while it runs": lambda model, blocks: model.add_object_patch(
        "diffusion_model.blocks.0", compiled(blocks[0])
    ),
    "the whole": lambda model, blocks: set_torch_compile_wrapper(model=model, backend="eager"),
}


@pytest.mark.parametrize("case", again(*COMPILED))
def test_what_a_node_compiles_is_refused_by_that(case):
    patcher = made(odd.Rows)
    COMPILED[case](patcher, patcher.model.diffusion_model.blocks)
    with pytest.raises(ValueError, match=r"is compiled .diffusion_model.*link the MODEL without the node that"):
        check_connected(patcher, None, None)


def test_what_torch_jit_compiles_is_refused_by_that():
    with pytest.raises(ValueError, match=r"is compiled .diffusion_model\.blocks\.0\.mlp, .*without the node"):
        check_connected(made(odd.Scripted), None, None)


def test_ltx2_recomputes_its_blocks():
    """A recomputed block gives zeros where a plain one gives no gradient."""
    trial = Trial("ltxav")
    with gradients.session(trial.patcher), trial.network.attached():
        layers, observed = trial.network._layers, Observed(trial.model.diffusion_model, trial.network._frozen)
        plain = prove([trial.predict] * 2, layers, observed).gradients
        assert recomputes(trial.predict, layers, plain, trial.units, 1e-3)
        first = next(iter(plain))
        doubled = {**plain, first: [(p, 2 * gradient) for p, gradient in plain[first]]}
        assert not recomputes(trial.predict, layers, doubled, trial.units, 1e-3)


def scaled(by):
    """A forward of a block that a node puts in place of its own."""

    def hooked(module, args, output):
        return output * by

    return hooked


def replaced(block, by):
    own = block.forward
    block.forward = lambda tokens: own(tokens) * by


CHANGED = {  # what a node does to a MODEL whose files and state dict stay
    "hooks": lambda model: model.blocks[1].register_forward_hook(scaled(0.5)),
    "hooks of another number": lambda model: model.blocks[1].register_forward_hook(scaled(0.6)),
    "hooks of another block": lambda model: model.blocks[2].register_forward_hook(scaled(0.5)),
    "a replaced forward": lambda model: replaced(model.blocks[1], 0.5),
    "another replaced forward": lambda model: replaced(model.blocks[1], 0.6),
    "tensors of no state dict": lambda model: setattr(model.blocks[1], "shift", torch.ones(3)),
    "other tensors of no state dict": lambda model: setattr(model.blocks[1], "shift", torch.ones(3) * 2),
    "tensors in lists": lambda model: setattr(model.blocks[1], "shifts", [torch.ones(3) * 2]),
}


def test_models_that_compute_something_else_are_other_runs():
    digests = {}
    for name, change in {"nothing": lambda model: None, **CHANGED}.items():
        for number in range(2):
            patcher = made(odd.Rows)
            change(patcher.model.diffusion_model)
            digests[name, number] = digest_of_model(patcher)
            with gradients.session(patcher):
                assert digest_of_model(patcher) == digests[name, number]
    assert all(digests[name, 0] == digests[name, 1] for name, _ in digests)
    assert len(set(digests.values())) == len(digests) / 2


OUTSIDE = {"by": 0.5}  # what a hook reads, and nobody who looks at the model


def test_models_that_differ_by_what_their_hooks_read_are_other_runs(link, pictures, tmp_path):  # noqa: F811
    def hooked(module, args, output):
        return output * OUTSIDE["by"]

    def trained(by):
        with mock.patch.dict(OUTSIDE, by=by):
            base = link(odd.Rows)
            model = live_of(base).model
            model.model.diffusion_model.blocks[1].register_forward_hook(hooked)
            digests.append(digest_of_model(model))
            return run(sampled(base, pictures), tmp_path)[0]

    digests = []
    first, again, other = trained(0.5), trained(0.5), trained(0.6)
    assert len(set(digests)) == 1
    assert again.run == first.run and again.origin.startswith("Already trained")
    assert other.run != first.run and other.losses != first.losses


def test_a_model_of_comfyui_has_no_code_of_others(name):
    model, _ = build(name)
    plain = identity.code_of(model)
    assert name.startswith("odd") or plain == ""
