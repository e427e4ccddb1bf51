"""Models as custom nodes write them that trained wrong without a word: each is right now, or refused in a sentence."""

import pytest
from zoo import odd
from zoo.linked import live_of
from zoo.test_train import drawn_with, pictures, sampled  # noqa: F401 (pictures is a fixture)
from zoo.test_unlisted import link, notes_of  # noqa: F401 (link is a fixture)
from zoo.trial import Trial

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.observed import Observed
from lora_atelier.nodes.comfyui.connected.trial import prove, recomputes

NONE = "4 layers' weights are none that ComfyUI changes, so the LoRA leaves them out: lora_unet_blocks_0_mlp"
LEFT_OUT = {  # networks with layers that a file does not change, and how many
    odd.InBuffers: NONE,
    odd.InInt8: NONE,
    odd.Tied: "1 layer is computed by other code as well, so the LoRA leaves them out: lora_unet_blocks_0_mlp",
    odd.Experts: "",
}
REFUSED = {
    odd.TiedUnseen: "where a LoRA file does something else than training, first in blocks.1",
    odd.DataResidual: "operators hand no gradient on: data in DataResidual",
    odd.WithoutBackward: "the loss does not follow its gradients, first before",
    odd.OwnCheckpoints: "no gradient leaves its code, .*: set gradient checkpointing of the node",
    odd.OfInference: "its code keeps tensors of inference mode to itself",
    odd.UnderNoGrad: "operators hand no gradient on: .*under no_grad in PlainPart .blocks.0",
}


@pytest.mark.parametrize("network", LEFT_OUT, ids=lambda each: each.__name__)
def test_a_file_draws_what_training_drew(network, link, pictures, tmp_path):  # noqa: F811
    result, said = notes_of(sampled(link(network), pictures), tmp_path)
    assert LEFT_OUT[network] in said and ("leaves them out" in said) == bool(LEFT_OUT[network])
    assert (result.samples - drawn_with(live_of(link(network)), result.tensors)).abs().max() <= 1.5 / 255
    layers = {name.partition(".")[0] for name in result.tensors}
    assert len(layers) >= 12 - ("mlp" in LEFT_OUT[network]) and all(
        f"lora_unet_blocks_{n}_attn_q" in layers for n in range(4)
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("network", REFUSED, ids=lambda each: each.__name__)
def test_gradients_that_do_not_flow_are_refused(network, link, pictures, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=REFUSED[network]) as found:
        notes_of(sampled(link(network), pictures), tmp_path)
    said = str(found.value)
    assert "this MODEL cannot be trained" in said and "link another MODEL" in said and "tracked by autograd" not in said


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
