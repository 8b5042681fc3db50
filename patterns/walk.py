"""Steps through a joint graph that several patterns take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fusedbwd.graph import same_size, value
from fusedbwd.patterns.algebra import is_float, strip
from fusedbwd.patterns.pattern import Miss, only_user

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


def product_factors(node: fx.Node) -> list[fx.Node]:
    """The two factors of a product, behind casts and views; the node alone if it is none."""
    node = strip(node)
    if node.op == "call_function" and node.target is aten.mul.Tensor:
        return [strip(a) for a in node.args if isinstance(a, fx.Node)]
    return [node]


def pointwise_users(node: fx.Node) -> Iterator[fx.Node]:
    """Users of ``node``, looking through casts and views that keep rows whole."""
    for user in node.users:
        if strip(user) is strip(node):
            yield from pointwise_users(user)
        else:
            yield user


def final_cast(node: fx.Node) -> fx.Node:
    """The cast that alone uses ``node``, when there is one, else ``node``: where it is rounded."""
    user = only_user(node)
    is_cast = user is not None and user.op == "call_function" and user.target in _CASTS
    return user if is_cast and is_float(user) else node


def shaped_like(node: fx.Node, sources: Iterable[fx.Node]) -> fx.Node:
    """A view or cast of one of ``sources`` that has ``node``'s shape: where a replacement
    of ``node`` takes its (symbolic) sizes from.

    Raises:
        Miss: there is none.
    """
    todo = list(sources)
    for n in todo:
        if same_size(value(n).shape, value(node).shape):
            return n
        todo.extend(u for u in n.users if strip(u) is strip(n))
    raise Miss(f"nothing that the fused op reads has the shape of {node.name}")


def same_numel(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors provably have equally many elements and equal rows."""
    va, vb = value(a), value(b)
    return (
        va.dim() > 0
        and vb.dim() > 0
        and same_size((va.shape[-1], va.numel()), (vb.shape[-1], vb.numel()))
    )


def sums_columns(node: fx.Node, rows_of: fx.Node) -> bool:
    """Whether ``node`` is a sum over all rows, of as many rows as ``rows_of`` has: a gradient
    that was expanded before it was summed would count more than once."""
    if node.target is not aten.sum.dim_IntList:
        return False
    source, dims = node.args[:2]
    rank = value(source).dim()
    return (
        rank > 1
        and sorted(d % rank for d in dims or ()) == list(range(rank - 1))
        and same_numel(source, rows_of)
    )


def product_of(node: fx.Node) -> fx.Node | None:
    """The matmul of which ``node`` is a view, or None."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    is_product = node.op == "call_function" and node.target is aten.mm.default
    return node if is_product else None


def sum_over_rows(dx: fx.Node) -> fx.Node | None:
    """The sum of ``dx`` over all rows, behind views."""
    todo = [dx]
    while todo:
        node = todo.pop()
        for user in node.users:
            if sums_columns(user, dx):
                return user
            if strip(user) is strip(dx):
                todo.append(user)
    return None
