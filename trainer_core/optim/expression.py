"""Evaluate formulas that users write, for example for the learning rate; they are parsed, never run as Python.

Every number is a float, so no power exceeds 1.8e308. The limits on length and depth bound the cost of one value.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST, DEEPEST = 300, 40  # characters, nested operations

CONSTANTS = {"pi": math.pi, "e": math.e}
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {  # with fewest and most arguments
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tan": (math.tan, 1, 1),
    "exp": (math.exp, 1, 1),
    "log": (math.log, 1, 2),
    "sqrt": (math.sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "floor": (lambda x: float(math.floor(x)), 1, 1),
    "ceil": (lambda x: float(math.ceil(x)), 1, 1),
    "min": (min, 2, 20),
    "max": (max, 2, 20),
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # not **, which makes complex numbers of negative ones
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

Value = Callable[[Mapping[str, float]], float]


@functools.lru_cache(maxsize=64)
def read_expression(text: str, names: tuple[str, ...]) -> Value:
    """Parse a formula into a function from the values of `names` to its value; raises ValueError that names the fault.

    The function raises ValueError where the formula has no finite value.
    """
    if not text.isprintable():  # also keeps null characters and line breaks from the parser
        raise ValueError(f"The expression {text!r} has unprintable characters; write it in one line.")
    if len(text) > LONGEST:
        raise ValueError(f"The expression has {len(text)} characters; shorten it to {LONGEST}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as problem:
        raise ValueError(f"The expression {text!r} cannot be read: {problem.msg}.") from None
    except (MemoryError, RecursionError):  # of the parser, which some versions of Python raise for deep nesting
        raise ValueError(f"The expression {text!r} is nested too deep; simplify it.") from None
    if _depth(tree) > DEEPEST:
        raise ValueError(f"The expression {text!r} is nested more than {DEEPEST} levels deep; simplify it.")
    value = _read(tree, names)

    def evaluate(values: Mapping[str, float]) -> float:
        try:
            result = float(value(values))
        except (ArithmeticError, ValueError) as problem:
            raise ValueError(f"has no value ({problem})") from None
        if not math.isfinite(result):
            raise ValueError(f"is {result}")
        return result

    return evaluate


def _depth(tree: ast.AST) -> int:
    """Measure the depth of a tree, without recursion."""
    deepest, waiting = 0, [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return deepest


def _read(node: ast.AST, names: Sequence[str]) -> Value:
    """Turn a node of the tree into a function; raises ValueError for anything that is not in the tables above."""

    def parts(*nodes: ast.AST) -> list[Value]:
        return [_read(part, names) for part in nodes]

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        if node.value > 1e300:  # a whole number might be too large for a float
            raise ValueError("A number in the expression is larger than 1e300.")
        number = float(node.value)
        return lambda values: number
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        constant = CONSTANTS[node.id]
        return lambda values: constant
    if isinstance(node, ast.Name) and node.id in names:
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        apply, (inner,) = OPERATORS[type(node.op)], parts(node.operand)
        return lambda values: apply(inner(values))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        apply, (left, right) = OPERATORS[type(node.op)], parts(node.left, node.right)
        return lambda values: apply(left(values), right(values))
    if isinstance(node, ast.IfExp):
        test, yes, no = parts(node.test, node.body, node.orelse)
        return lambda values: yes(values) if test(values) else no(values)
    if isinstance(node, ast.BoolOp):
        return _either(isinstance(node.op, ast.Or), parts(*node.values))
    if isinstance(node, ast.Compare) and all(type(op) in OPERATORS for op in node.ops):
        compare, terms = [OPERATORS[type(op)] for op in node.ops], parts(node.left, *node.comparators)
        return lambda values: all(f(a(values), b(values)) for f, a, b in zip(compare, terms, terms[1:], strict=False))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        apply, fewest, most = FUNCTIONS[node.func.id]
        if node.keywords or not fewest <= len(node.args) <= most:
            count = "1 value" if most == 1 else f"{fewest} to {most} values"
            raise ValueError(f"{node.func.id} takes {count} in an expression, not {ast.unparse(node)!r}.")
        arguments = parts(*node.args)
        return lambda values: apply(*(argument(values) for argument in arguments))
    raise ValueError(
        f"The expression cannot use {ast.unparse(node)!r}; it can use {', '.join(names)}, numbers, pi, e, "
        f"+ - * / // % **, comparisons, a if b else c, and {', '.join(FUNCTIONS)}."
    )


def _either(wanted: bool, terms: Sequence[Value]) -> Value:
    """Give, as Python's `or` (wanted is True) and `and`, the first term that is as true as wanted, else the last."""

    def value(values: Mapping[str, float]) -> float:
        result = terms[0](values)
        for term in terms[1:]:
            if bool(result) is wanted:
                break
            result = term(values)
        return result

    return value
