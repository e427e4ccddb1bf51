"""Programs that wrote into tensors compute new ones, and have the gradients of code that never writes."""

import pytest
import torch
from torch.nn import functional

from lora_atelier.trainer_core.memory import compile_blocks
from lora_atelier.trainer_core.memory.gradient_checkpointing import WHOLE


class Block(torch.nn.Module):
    """A block that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def added(x):
    kept = x * 2
    y = kept.tanh()
    y += kept.sin() * y.square()
    return y * kept


def by_method(x):
    y = x.exp()
    y.mul_(y.sin()).add_(x)
    return y.sigmoid()


def in_a_slice(x):
    y = x.exp()
    z = y.square()
    y[:, 1:] += z[:, 1:] * y[:, :-1]
    y[0] = x[1]
    return y * z


def in_an_activation(x):
    y = x.exp()
    z = functional.silu(y, inplace=True)
    return z * y.square()


def in_narrow_numbers(x):
    y = x.bfloat16().exp()
    y += x.float() * y.square()
    return y * 3


CODES = [added, by_method, in_a_slice, in_an_activation, in_narrow_numbers]


def passed(block, x):
    x = x.clone().requires_grad_()
    y = block(x)
    y.float().square().sum().backward()
    return y, x.grad


def plain(function):
    """Give what a function computes without autograd's complaints: by differences of what it returns in float64."""

    def at(x):
        with torch.no_grad():
            return function(x.clone()).square().sum()

    return at


@pytest.mark.parametrize("function", CODES[:4], ids=lambda function: function.__name__)
def test_code_that_writes_has_right_gradients_once_compiled(function):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    block, notes = Block(function), []
    compile_blocks([(block, WHOLE)], notes.append, "aot_eager")
    y, gradient = passed(block, x)
    assert not notes
    torch.testing.assert_close(y, function(x))
    ways = torch.eye(6, dtype=torch.float64).reshape(6, 2, 3) * 1e-6
    at = plain(function)
    differences = torch.stack([(at(x + way) - at(x - way)) / 2e-6 for way in ways])
    torch.testing.assert_close(gradient.flatten(), differences, rtol=1e-5, atol=1e-6)


def test_what_is_written_into_keeps_its_type():
    torch._dynamo.reset()
    block, notes = Block(in_narrow_numbers), []
    compile_blocks([(block, WHOLE)], notes.append, "aot_eager")
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    y, _ = passed(block, x)
    assert not notes
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, in_narrow_numbers(x))
