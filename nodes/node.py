"""The base of our nodes: what reaches `execute` has been checked against the node's own schema."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from .comfyui.failures import Noticed
from .sockets import CONTENTS, SUFFIX, io

KINDS: dict[str, tuple[type, str]] = {  # of values that other nodes may link
    "INT": (numbers.Integral, "a whole number"),
    "FLOAT": (numbers.Real, "a number"),
    "STRING": (str, "text"),
    "BOOLEAN": (bool, "true or false"),
    "COMBO": (str, "one of its list"),
}
LONGEST_TEXT = 100_000  # characters of an input


class Node(io.ComfyNode):
    """A node whose `execute` gets inputs that its schema allows, whoever wrote the prompt.

    ComfyUI checks the values that are typed into widgets, not linked ones, nor what a socket gets from a prompt.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, check in (("execute", _checked), ("fingerprint_inputs", _checked_as_known)):
            method = getattr(vars(cls).get(name), "__func__", None)
            if method and not hasattr(method, "__wrapped__"):  # ComfyUI runs a locked copy of the class, made of ours
                setattr(cls, name, classmethod(check(method)))


def _checked(execute: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    @functools.wraps(execute)
    def checked(cls: type[Node], /, **inputs: Any) -> io.NodeOutput:
        schema = cls.define_schema()
        with Noticed():
            check_inputs(schema.inputs, inputs, schema.display_name.removesuffix(SUFFIX), several=schema.is_input_list)
            known = {each.id for each in schema.inputs}  # ComfyUI passes a link into any other name, too
            return execute(cls, **{name: value for name, value in inputs.items() if name in known})

    return checked


def _checked_as_known(fingerprint: Callable[..., str]) -> Callable[..., str]:
    """Check the inputs that a fingerprint names; linked ones, which are not known yet, are left out."""
    named = inspect.signature(fingerprint).parameters

    @functools.wraps(fingerprint)
    def checked(cls: type[Node], /, **inputs: Any) -> str:
        schema = cls.define_schema()
        known = {name: value for name, value in inputs.items() if name in named and value is not None}
        check_inputs(
            [each for each in schema.inputs if each.id in known], known, schema.display_name.removesuffix(SUFFIX)
        )
        return fingerprint(cls, **known)

    return checked


def check_inputs(inputs: Iterable[io.Input], values: Mapping[str, Any], node: str, *, several: bool = False) -> None:
    """Raise ValueError for the first missing or wrong value, with its name, the node, and what to do.

    several: each value is a list of values.
    """
    for each in inputs:
        value = values.get(each.id)
        if value is None or (several and not value):
            if not each.optional:
                raise ValueError(f"{each.id} of {node} is missing; {_remedy(each)}.")
            continue
        for one in value if several else [value]:
            _check(each, one, node)


def _check(each: io.Input, value: Any, node: str) -> None:
    """Check a value; raises ValueError."""
    name, kind = f"{each.id} of {node}", each.get_io_type()
    if isinstance(each, io.DynamicCombo.Input):
        chosen = value.get(each.id) if isinstance(value, Mapping) else None
        option = next((option for option in each.options if option.key == chosen), None)
        if option is None:
            raise ValueError(f"{name} is none of its list; {_remedy(each)}.")
        check_inputs(option.inputs, value, node)
    elif kind in CONTENTS:
        if not isinstance(value, CONTENTS[kind][0]):
            raise ValueError(f"{name} is {described(value)}; {_remedy(each)}.")
    elif kind in KINDS:
        _check_value(each, value, name)
    elif not _is_linked(kind, value):
        raise ValueError(f"{name} is {described(value)}; {_remedy(each)}.")


def _check_value(each: io.Input, value: Any, name: str) -> None:
    expected, wanted = KINDS[each.get_io_type()]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ValueError(f"{name} is {described(value)} and must be {wanted}; {_remedy(each)}.")
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise ValueError(f"{name} has {len(value)} characters; shorten it to {LONGEST_TEXT} at most.")
        # ComfyUI's worker ends for good where it logs an error with half a character in it.
        if isinstance(each, io.String.Input) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} has a character that no text can have; type it again.")
        if isinstance(each, io.Combo.Input) and each.options is not None and value not in map(str, each.options):
            raise ValueError(f"{name} is {value[:80]!r}, which is not in its list; {_remedy(each)}.")
    elif isinstance(each, io.Int.Input | io.Float.Input):
        low = -math.inf if each.min is None else each.min
        high = math.inf if each.max is None else each.max
        if not (low <= value <= high and abs(value) != math.inf):  # nor is NaN
            raise ValueError(f"{name} is {described(value)}; set it to a number from {low:g} to {high:g}.")


def _is_linked(kind: str, value: Any) -> bool:
    """Tell whether a value may come from a node's output of a kind of ComfyUI's; what JSON can write does not."""
    if kind == "*":
        return True
    if kind in ("IMAGE", "MASK"):
        return isinstance(value, torch.Tensor)
    if kind == "LORA_MODEL":
        return isinstance(value, Mapping) and all(isinstance(each, torch.Tensor) for each in value.values())
    return not isinstance(value, str | numbers.Number | list | dict)


def described(value: Any) -> str:
    """Describe a wrong value in a word or two, without its content where that may be long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, numbers.Real):
        size = cast("float", abs(value))
        return "a huge number" if 1e300 < size < math.inf else f"{float(value):g}"
    if isinstance(value, str):
        return repr(value[:80])
    return {dict: "an object", list: "a list", type(None): "nothing"}.get(type(value), f"a {type(value).__name__}")


def _remedy(each: io.Input) -> str:
    """Say what to do for an input: link a node, or choose a value."""
    kind = each.get_io_type()
    if kind in CONTENTS:
        return f"link {CONTENTS[kind][1]} into it"
    if isinstance(each, io.DynamicCombo.Input):
        return f"set it to {_some(option.key for option in each.options)}"
    if isinstance(each, io.Combo.Input) and each.options:
        return f"set it to {_some(map(str, each.options))}"
    if kind in KINDS:
        return "set it on the node"
    return f"link a node's {kind} output into it"


def _some(options: Iterable[str]) -> str:
    """Join a few options."""
    options = list(options)
    return " or ".join(options) if len(options) <= 4 else f"{', '.join(options[:3])} or another of its list"
