"""Evaluate formulas that users write, for example for the learning rate: simpleeval runs them, never Python.

Every number is a float, so no power exceeds 1.8e308. The limit on length bounds the cost of one value.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

LONGEST = 300  # characters
CONSTANTS = {"pi": math.pi, "e": math.e}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "exp", "log", "sqrt")},
    **{"abs": abs, "min": min, "max": max},
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd, ast.Not)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
OPERATORS: dict[type[ast.AST], Any] = {kind: DEFAULT_OPERATORS[kind] for kind in (*ARITHMETIC, *COMPARISONS)}
OPERATORS[ast.Pow] = math.pow  # not **, which makes complex numbers of negative ones
STRUCTURE = (ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.And, ast.Or, ast.Compare)
STRUCTURE += (ast.IfExp, ast.Call)

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
        for node in ast.walk(tree):
            _check(node, names)
    except SyntaxError as problem:
        raise ValueError(f"The expression {text!r} cannot be read: {problem.msg}.") from None
    except (MemoryError, RecursionError):  # of the parser, which some versions of Python raise for deep nesting
        raise ValueError(f"The expression {text!r} is nested too deep; simplify it.") from None

    def evaluate(values: Mapping[str, float]) -> float:
        evaluator = SimpleEval(operators=OPERATORS, functions=FUNCTIONS, names={**CONSTANTS, **values})
        try:
            result = float(evaluator.eval(text, previously_parsed=tree))
        except RecursionError:
            raise ValueError("is nested too deep") from None
        except (ArithmeticError, InvalidExpression, TypeError, ValueError) as problem:
            raise ValueError(f"has no value ({problem})") from None
        if not math.isfinite(result):
            raise ValueError(f"is {result}")
        return result

    return evaluate


def _check(node: ast.AST, names: tuple[str, ...]) -> None:
    """Raise ValueError for a part that no formula has; make its numbers floats."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
    known = isinstance(node, STRUCTURE) or type(node) in OPERATORS
    if isinstance(node, ast.Name):
        known = node.id in (*names, *CONSTANTS, *FUNCTIONS)
    elif isinstance(node, ast.Call):
        known = called and not node.keywords
    elif isinstance(node, ast.Constant):
        known = type(node.value) in (int, float)
        if known:
            number = cast("float", node.value)
            if number > 1e300:  # a whole number might be too large for a float
                raise ValueError("A number in the expression is larger than 1e300.")
            node.value = float(number)
    if not known:
        raise ValueError(
            f"The expression cannot use {ast.unparse(node)!r}; it can use {', '.join(names)}, numbers, pi, e, "
            f"+ - * / // % **, comparisons, a if b else c, and {', '.join(FUNCTIONS)}."
        )
