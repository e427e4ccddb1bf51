"""A session of training changes nothing about a MODEL for good, and nothing about what it predicts."""

import comfy.ldm.modules.attention
import comfy.model_management
import comfy.ops
import comfy_extras.nodes_model_advanced
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy.patcher_extension import CallbacksMP
from zoo.again import again
from zoo.trial import Trial, apart
from zoo.zoo import ZOO, build

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.architecture import remarks
from lora_atelier.nodes.comfyui.connected.check import check_connected
from lora_atelier.nodes.comfyui.connected.identity import digest_of_model
from lora_atelier.nodes.comfyui.connected.live import ATTENTION
from lora_atelier.trainer_core.memory import copied_before_written, recompute
from lora_atelier.trainer_core.networks.network import WithDelta

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
UNUSED = {  # pieces of paths of layers that have no say: last branches of text, branches of pictures that are not given
    "cascade_c": ("clip_img_mapper",),
    "cascade_b": ("effnet_mapper.0", "pixels_mapper.0"),
    "qwen_image": ("blocks.1.txt_mlp", "blocks.1.attn.to_add_out", "blocks.1.attn.add_q_proj"),
    "wan21_i2v": ("img_emb",),
    "omnigen2": ("ref_image",),
    "boogu": ("ref_image",),
    "hunyuan_video15": ("vision_in", "double_blocks.0.txt_attn.proj", "double_blocks.0.txt_mlp"),
    "joyimage": ("blocks.1.txt_mlp", "blocks.1.attn.txt_attn_proj"),
    "mage_flow": ("blocks.1.txt_mlp", "blocks.1.attn.to_add_out", "blocks.1.attn.add_q_proj"),
    "lens": ("blocks.1.txt_mlp", "blocks.1.attn.to_add_out"),
    "pixeldit": ("patch_blocks.1.mlp_y", "patch_blocks.1.attn.proj_y"),
    "hidream_o1": ("visual",),
    "ltxav": ("audio", "embeddings_connector", "av_ca_"),
}


class Before:
    """What a model is: bits, tensors, classes, names of attributes, hooks."""

    def __init__(self, model):
        self.tensors = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
        self.modules = self.read(model)
        self.flags = comfy.model_management.in_training, comfy.ops.run_every_op

    @staticmethod
    def read(model):
        return {
            path: (type(m), m.training, *map(sorted, (m.__dict__, *(getattr(m, hooks) for hooks in HOOKS))))
            for path, m in model.named_modules()
        }

    def check(self, model):
        now = model.state_dict(keep_vars=True)
        assert now.keys() == self.tensors.keys()
        for key, (value, copied) in self.tensors.items():
            assert now[key] is value and torch.equal(value, copied)
        assert self.read(model) == self.modules
        assert (comfy.model_management.in_training, comfy.ops.run_every_op) == self.flags


def test_a_fresh_network_changes_nothing_and_a_session_leaves_nothing(name):
    trial = Trial(name, used=False)
    with torch.no_grad():
        own = trial.predict({})
    before = Before(trial.model)
    flags = [p.requires_grad for p in trial.model.parameters()]
    with gradients.session(trial.patcher):
        with torch.no_grad():
            base = trial.predict()
        with trial.network.attached():
            with torch.no_grad():
                assert torch.equal(trial.predict(), base)
            recompute(trial.units, "full", copies=True)
            with copied_before_written():  # blocks on copies of their inputs compute the same
                assert torch.equal(trial.predict().detach(), base)
            optimizer = torch.optim.AdamW(trial.network.parameters(), lr=1e-3, weight_decay=0)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                with copied_before_written():
                    loss = trial.loss()
                    loss.backward()
                losses.append(loss.item())
                optimizer.step()
            assert losses[1] < losses[0]
        with torch.no_grad():
            assert torch.equal(trial.predict(), base)
    before.check(trial.model)
    assert [p.requires_grad for p in trial.model.parameters()] == flags
    with torch.no_grad():
        assert torch.equal(trial.predict({}), own)


# In every run: last branches of text, layers of a stage, of pictures, of references and of sound.
TOLD = [name for name in ("cascade_c", "qwen_image", "wan21_i2v", "hidream_o1", "ltxav") if name in ZOO]


@pytest.mark.parametrize("name", [*TOLD, *again(*(name for name in ZOO if name not in TOLD))])
def test_layers_without_a_gradient_are_found(name):
    trial = Trial(name)
    with gradients.session(trial.patcher), trial.network.attached():
        idle = trial.prove()
    paths = {trained.name: trained.path for trained in trial.network.chosen}
    expected = UNUSED.get(name, ())
    assert {paths[layer] for layer in idle} == {p for p in paths.values() if any(part in p for part in expected)}
    assert all(p.grad is None for p in trial.network.parameters())


def test_dropout_of_a_model_sleeps_in_a_session():
    trial = Trial("flux_dev")
    block = trial.model.diffusion_model.double_blocks[0]
    block.img_mlp.append(torch.nn.Dropout(0.5))
    block.img_mlp.train()
    before = Before(trial.model)
    with torch.no_grad():
        assert not torch.equal(trial.predict({}), trial.predict({}))
        with gradients.session(trial.patcher):
            assert torch.equal(trial.predict(), trial.predict())
    before.check(trial.model)


def test_an_exception_leaves_nothing():
    trial = Trial("flux_dev")
    before = Before(trial.model)
    with pytest.raises(KeyError), gradients.session(trial.patcher), trial.network.attached():
        recompute(trial.units, "full", copies=True)
        raise KeyError
    before.check(trial.model)


def test_inference_tensors_are_trained_on_and_given_back():
    with torch.inference_mode():
        built = build("flux_dev")
    normal, trial = Trial("flux_dev"), Trial("flux_dev", built=built)
    before = Before(trial.model)
    found = []
    for each in (normal, trial):
        with gradients.session(each.patcher), each.network.attached():
            assert not any(value.is_inference() for value in each.model.state_dict(keep_vars=True).values())
            found.append(each.gradients())
    assert apart(found[1], found[0]) == 0
    before.check(trial.model)
    assert all(value.is_inference() for value in trial.model.diffusion_model.state_dict(keep_vars=True).values())


def test_sampling_in_a_session_is_comfyuis_own(monkeypatch):
    interrupt = comfy.ops.run_every_op
    trial = Trial("ltxv")
    with torch.no_grad():
        own = trial.predict({})
    with gradients.session(trial.patcher), gradients.paused(), torch.no_grad():
        assert comfy.ops.run_every_op is interrupt
        assert not comfy.model_management.in_training
        assert torch.equal(trial.predict({}), own)


def test_a_cancel_breaks_off_no_pass(monkeypatch):
    trial = Trial("flux_dev")
    with gradients.session(trial.patcher), trial.network.attached():
        comfy.model_management.interrupt_current_processing()
        trial.gradients()
        with pytest.raises(comfy.model_management.InterruptProcessingException), gradients.paused(), torch.no_grad():
            trial.predict({})
    assert not comfy.model_management.processing_interrupted()


def without_gradients(*args, **kwargs):
    """Compute attention in eight bits, as kernels without a backward pass do."""
    with torch.no_grad():
        return (attention_pytorch(*args, **kwargs) * 16).round() / 16


def with_backend(patcher):
    """Do what ModelAttentionBackend does, by the node itself where this ComfyUI has it."""
    if node := getattr(comfy_extras.nodes_model_advanced, "ModelAttentionBackend", None):
        return node().patch(patcher, "comfy kitchen attention")[0]
    changed = patcher.clone()
    changed.model_options["transformer_options"][ATTENTION] = lambda _, *args, **kwargs: without_gradients(
        *args, **kwargs
    )
    return changed


def sparse(patcher):
    """Do what BlockSparseAttention does: put attention of its own over what is there, and again before each step."""
    changed, installed = patcher.clone(), []

    def install(_, __, model_options):
        options = model_options["transformer_options"]
        before = options.get(ATTENTION)
        if before in installed:
            return

        def override(function, *args, mask=None, **kwargs):
            if mask is None:
                return without_gradients(*args, **kwargs)
            return (before or (lambda given, *rest, **more: given(*rest, **more)))(function, *args, mask=mask, **kwargs)

        installed.append(override)
        options[ATTENTION] = override

    install(None, None, changed.model_options)
    changed.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "block_sparse_attention", install)
    changed.add_callback_with_key(CallbacksMP.ON_CLEANUP, "block_sparse_attention", lambda _: None)
    return changed


@pytest.mark.parametrize("nodes", [[with_backend, sparse], *again([with_backend], [sparse])])
def test_a_node_that_sets_attention_draws_and_training_is_exact(nodes, monkeypatch):
    registered = getattr(comfy.ldm.modules.attention, "REGISTERED_ATTENTION_FUNCTIONS", {})
    monkeypatch.setitem(registered, "comfy_kitchen_int8", without_gradients)
    trial = Trial("sd3")
    with gradients.session(trial.patcher), trial.network.attached():
        exact = [each.clone() for each in trial.gradients()]
    before, plain = digest_of_model(trial.patcher), trial.predict({})
    known = remarks(trial.patcher)
    for node in nodes:
        trial.patcher = node(trial.patcher)
    options = trial.patcher.model_options["transformer_options"]
    asked = options[ATTENTION]
    with pytest.raises(ValueError, match="The VAE linked to Use Connected Model is none"):  # the MODEL is taken
        check_connected(trial.patcher, None, None)
    assert digest_of_model(trial.patcher) == before  # so that a finished run is reused
    assert [said[:58] for said in remarks(trial.patcher) if said not in known] == [
        "A node before this one sets how the MODEL computes attenti"
    ]
    assert not torch.equal(trial.predict(options), plain)
    with gradients.session(trial.patcher), trial.network.attached():
        assert trial.prove() == []
        assert all(map(torch.equal, trial.gradients(), exact))
    assert options[ATTENTION] is asked


def test_a_node_that_swaps_the_attention_of_blocks_is_refused():
    """As BlockSparseAttention does to MiniMax-H3, whose weights may be made for nothing else."""
    _, patcher = build("sd3")
    patcher.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)
    with pytest.raises(ValueError, match=r"changed while it runs \(patches_replace\).*without that node"):
        check_connected(patcher, None, None)


def test_what_a_model_keeps_between_passes_is_dropped():
    """A model that keeps keys would be predicted from with those of a pass before."""
    trial = Trial("wan21_t2v")
    block = trial.model.diffusion_model.blocks[0]
    kept, own = [], block.forward

    class Keeping(type(block)):
        def clear_kv_cache(self):
            kept.clear()

        def forward(self, x, *args, **kwargs):
            kept.append(x)
            return own(kept[0], *args, **kwargs)

    block.__class__ = Keeping
    with gradients.session(trial.patcher), trial.network.attached():
        trial.gradients()
        assert len(kept) == 1
        assert trial.prove() == []
    assert not kept


def test_what_a_pass_leaves_on_a_model_is_dropped():
    """Some models keep tensors of their last pass, which would keep all of its memory, and end the next pass."""
    trial = Trial("wan21_t2v")
    block = trial.model.diffusion_model.blocks[1]
    own = block.forward

    class Keeping(type(block)):
        kept = None

        def forward(self, x, *args, **kwargs):
            if self.kept is None:
                self.kept = [x]
            self.last = {"x": x}
            return own(self.kept[0], *args, **kwargs)

    block.__class__ = Keeping
    with gradients.session(trial.patcher), trial.network.attached():
        first = trial.gradients()
        assert "last" in vars(block)
        assert apart(trial.gradients(), first) == 0
    assert "kept" not in vars(block) and "last" not in vars(block)


def test_a_model_that_predicts_nothing_finite_is_refused():
    trial = Trial("flux_dev")
    next(trial.model.diffusion_model.parameters()).data.fill_(torch.inf)
    with gradients.session(trial.patcher), trial.network.attached(), pytest.raises(ValueError, match="not finite"):
        trial.prove()


def test_a_model_that_fails_is_refused_with_its_own_words(monkeypatch):
    trial = Trial("flux_dev")
    monkeypatch.setattr(trial.model.diffusion_model, "forward", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with gradients.session(trial.patcher), trial.network.attached(), pytest.raises(ValueError, match="MODEL cannot be"):
        trial.prove()


def test_nothing_of_a_network_is_left_on_a_layer():
    trial = Trial("flux_dev")
    with gradients.session(trial.patcher):
        with trial.network.attached(), trial.network.detached(), trial.network.attached():
            pass
        assert not any(isinstance(module, WithDelta) for module in trial.model.modules())
