"""Blocks that write into their inputs: recomputed on copies, with the gradients of a pass that keeps everything."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lora_atelier.trainer_core.memory import (
    WHOLE,
    Watched,
    activations_in_ram,
    copied_before_written,
    keep_activations,
    recompute,
)


@dataclass
class Modulation:
    shift: torch.Tensor
    more: tuple


@dataclass(frozen=True, slots=True)
class Slotted:
    shift: torch.Tensor
    more: tuple


class Block(nn.Module):
    """Writes into its input, reads tensors in an object, counts in a dictionary, and gives back a structure."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner
        self.runs, self.seen = 0, []

    def forward(self, x, modulation, options, scale=None):
        self.runs += 1
        self.seen.append(options["number"])
        options["mark"] = True
        x += torch.sin(self.linear(x)) * modulation.shift
        x[:, 2:] *= scale[:, 2:]
        if self.inner is not None:
            x = self.inner(x, modulation, options, scale=scale)["x"]
        return {"x": x, "rest": (x[:, :2], modulation.more[0].exp(), x.argmax())}


class Model(nn.Module):
    def __init__(self, kind=Modulation):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Block(), Block(Block()), Block()])

    def forward(self, x, shift):
        x, options = x * 1, {}
        for number, block in enumerate(self.blocks):
            options["number"] = number
            out = block(x, self.kind(shift, (shift * 2, "name")), options, scale=shift + 1)
            x = out["x"] + out["rest"][1]
            x[:, 1:] += 1  # also into what a block gives back
        assert options.pop("mark")
        return x.square().sum()


def gradients(model, inputs):
    model.zero_grad()
    inputs = [tensor.clone().requires_grad_(True) for tensor in inputs]
    with copied_before_written():
        model(*inputs).backward()
    return [tensor.grad.clone() for tensor in (*inputs, *model.parameters())]


@pytest.fixture(params=[Modulation, Slotted])
def model(request):
    torch.manual_seed(0)
    return Model(request.param).double()


@pytest.fixture
def inputs():
    return [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]


def equal(one, other):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(one, other, strict=True))


def test_gradients_are_central_differences(model, inputs):
    assert torch.autograd.gradcheck(lambda *given: guarded(model, *given), [t.requires_grad_() for t in inputs])


def guarded(model, *inputs):
    """Compute the gradients inside the context, and give gradcheck a function that has them."""
    with copied_before_written():
        loss = model(*inputs)
        found = torch.autograd.grad(loss, inputs, retain_graph=True)
    fixed = sum(((t - t.detach()) * g).sum() for t, g in zip(inputs, found, strict=True))
    return loss.detach() + fixed


@pytest.mark.parametrize("level", ["1", "2", "full"])
def test_recomputing_changes_no_gradient(model, inputs, level):
    expected = gradients(model, inputs)
    recompute([(block, number + 1) for number, block in enumerate(model.blocks)], level, copies=True)
    assert equal(gradients(model, inputs), expected)


class Silent(nn.Module):
    """Writes into one of its inputs, and gives nothing back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, count):
        x[:, 1:] += torch.sin(self.linear(x))[:, 1:]
        count += 1


class SilentModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Silent(), Silent()])

    def forward(self, x, shift):
        x, count = x * shift, torch.zeros((), dtype=torch.long)
        for block in self.blocks:
            block(x, count)
        assert count == 2
        return x.square().sum()


def test_what_a_block_writes_without_giving_it_back_stays_written(inputs):
    torch.manual_seed(0)
    model = SilentModel().double()
    expected = model(*inputs).detach(), gradients(model, inputs)
    recompute([(block, WHOLE) for block in model.blocks], "full", copies=True)
    with copied_before_written():
        assert torch.equal(model(*inputs).detach(), expected[0])
    assert equal(gradients(model, inputs), expected[1])
    assert torch.autograd.gradcheck(lambda *given: guarded(model, *given), [t.requires_grad_() for t in inputs])


def test_a_block_runs_twice_and_one_inside_it_no_more_often(model, inputs):
    inside = model.blocks[1].inner
    expected = gradients(model, inputs)
    recompute([(model.blocks[1], WHOLE), (inside, WHOLE)], "full", copies=True)
    for block in model.modules():
        if isinstance(block, Block):
            block.runs, block.seen = 0, []
    assert equal(gradients(model, inputs), expected)
    assert [block.runs for block in (*model.blocks, inside)] == [1, 2, 1, 2]
    assert model.blocks[1].seen == [1, 1]  # the second time as well, when the model has counted on


def test_nothing_is_recomputed_without_gradients(model, inputs):
    recompute([(block, WHOLE) for block in model.blocks], "full", copies=True)
    with torch.no_grad():
        model(*inputs)
    assert [block.runs for block in model.blocks] == [1, 1, 1]


def test_what_is_trained_in_a_first_block_gets_its_gradient(model, inputs):
    recompute([(block, WHOLE) for block in model.blocks], "full", copies=True)
    with copied_before_written():
        model(*inputs).backward()
    assert model.blocks[0].linear.weight.grad.abs().max() > 0


@pytest.mark.parametrize("copies", [True, False])
def test_activations_are_kept_again(model, copies):
    def own(*args, **kwargs):
        return Block.forward(model.blocks[1], *args, **kwargs)

    model.blocks[1].forward = own
    recompute([(block, WHOLE) for block in model.blocks], "full", copies=copies)
    assert all("forward" in vars(block) for block in model.blocks)
    keep_activations(model.modules())
    assert ["forward" in vars(block) for block in model.blocks] == [False, True, False]
    assert model.blocks[1].forward is own


# --- writes into what the backward pass needs ----------------------------------------------------------------


WRITES = {
    "whole": lambda a: a.add_(5),
    "its beginning": lambda a: a[:2].add_(5),
    "its end": lambda a: a[2:].add_(5),
    "a view": lambda a: a.view(2, 2)[1].mul_(3),
    "by index": lambda a: a.index_put_((torch.tensor([3]),), torch.tensor(7.0, dtype=torch.float64)),
    "as a result": lambda a: torch.add(a.detach(), 1, out=a.detach()),
    "a list": lambda a: torch._foreach_add_([a.detach()[1:]], 2.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("start", [0, 1])
def test_a_write_harms_no_gradient(write, start):
    """d/dx of (2x)^2 is 8x, whatever happens to 2x afterwards; what is saved begins at `start`."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=True)
    with copied_before_written():
        doubled = x * 2
        squares = doubled[start:].square()
        WRITES[write](doubled)
        squares.sum().backward()
    assert torch.equal(x.grad[start:], 8 * x.detach()[start:]) and not x.grad[:start].any()


def test_only_what_is_written_is_copied():
    x = torch.randn(8, requires_grad=True)
    with copied_before_written():
        result = x.exp()
        node = result.grad_fn
        assert node._saved_result.data_ptr() == result.data_ptr()
        result.mul_(2)
        assert node._saved_result.data_ptr() != result.data_ptr()


def gradient(watched, kind, *, write):
    """Compute the gradient of the sum of exp(x)², where a model may write into exp(x) before the backward pass."""
    x = torch.zeros(3, requires_grad=True)
    with watched.passes(kind):
        y = x.exp()
        z = y * y
        if write:
            y.detach().add_(1)
        z.sum().backward()
    return x.grad.tolist()


def test_passes_are_watched_until_they_need_no_copy():
    watched = Watched()
    assert gradient(watched, "writing", write=True) == gradient(watched, "writing", write=True) == [2.0] * 3
    assert gradient(watched, "harmless", write=False) == [2.0] * 3
    with pytest.raises(RuntimeError, match="inplace operation"):  # nothing copies any more, and torch notices
        gradient(watched, "harmless", write=True)
    assert gradient(watched, "writing", write=True) == [2.0] * 3


# --- segments of blocks --------------------------------------------------------------------------------------


class Link(nn.Module):
    """A block whose result is the next one's input, beside what all blocks read."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, x, beside, read):
        self.runs += 1
        return x + torch.sin(self.linear(x)) * read, beside + x.square()


class Chain(nn.Module):
    def __init__(self, count=5, between=lambda number, x: x):
        super().__init__()
        self.blocks, self.between = nn.ModuleList([Link() for _ in range(count)]), between

    def forward(self, x, read):
        x, beside = x * 1, torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            x, beside = block(self.between(number, x), beside, read)
        return (x * beside).sum()


def pass_of_chain(level, copies, between=lambda number, x: x):
    """Return the gradients of a chain, how often each block ran, and the bytes that were saved on the way."""
    torch.manual_seed(0)
    chain, kept = Chain(between=between), {}
    x, read = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    recompute([(block, WHOLE) for block in chain.blocks], level, copies=copies)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        loss = chain(x, read)
    loss.backward()
    return [t.grad for t in (x, read, *chain.parameters())], [block.runs for block in chain.blocks], len(kept)


@pytest.mark.parametrize("copies", [True, False])
def test_segments_give_the_bits_of_recomputed_blocks_and_keep_less(copies):
    expected, runs, kept = pass_of_chain("full", copies)
    assert runs == [2] * 5
    for level, counts, less in (("segments of 2", [3, 2, 3, 2, 2], 4), ("segments of 4", [3, 3, 3, 2, 2], 6)):
        found, runs, left = pass_of_chain(level, copies)
        assert all(map(torch.equal, found, expected)) and runs == counts
        assert kept - left == less  # both inputs of each block but the first one of a segment


def test_what_a_model_changes_between_blocks_is_kept():
    def changed(number, x):
        return x.mul_(2) if number == 1 else x + 1 if number == 2 else x

    def behind_torch(number, x):
        x.detach().mul_(2)
        return x

    for between in (changed, behind_torch):
        expected, *_ = pass_of_chain("full", True, between)
        found, runs, _ = pass_of_chain("segments of 2", True, between)
        assert all(map(torch.equal, found, expected)) and max(runs) == 3


def test_levels_follow_one_another_up_to_segments_and_back():
    chain = Chain()
    units = [(block, WHOLE) for block in chain.blocks]
    own = [block.forward for block in chain.blocks]
    for level in ("1", "full", "segments of 2", "segments of 4"):
        recompute(units, level)
    assert [block.forward.forward for block in chain.blocks] == own
    assert {block.forward.segment for block in chain.blocks} == {4}
    keep_activations(chain.blocks)
    assert [block.forward for block in chain.blocks] == own


@pytest.mark.parametrize("level", ["full", "segments of 2"])
def test_a_recomputed_block_holds_no_input_that_has_gone_to_ram(level):
    torch.manual_seed(0)
    chain, inputs = Chain(), []
    recompute([(block, WHOLE) for block in chain.blocks], level, copies=True)
    chain.between = lambda number, x: inputs.append(weakref.ref(x)) or x
    with activations_in_ram(torch.device("cpu"), [chain], least=0):  # here, copies
        loss = chain(torch.randn(3, 4), torch.randn(3, 4))
    assert [each() for each in inputs] == [None] * 5
    loss.backward()
