"""Let a traced program write into no tensor: it computes new ones, so that nothing which gradients need is lost.

torch's compiler refuses a backward pass that needs a tensor from before a write, as autograd does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

ANEW: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
}


def out_of_place(program: GraphModule) -> GraphModule:
    """Replace the calls of a program that write into tensors, and return the same program.

    Later calls read the new tensor. A view from before the write does not see it: the caller compares the first pass
    with the uncompiled one.
    """
    for node in list(program.graph.nodes):
        if (written := _written(node)) is not None:
            after = _users_after(written, node)
            new = _anew(node, written)
            for user in after:
                user.replace_input_with(written, new)
    program.recompile()
    return program


def _written(node: Node) -> Node | None:
    """Return the tensor that a call writes into; None where there is none, or no way to compute a new one."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    by_call = node.op == "call_function" and (
        node.target in ANEW or node.target is operator.setitem or node.kwargs.get("inplace") is True
    )
    return node.args[0] if by_call or (node.op == "call_method" and _method(node.target)) else None


def _method(name: Any) -> str:
    """Return the method that computes what another, such as `add_`, writes; "" for any else."""
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
    return plain if callable(getattr(Tensor, plain, None)) else ""


def _users_after(written: Node, node: Node) -> list[Node]:
    after = set()
    following = node.next
    while following.op != "root":
        after.add(following)
        following = following.next
    return [user for user in written.users if user in after]


def _anew(node: Node, written: Node) -> Node:
    """Let a call compute a new tensor, and return the node of that tensor."""
    graph = node.graph
    if node.target is operator.setitem:
        with graph.inserting_before(node):
            copy = graph.call_method("clone", (written,))
        node.replace_input_with(written, copy)
        return copy
    if node.op == "call_method":
        node.target = _method(node.target)
    elif node.target in ANEW:
        node.target = ANEW[node.target]
    else:
        node.kwargs = {**node.kwargs, "inplace": False}
    with graph.inserting_after(node):
        # A sum of bfloat16 and float32 is in float32, but what is written into keeps its type.
        typed = graph.call_method("type_as", (node, written))
    node.replace_all_uses_with(typed, delete_user_cb=lambda user: user is not typed)
    return typed
