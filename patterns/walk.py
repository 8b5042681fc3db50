"""Steps through a joint graph that several patterns take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fusedbwd.graph import same_size, value
from fusedbwd.patterns.algebra import is_arithmetic, is_float, strip
from fusedbwd.patterns.pattern import Miss, only_user

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_MAX_CLIMB = 24  # nodes from a term up to the gradient that it belongs to
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


def cofactors(node: fx.Node) -> list[fx.Node]:
    """What ``node`` is multiplied with, behind casts and views."""
    products = [n for n in pointwise_users(node) if n.target is aten.mul.Tensor]
    return [f for n in products for f in product_factors(n) if f is not strip(node)]


def final_cast(node: fx.Node) -> fx.Node:
    """The cast that alone uses ``node``, when there is one, else ``node``: where it is rounded."""
    user = only_user(node)
    is_cast = user is not None and user.op == "call_function" and user.target in _CASTS
    return user if is_cast and is_float(user) else node


def sums_above(node: fx.Node) -> list[fx.Node]:
    """Sums and differences that ``node`` flows into by arithmetic, the outermost first."""
    climbed = {node: None}
    for n in (todo := [node]):
        for user in n.users:
            if user not in climbed and is_arithmetic(user) and len(climbed) < _MAX_CLIMB:
                climbed[user] = None
                todo.append(user)
    return [n for n in reversed(climbed) if n.target in (aten.add.Tensor, aten.sub.Tensor)]


def _cat_of(parts: tuple[fx.Node, ...]) -> fx.Node | None:
    """The concatenation along the last dimension that alone uses ``parts``, in their order."""
    whole = only_user(parts[0])
    if whole is None or whole.target is not aten.cat.default or list(whole.args[0]) != [*parts]:
        return None
    rank = value(whole).dim()
    alone = all(only_user(part) is whole for part in parts)
    return whole if alone and (*whole.args, 0)[1] % rank == rank - 1 else None


def concatenation(*parts: fx.Node) -> fx.Node | None:
    """The node that joins ``parts``, used for nothing else, in their order along the last
    dimension: the gradient of a tensor that they are all of, by ``chunk`` or ``split`` (a ``cat``)
    or by slices (a sum of the parts, each written into zeros)."""
    if (whole := _cat_of(parts)) is not None:
        return whole
    placed, start = [only_user(part) for part in parts], 0
    for node, part in zip(placed, parts, strict=True):
        end = start + value(part).shape[-1]
        if node is None or only_user(node) is None or not _placed(node, part, start, end):
            return None
        start = end
    whole = placed[0]
    for _ in parts[1:]:
        whole = only_user(whole)
        if whole is None or whole.target is not aten.add.Tensor:
            return None
        terms = _terms(whole, placed)
        if len(terms) == len(parts) and set(terms) == set(placed):
            return whole if same_size(value(whole).shape[-1:], (start,)) else None
    return None


def _terms(node: fx.Node, leaves: list[fx.Node]) -> list[fx.Node]:
    """What the sum ``node`` adds up, looking into sums that are used for nothing else."""
    if node in leaves or node.target is not aten.add.Tensor or node.kwargs:
        return [node]
    terms = []
    for a in node.args:
        is_inner = isinstance(a, fx.Node) and only_user(a) is node
        terms += _terms(a, leaves) if is_inner else [a]
    return terms


def _placed(node: fx.Node, part: fx.Node, start: int, end: int) -> bool:
    """Whether ``node`` is zeros, with ``part`` in columns ``start`` to ``end``."""
    if node.target is not aten.slice_scatter.default or len(node.args) != 5 or node.kwargs:
        return False
    base, source, dim, first, stop = node.args
    rank, width = value(node).dim(), value(node).shape[-1]
    return (
        source is part
        and base.target is aten.full.default
        and base.args[1] == 0
        and dim % rank == rank - 1
        and (first, min(stop, width)) == (start, end)
    )


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
