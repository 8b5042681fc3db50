"""RoPE's backward, proven half by half.

Rotary embeddings by halves, ``y = z·cos + cat(−z₂, z₁)·sin``, have the gradient::

    dz₁ = dy₁·cos₁ + dy₂·sin₂        dz₂ = dy₂·cos₂ − dy₁·sin₁

Autograd spells it with slices, scatters into zeros and concatenations, differently for every
way to write ``rotate_half``. Here a value is a pair of polynomials, one per half of the last
dimension (:mod:`fusedbwd.patterns.algebra`), and slicing and joining are bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fusedbwd.graph import reachable, same_size, value
from fusedbwd.patterns.algebra import NotPolynomial, Poly, constant, is_float, monomial
from fusedbwd.patterns.pattern import only_user

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_COPIES = (*_CASTS, aten.clone.default, aten.alias.default)
_MAX_NODES = 16  # from an embedding's gradient to the sum that ends its backward


@dataclass(frozen=True)
class Rotation:
    """A proven RoPE backward: ``dz`` from the gradient, by tables [B or 1, S, D]."""

    dz: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotation_of(dy: fx.Node) -> Rotation | None:
    """The RoPE backward that ``dy`` [B, N, S, D] alone flows into, or None."""
    inside = reachable(dy)
    for top in _sums_below(dy):
        try:
            halves = _halves(top, dy, inside)
        except NotPolynomial:
            continue
        if len(halves) != 2:
            continue
        tables = {a[0] for p in halves for a in p.atoms() if isinstance(a, tuple)} - {dy}
        if len(tables) != 2:
            continue
        for cos, sin in (tuple(tables), tuple(tables)[::-1]):
            if all(h.matches(w) for h, w in zip(halves, _formula(dy, cos, sin), strict=True)):
                rounded = only_user(top)
                is_cast = rounded is not None and rounded.target in _CASTS
                return Rotation(rounded if is_cast else top, cos, sin)
    return None


def _formula(dy: fx.Node, cos: fx.Node, sin: fx.Node) -> tuple[Poly, Poly]:
    (d1, d2), (c1, c2), (s1, s2) = (_pair(n) for n in (dy, cos, sin))
    return d1 * c1 + d2 * s2, d2 * c2 - d1 * s1


def _pair(node: fx.Node) -> tuple[Poly, Poly]:
    return monomial((node, 0)), monomial((node, 1))


def _sums_below(dy: fx.Node) -> list[fx.Node]:
    """Additions reached from ``dy``, the last in the graph first."""
    found, todo = [], [dy]
    for node in todo:
        for user in node.users:
            if user not in todo and len(todo) < _MAX_NODES:
                todo.append(user)
                if user.op == "call_function" and user.target is aten.add.Tensor:
                    found.append(user)
    order = {n: i for i, n in enumerate(dy.graph.nodes)}
    return sorted(found, key=order.__getitem__, reverse=True)


def _halves(node, dy: fx.Node, inside: set[fx.Node]) -> tuple[Poly, ...]:
    """``node`` as polynomials: one per half of the last dimension, or one if it is a half."""
    if isinstance(node, (int, float)):
        return (constant(float(node)),)
    if node is dy:
        return _pair(node)
    if not isinstance(node, fx.Node) or not isinstance(value(node), torch.Tensor):
        raise NotPolynomial(str(node))
    if node not in inside:
        return _outside(node, value(dy))

    def of(n) -> tuple[Poly, ...]:
        return _halves(n, dy, inside)

    last = value(node).dim() - 1
    if node.target in _COPIES:
        return of(node.args[0])
    if node.target is aten.neg.default:
        return tuple(p * -1.0 for p in of(node.args[0]))
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor) and not node.kwargs:
        return _elementwise(node.target, *(of(a) for a in node.args))
    if node.target is aten.cat.default and (*node.args, 0)[1] % (last + 1) == last:
        parts = [of(n) for n in node.args[0]]
        if len(parts) == 2 and all(len(p) == 1 for p in parts):
            return parts[0] + parts[1]
    if node.target is aten.slice.Tensor:
        whole = of(node.args[0])
        if same_size(value(node).shape, value(node.args[0]).shape):
            return whole
        if len(whole) == 2:
            return (whole[_half_of(node.args[1:], last, value(node.args[0]).shape[-1])],)
    if node.target is aten.slice_scatter.default:
        base = of(node.args[0])
        if value(node.args[1]).shape[-1] == 0:  # nothing of a head is passed by, and added back
            return base
        source = of(node.args[1])
        half = _half_of(node.args[2:], last, value(node).shape[-1])
        if len(base) == 2 and len(source) == 1:
            return (source[0], base[1]) if half == 0 else (base[0], source[0])
    raise NotPolynomial(node.name)


def _outside(node: fx.Node, like: torch.Tensor) -> tuple[Poly, ...]:
    """A table, used as [B or 1, 1, S, D], or zeros."""
    shape = value(node).shape
    if node.target is aten.full.default and node.args[1] == 0:
        zero = constant(0.0)
        return (zero, zero) if shape[-1] == like.shape[-1] else (zero,)
    batch, _, seq, width = like.shape
    table = node
    while table.op == "call_function" and table.target in _COPIES:
        table = table.args[0]
    if (
        table.target is aten.unsqueeze.default
        and table.args[1] % 4 == 1
        and any(same_size(shape, (b, 1, seq, width)) for b in (batch, 1))
    ):
        return _pair(_unwidened(table.args[0]))
    raise NotPolynomial(node.name)


def _unwidened(table: fx.Node) -> fx.Node:
    """The tensor behind casts that round nothing: q's and k's own casts of one table."""
    while table.op == "call_function" and table.target in _CASTS:
        source = table.args[0]
        if not is_float(source) or value(source).dtype.itemsize >= value(table).dtype.itemsize:
            break
        table = source
    return table


def _elementwise(op, a: tuple[Poly, ...], b: tuple[Poly, ...]) -> tuple[Poly, ...]:
    if len(a) != len(b):
        raise NotPolynomial("halves and wholes do not mix")
    combine = {
        aten.add.Tensor: Poly.__add__,
        aten.sub.Tensor: Poly.__sub__,
        aten.mul.Tensor: Poly.__mul__,
    }[op]
    return tuple(combine(x, y) for x, y in zip(a, b, strict=True))


def _half_of(args, last: int, width: int) -> int:
    """Which half ``(dim, start, end)`` takes of a dimension of ``width``."""
    dim, start, end = (*args, *(0, 0, width)[len(args) :])[:3]
    if len(args) > 3 or dim % (last + 1) != last or width % 2:
        raise NotPolynomial("not half of the last dimension")
    bounds = (start or 0, width if end is None else min(end, width))
    if bounds == (0, width // 2):
        return 0
    if bounds == (width // 2, width):
        return 1
    raise NotPolynomial("not half of the last dimension")
