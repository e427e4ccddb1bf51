"""Attention by the package xformers: what it is asked, what it gives, and where a run refuses it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from prepared import NeverLoaded
from recipes.recipes import RECIPES, configure
from tiny_runs import change, run, run_with_notes
from xformers_stand_in import package  # noqa: F401 (a fixture)

from lora_atelier.trainer_core.common.devices import KINDS, DeviceKind
from lora_atelier.trainer_core.config import CaptionConfig, DatasetConfig, MemoryConfig, SampleConfig
from lora_atelier.trainer_core.memory import attention, attention_kernel, compile_blocks, plain_attention
from lora_atelier.trainer_core.training import prepare

CPU = torch.device("cpu")
TORCHS = F.scaled_dot_product_attention


@pytest.fixture
def config(material):
    """Give the recipe sd1 in two steps."""
    found = configure(RECIPES["sd1"], material)
    return change(
        found, memory={"attention": "xformers"}, train={"steps": 2}, scheduler={"name": "constant", "warmup_steps": 0}
    )


def heads(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MASKS = {
    "none": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": torch.arange(7).expand(2, 1, 1, 7) < torch.tensor([4, 7])[:, None, None, None]},
    "bias": {"attn_mask": heads(2, 1, 5, 7, seed=9)},
    "bias of all": {"attn_mask": heads(5, 7, seed=9)},
}


@pytest.mark.parametrize("name", MASKS)
def test_it_computes_what_torch_computes_forward_and_backward(name, package):  # noqa: F811
    given = MASKS[name]
    with_gradients = []
    for function in (TORCHS, attention.xformers_attention):
        query, key, value = (heads(2, 3, length, 16, seed=i).requires_grad_() for i, length in enumerate((5, 7, 7)))
        output = function(query, key, value, **given)
        output.square().sum().backward()
        with_gradients.append((output, query.grad, key.grad, value.grad))
    assert package.calls
    for one, other in zip(*with_gradients, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, atol=1e-5)


def test_what_it_does_not_take_goes_to_torch(package, monkeypatch):  # noqa: F811
    query, key = heads(1, 4, 5, 16), heads(1, 2, 5, 16, seed=1)
    grouped = attention.xformers_attention(query, key, key, enable_gqa=True)
    assert torch.equal(grouped, TORCHS(query, key, key, enable_gqa=True))
    assert torch.equal(attention.xformers_attention(query[0], query[0], query[0]), TORCHS(*[query[0]] * 3))
    monkeypatch.setitem(KINDS, "cpu", DeviceKind())  # as for a model that had no room on the GPU
    assert torch.equal(attention.xformers_attention(query, query, query), TORCHS(query, query, query))
    assert not package.calls


def test_torchs_function_is_exchanged_in_the_block_alone(package):  # noqa: F811
    query = heads(1, 2, 5, 16)
    with attention_kernel("xformers", CPU):
        F.scaled_dot_product_attention(query, query, query)
        assert len(package.calls) == 1
        with plain_attention(CPU):  # for models that encode while training
            F.scaled_dot_product_attention(query, query, query)
        assert len(package.calls) == 1 and F.scaled_dot_product_attention is attention.xformers_attention
    assert F.scaled_dot_product_attention is TORCHS
    with pytest.raises(KeyError), attention_kernel("xformers", CPU):
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS
    with attention_kernel("math", CPU):
        F.scaled_dot_product_attention(query, query, query)
    assert len(package.calls) == 1


def losses(config, folder, device="cpu"):
    result, notes = run_with_notes(config, folder / config.memory.attention, folder / "cache", device=device)
    return result.losses + [loss for _, loss in result.validation], notes


CASES = {
    "checkpointed": {"memory": {"checkpointing": "full"}},
    "text encoder": {"optimizer": {"text_encoder_learning_rate": 1e-3}},
    "compiled": {"memory": {"compile": True}},
    "encoding while training": {"memory": {"encodings": "none"}},
}


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory):
    """Give `by_torch(config)` -> the losses of a run without memory settings; they change none, so cases share it."""
    known = {}

    def of(config):
        config = config.replace(memory=MemoryConfig(checkpointing="0"))
        if config.digest() not in known:
            known[config.digest()] = losses(config, tmp_path_factory.mktemp("torch"))[0]
        return known[config.digest()]

    return of


def compile_one(blocks, note):
    """Compile one transformer block: how many programs a model needs is tested in test_memory.py."""
    (first, *_) = (unit for unit in blocks if type(unit[0]).__name__ == "BasicTransformerBlock")
    return compile_blocks([first], note, backend="eager")


# test_memory.py and test_train.py compile blocks, whatever computes attention in them.
AGAIN = ("compiled",)


@pytest.mark.usefixtures("no_estimates")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in AGAIN else ()) for name in CASES]
)
def test_a_run_by_it_learns_what_a_run_by_torch_learns(name, config, package, by_torch, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(prepare, "compile_blocks", compile_one)
    one_shape = tuple(concept for concept in config.dataset.concepts if not concept.resolutions)  # to compile
    config = change(config, **CASES[name], dataset={"concepts": one_shape})
    found, notes = losses(config, tmp_path)
    assert any(gradients for _, gradients in package.calls) and any(not gradients for _, gradients in package.calls)
    assert not any("torch.compile failed" in note for note in notes)
    package.calls.clear()
    assert found == pytest.approx(by_torch(config), rel=1e-4)
    assert not package.calls


@pytest.mark.usefixtures("no_estimates")
def test_padded_captions_are_masked(config, package, tmp_path, material):  # noqa: F811
    """Captions of three and of four chunks are padded in one batch."""
    long = [CaptionConfig(prefix=" ".join(["thing"] * words) + ", ") for words in (200, 280)]
    concepts = [config.dataset.concepts[0].replace(captions=captions, flip=False) for captions in long]
    config = config.replace(dataset=DatasetConfig(concepts=tuple(concepts)))
    config = change(config, train={"steps": 1, "batch_size": 8}, lora={"preset": "attn-only"})
    found, _ = losses(config, tmp_path)
    assert {kind for kind, _ in package.calls} == {"none", "bias"}
    assert found == pytest.approx(losses(change(config, memory={"attention": "auto"}), tmp_path)[0], rel=1e-4)


def refused(config, folder):
    """Start a run that is refused before anything is loaded, and return why."""
    with pytest.raises(ValueError) as told:
        run(config, folder, source=NeverLoaded(config.base_model))
    return str(told.value)


def test_a_run_that_cannot_use_it_says_so_first(config, package, tmp_path, monkeypatch):  # noqa: F811
    """Whether it runs on the CPU, lacks the package, or has one that knows no kernel for the device."""

    def no_kernel(*_, **__):
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")

    monkeypatch.setattr(package.ops, "memory_efficient_attention", no_kernel)
    told = refused(config, tmp_path)
    assert told.startswith("The package xformers cannot train in float32 on this GPU (No operator found for")
    assert "or set attention of Memory to auto." in told
    monkeypatch.setitem(sys.modules, "xformers", None)
    told = refused(config, tmp_path)
    assert told.startswith("attention is xformers, and the package xformers cannot be imported (")
    assert f"install the version that belongs to torch {torch.__version__}, or set attention of Memory to auto." in told
    monkeypatch.setitem(KINDS, "cpu", DeviceKind())
    assert refused(config, tmp_path) == (
        "The package xformers has no attention for cpu, on which this run is; set attention of Memory to auto."
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("no_estimates")
@pytest.mark.parametrize("level", ["0", "full"])
def test_on_a_gpu_its_losses_are_those_of_torch(level, config, tmp_path):
    pytest.importorskip("xformers")
    config = change(config, memory={"checkpointing": level}, train={"steps": 4})
    config = config.replace(sample=SampleConfig())
    found = losses(config, tmp_path, "cuda")[0]
    assert found == pytest.approx(
        losses(change(config, memory={"attention": "efficient"}), tmp_path, "cuda")[0], rel=1e-3
    )
