"""A second device without a second chip: what would go wrong between RAM and a GPU goes wrong here, too.

Its tensors lie in RAM but say that they are elsewhere (torch's experimental Python backend). An operation on tensors of
both places raises, as on a GPU. What does not block is done as late as a GPU may do it: a copy on another stream than
the first one, or to RAM, holds rubbish until somebody waits for it, and raises when the memory it reads from has been
given back. All else gives the numbers that the CPU gives. KINDS has what it can be: a card, a Mac's GPU, an old one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
import torchgen
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from lora_atelier.trainer_core.common import devices, rng
from lora_atelier.trainer_core.memory import stream as stream_module
from lora_atelier.trainer_core.memory import written
from lora_atelier.trainer_core.networks.layers import dropout
from lora_atelier.trainer_core.optim import rounding

NAME = "card"
TAKE_FROM_RAM = ("aten::index", "aten::index_put", "aten::index_put_")  # whose indices may lie in RAM
DOUBLE = (torch.float64, torch.complex128)
SMALL = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
RUBBISH = 93  # a number that no test comes near to
OF_PYTHON = ("native_group_norm_backward",)  # what torch/backends/mps adds to its list of kernels


class Pretended(NamedTuple):
    """A kind of device: the row of the product's table that holds for it, what it lacks, and its memory in bytes."""

    row: str
    lacks: tuple[torch.dtype, ...]
    operators: bool = True  # all that the CPU has
    streams: bool = True


PRETENDED = {
    "card": Pretended("cuda", DOUBLE),
    "mac": Pretended("mps", (*DOUBLE, *SMALL), operators=False, streams=False),
    "old": Pretended("", (*DOUBLE, *SMALL, torch.bfloat16), streams=False),
}
now = PRETENDED["card"]  # what the device is


@functools.cache
def missing_on_a_mac():
    """List the operators that torch's own table gives the CPU, but not MPS, nor builds from others."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(folder / "native_functions.yaml", folder / "tags.yaml")
    functions = {function.func.name: function for function in parsed.native_functions}
    cpu, mps = (parsed.backend_indices[key] for key in (DispatchKey.CPU, DispatchKey.MPS))

    def lacks(function):
        if function.structured_delegate:
            function = functions[function.structured_delegate]
        composed = function.has_composite_kernel
        return not composed and cpu.has_kernel(function) and not mps.has_kernel(function)

    found = {str(name.name) for name, function in functions.items() if lacks(function)}
    has = {str(name.name) for name, function in functions.items() if not lacks(function)}
    return {f"aten::{name}" for name in found - has - {*OF_PYTHON}}


class There(torch.Tensor):
    """A tensor on the second device; `inner` is the same in RAM."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner):
        self.inner = inner.detach()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.inner.tolist()

    def record_stream(self, stream):
        stream.recorded.append(self.inner)

    def __tensor_flatten__(self):  # lets torch move a module's parameters in place, as it does for a GPU
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return carry_out(func, args, kwargs or {})


def carry_out(func, args, kwargs):
    """Do in RAM what was asked of the device."""
    name = func._schema.name
    if not now.operators and name in missing_on_a_mac():
        raise NotImplementedError(f"The operator '{name}' is not currently implemented for this device.")
    tensors = list(tensors_of((*args, *kwargs.values())))
    there = [x for x in tensors if isinstance(x, There)]
    here = [x for x in tensors if not isinstance(x, There) and x.dim()]
    if there and here and name != "aten::copy_" and not (name in TAKE_FROM_RAM and isinstance(args[0], There)):
        shapes = [(tuple(x.shape), str(x.device)) for x in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {shapes}")
    inner_args, inner_kwargs = in_ram(args), {key: in_ram(value) for key, value in kwargs.items()}
    stays = bool(there)
    if kwargs.get("device") is not None:
        stays = on_card(kwargs["device"])
        inner_kwargs |= {"device": torch.device("cpu")}
    inner_kwargs.pop("pin_memory", None)
    if name == "aten::_local_scalar_dense":
        return func(*inner_args, **inner_kwargs)
    if name == "aten::copy_":
        copy(inner_args[0], inner_args[1], len(args) > 2 and args[2], to_ram=not isinstance(args[0], There))
        return args[0]
    if name == "aten::_to_copy" and not stays:
        made = torch.empty_like(inner_args[0], dtype=inner_kwargs.get("dtype"))
        copy(made, inner_args[0], inner_kwargs.get("non_blocking", False), to_ram=True)
        return made
    out = func(*inner_args, **inner_kwargs)
    if not stays:
        return out
    for made in tensors_of(out if isinstance(out, (list, tuple)) else [out]):
        if made.dtype in now.lacks:
            raise TypeError(f"The device has no {made.dtype}: {name}.")  # as Apple's GPUs say it
    out = tree_map_only(torch.Tensor, lambda x: x if isinstance(x, There) else There(x), out)
    return return_and_correct_aliasing(func, args, kwargs, out) if aliases(func) else out


def tensors_of(values):
    """Yield the tensors among arguments, also those of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def in_ram(value):
    """Replace tensors of the device by those in RAM, also in lists."""
    if isinstance(value, There):
        return in_ram(value.inner)
    return [in_ram(each) for each in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def aliases(func):
    """Tell whether what an operation returns may share memory with an argument."""
    return any(each.alias_info for each in (*func._schema.arguments, *func._schema.returns))


def copy(target, source, non_blocking, *, to_ram):
    """Copy at once, or when somebody waits for it."""
    stream = Card.stack[-1]
    if not non_blocking or (stream is Card.first and not to_ram):
        target.copy_(source)
        return
    target.fill_(RUBBISH)
    seen = source.detach()  # a user of the memory beside `source`, who may go

    def late():
        recorded = any(x.untyped_storage()._cdata == seen.untyped_storage()._cdata for x in stream.recorded)
        if to_ram and users(seen) == ALONE and not recorded:  # RAM waits for its copies by itself
            raise RuntimeError("a copy reads memory that has been given back")
        target.copy_(seen)

    stream.waiting.append(late)


def users(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


ALONE = users(torch.empty(1))


class Stream:
    """Work in order; the first stream's is done at once, that of others when somebody waits for it."""

    def __init__(self, device=None):
        self.waiting, self.done, self.recorded = deque(), 0, []

    def record_event(self):
        return Event(self, self.done + len(self.waiting))

    def wait_event(self, event):
        if self is Card.first:
            event.synchronize()
        else:
            self.waiting.append(event.synchronize)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    """The end of what a stream had been given up to a moment."""

    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    def synchronize(self):
        while self.stream.done < self.place:
            self.stream.done += 1
            self.stream.waiting.popleft()()


MEMORY = 10**10  # bytes


class Card:
    """What torch.cuda is to a GPU."""

    Stream = Stream
    first = Stream()
    stack: ClassVar = [first]

    @classmethod
    def current_stream(cls, device=None):
        return cls.stack[-1]

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream):
        cls.stack.append(stream)
        yield
        cls.stack.pop()

    @staticmethod
    def memory_reserved(device):
        return 0

    memory_allocated = memory_reserved

    @staticmethod
    def mem_get_info(device):
        return MEMORY, MEMORY

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed_all(seed):
        """Torch asks for it; nothing here draws from a generator of the device."""


class Hook(torch._C._acc.PrivateUse1Hooks):
    """Tells torch that the device is there while a test uses it."""

    in_use = False

    def is_available(self):
        return Hook.in_use

    def has_primary_context(self, device):
        return True

    def is_built(self):
        return True


def on_card(device):
    return device is not None and torch.device(device).type == NAME


_setup_privateuseone_for_python_backend(NAME, backend_module=Card, hook=Hook())
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: carry_out(op, args, kwargs), "PrivateUse1")


@pytest.fixture
def device_is(monkeypatch):
    """Give `device_is(kind)` -> the second device, which is then of that kind."""

    def become(kind):
        made = PRETENDED[kind]
        monkeypatch.setitem(devices.KINDS, NAME, devices.KINDS.get(made.row, devices.UNKNOWN))
        monkeypatch.setattr(sys.modules[__name__], "now", made)
        if not made.streams:
            monkeypatch.delattr(Card, "Stream", raising=False)
        if devices.KINDS[NAME].shares_ram:
            monkeypatch.setattr(Card, "recommended_max_memory", lambda: MEMORY, raising=False)
            monkeypatch.setattr(Card, "current_allocated_memory", lambda: 0, raising=False)
        return torch.device(NAME)

    _bring_about(monkeypatch)
    yield become
    assert Card.stack == [Card.first]


@pytest.fixture
def card(device_is):
    """The second device, as a card that has its own memory and streams."""
    return device_is("card")


def _moved(make):
    """Make a tensor in RAM and copy it."""

    def made(*args, device=None, **kwargs):
        found = make(*args, device="cpu" if on_card(device) else device, **kwargs)
        return found.to(NAME) if on_card(device) else found

    return made


def _bring_about(monkeypatch):
    """Let torch find the device, and help where its Python backends fall short of one."""
    for name in ("tensor", "arange"):  # torch's own go past its Python backends
        monkeypatch.setattr(torch, name, _moved(getattr(torch, name)))

    def generator(*args, device):  # a Python backend has none; what it draws is brought to the device
        return rng.generator(*args)

    monkeypatch.setattr(written, "PLAIN", (torch.Tensor, There))
    monkeypatch.setattr(written, "_storage", lambda tensor: in_ram(tensor).untyped_storage()._cdata)
    monkeypatch.setattr(dropout, "generator", generator)
    monkeypatch.setattr(rounding, "generator", generator)
    monkeypatch.setattr(stream_module, "_pinned", lambda tensor: tensor)  # there is no driver to pin memory for
    monkeypatch.setattr(Hook, "in_use", True)
