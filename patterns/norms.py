"""The proof that RMSNorm's and LayerNorm's backward share, for norms written in primitives.

A norm's forward is found by its statistic, ``1 / sqrt(var + eps)`` in any spelling. Its
backward, as autograd spells it, is then compared with the closed form as polynomials in the
incoming gradient and the norm's input (:mod:`fusedbwd.patterns.algebra`)::

    RMSNorm    dx = gw·r − x·r³·mean(gw·x)                  r = 1/sqrt(mean(x²) + eps)
    LayerNorm  dx = (gw − mean(gw) − n·mean(gw·n))·r        n = (x − mean(x))·r

with gw = g·weight. A residual gradient may be added in the same expression, at any place in
the sum. Sums over rows of g·n (weight) and of g (bias) join the fusion.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import fx

from fusedbwd.graph import SAVED_KEY, depends_on, gradient_nodes, reachable, same_size, value
from fusedbwd.patterns.algebra import (
    Poly,
    computes,
    constant,
    mean,
    monomial,
    normal_form,
    strip,
    summed_width,
    variance,
)
from fusedbwd.patterns.pattern import Miss, only_user, require
from fusedbwd.patterns.walk import final_cast, same_numel, sums_above, sums_columns

aten = torch.ops.aten

_SQUARES = (aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor)
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.neg.default)
_MEANS = (aten.mean.dim, aten.div.Tensor, aten.mul.Tensor, operator.getitem)


@dataclass(frozen=True)
class Statistic:
    """A norm's ``var + eps`` in the forward.

    Attributes:
        x: the norm's input, before casts.
        var: mean of squares, or variance.
        eps: a float, or a 0-d node.
        shifted: ``var + eps``.
    """

    x: fx.Node
    var: fx.Node
    eps: fx.Node | float
    shifted: fx.Node

    @property
    def width(self) -> int:
        return value(self.x).shape[-1]


@dataclass(frozen=True)
class NormBackward:
    """A proven norm backward.

    Attributes:
        statistic: the norm that it belongs to.
        grad: the gradient of the norm's output.
        weight: the weight vector, a parameter or made of some, or None.
        weight_offset: what the forward adds to an RMSNorm's weight (Gemma: 1).
        residual: a gradient that is added to dx, or None.
        dx: the node of dx (plus the residual).
        dw, db: the nodes of the parameter gradients, or None.
    """

    statistic: Statistic
    grad: fx.Node
    weight: fx.Node | None
    weight_offset: float
    residual: fx.Node | None
    dx: fx.Node
    dw: fx.Node | None
    db: fx.Node | None


def statistics(graph: fx.Graph) -> Iterator[Statistic]:
    """Every ``var + eps`` under a square root."""
    for node in graph.nodes:
        is_root = node.op == "call_function" and (
            node.target in (aten.rsqrt.default, aten.sqrt.default)
            or (node.target is aten.pow.Tensor_Scalar and node.args[1] in (0.5, -0.5))
        )
        if not is_root:
            continue
        shifted = strip(node.args[0])
        if shifted.op != "call_function" or shifted.target not in (
            aten.add.Tensor,
            aten.add.Scalar,
        ):
            continue
        a, b = shifted.args[:2]
        for var, eps in ((a, b), (b, a)):
            if isinstance(var, fx.Node):
                for x in _inputs_of(var):
                    if _is_of_rows(shifted, x) and _is_of_rows(var, x):
                        yield Statistic(x, var, eps, shifted)


def _is_of_rows(statistic: fx.Node, x: fx.Node) -> bool:
    """Whether ``statistic`` has one value for each row of ``x``."""
    rows, width = value(statistic).shape, value(x).shape[-1:]
    return (
        len(rows) > 0
        and isinstance(rows[-1], int)
        and rows[-1] == 1
        and len(width) == 1
        and isinstance(width[0], int)
        and same_size((value(statistic).numel() * width[0],), (value(x).numel(),))
    )


def _inputs_of(var: fx.Node) -> list[fx.Node]:
    """What may be x, where ``var`` looks like a mean of squares or a variance of x."""
    node = strip(var)
    if node.op != "call_function":
        return []
    if node.target in (operator.getitem, aten.unsqueeze.default):
        node = node.args[0]
    if node.target in (aten.var.correction, aten.var_mean.correction):
        return [strip(node.args[0])]
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        node = strip(node.args[0])  # sum / N
    if node.target not in (aten.mean.dim, aten.sum.dim_IntList):
        return []
    square = strip(node.args[0])
    if square.op != "call_function" or square.target not in _SQUARES:
        return []
    x = strip(square.args[0])
    if x.op == "call_function" and x.target is aten.sub.Tensor:
        return [x, strip(x.args[0])]
    return [x]


def prove(row_sum_node: fx.Node, *, centered: bool) -> NormBackward | None:
    """The norm backward that ``row_sum_node`` is part of.

    Args:
        row_sum_node: a sum over rows in the backward.
        centered: LayerNorm rather than RMSNorm.

    Returns:
        None where no norm's input is among the summed factors.

    Raises:
        Miss: there is a norm, but its backward is not the closed form.
    """
    if summed_width(row_sum_node) is None or not row_sum_node.users:
        return None
    gradients = gradient_nodes(row_sum_node.graph)
    if row_sum_node not in gradients:
        return None
    factors = _factors(row_sum_node.args[0])
    chain = [n for n in reversed(factors) if n in gradients]
    reason = None
    for stat in statistics(row_sum_node.graph):
        if stat.x not in factors or not _is_norm(stat, centered):
            continue
        for grad in chain:  # deepest first: the gradient before the weight is applied
            try:
                return _prove_for(row_sum_node, stat, grad, factors, gradients, centered)
            except Miss as miss:
                reason = reason or str(miss)
    if reason is not None:
        raise Miss(reason)
    return None


def _is_norm(stat: Statistic, centered: bool) -> bool:
    """Whether the statistic is of the wanted kind, and exactly so."""
    x = monomial(stat.x)
    spread = variance(x, stat.width) if centered else mean(x**2, stat.width)
    return computes(stat.shifted, spread + normal_form(stat.eps), (stat.x,))


def _factors(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a product of, and those in turn, outermost first."""
    factors: dict[fx.Node, None] = {}
    todo = [(node, 0)]
    for n, depth in todo:
        if not isinstance(n, fx.Node) or not isinstance(value(n), torch.Tensor) or depth > 6:
            continue
        n = strip(n)
        if n not in factors:
            factors[n] = None
            if n.op == "call_function" and n.target in _PRODUCTS:
                todo.extend((a, depth + 1) for a in n.args)
    return list(factors)


def _prove_for(node, stat, grad, factors, gradients, centered) -> NormBackward:
    width = stat.width
    inside = reachable(grad)
    vectors = [f for f in factors if f not in gradients and not depends_on([f], [stat.x])]
    weight, offset = _weight(vectors, width, offsets=not centered)
    g, x = monomial(grad), monomial(stat.x)
    gw = g * (monomial(weight) + constant(offset)) if weight is not None else g
    v = normal_form(stat.shifted, leaves=(stat.x,))
    c = x - mean(x, width) if centered else x
    dx = gw * v ** Fraction(-1, 2) - c * mean(gw * c, width) * v ** Fraction(-3, 2)
    if centered:
        dx = dx - mean(gw, width) * v ** Fraction(-1, 2)

    def expandable(n: fx.Node) -> bool:
        return n not in gradients or n in inside

    require(same_numel(grad, stat.x), f"{grad.name} and {stat.x.name} differ in size")
    for top in sums_above(node):
        residuals = _residuals(top, grad, inside)
        if len(residuals) > 1 or not same_numel(top, stat.x):
            continue
        if any(not same_numel(r, stat.x) for r in residuals):
            continue
        expected = dx + monomial(residuals[0]) if residuals else dx
        leaves = (n for n in (grad, stat.x, weight, *residuals) if n is not None)
        if computes(top, expected, leaves, expandable=expandable):
            break
    else:
        raise Miss(
            f"no sum above {node.name} equals the backward of the norm of {stat.x.name} "
            f"for the gradient {grad.name}"
        )
    n = c * v ** Fraction(-1, 2)

    def column_sum(summand: Poly) -> fx.Node | None:
        for node in grad.graph.nodes:
            is_sum = node in inside and sums_columns(node, grad)
            if is_sum and computes(node.args[0], summand, (grad, stat.x), expandable=expandable):
                return node
        return None

    dw = column_sum(g * n) if weight is not None else None
    db = column_sum(g) if centered else None
    residual = residuals[0] if residuals else None
    return NormBackward(stat, grad, weight, offset, residual, final_cast(top), dw, db)


def _weight(factors: list[fx.Node], width: int, *, offsets: bool) -> tuple[fx.Node | None, float]:
    """The outermost vector among ``factors``, as weight and constant offset.

    What is not a weight plus a constant (or may not have one: ``offsets``) is a weight itself.
    """
    for n in factors:
        shape = value(n).shape
        if len(shape) == 0 or not same_size(shape, (*[1] * (len(shape) - 1), width)):
            continue
        form = normal_form(n)
        atoms = form.atoms()
        w = next(iter(atoms), None)
        if offsets and len(atoms) == 1 and isinstance(w, fx.Node) and value(w).numel() == width:
            rest = form - monomial(w)
            constants = [c for m, c in rest.terms if not m]
            if len(constants) == len(rest.terms) <= 1:
                return w, constants[0] if constants else 0.0
        return n, 0.0
    return None, 0.0


def _residuals(top: fx.Node, grad: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Terms of the sum ``top`` that do not come through the norm: its gradient itself
    (``x + norm(x)``), and what has nothing to do with it."""
    terms, todo = [], [top]
    while todo:
        term = todo.pop()
        node = strip(term)
        if node is grad:
            terms.append(node)
        elif node not in inside:
            terms.append(term)  # as the sum reads it, behind whatever views
        elif node.op == "call_function" and node.target is aten.add.Tensor:
            if node.kwargs.get("alpha", 1) != 1:
                continue
            todo.extend(a for a in node.args if isinstance(a, fx.Node))
    return terms


# --- what the two norm patterns need to build their operands


def statistic_operands(stat: Statistic) -> tuple[fx.Node, fx.Node | None, bool]:
    """What the kernel's 1/sqrt comes from, so that a statistic that is given is used as it is.

    Returns:
        (1/sqrt, None, False) where the schema saves that; (var, eps, False) for an eps that
        is a tensor; else (var + eps, None, True), of which the rewrite takes 1/sqrt.
    """
    rstd = _saved(stat, normal_form(stat.shifted, (stat.x,)) ** Fraction(-1, 2), stat.shifted)
    if rstd is not None:
        return rstd, None, False
    is_number = isinstance(stat.eps, fx.Node) and value(stat.eps).dim() == 0
    return (stat.var, stat.eps, False) if is_number else (stat.shifted, None, True)


def saved_normalized(stat: Statistic, *, centered: bool) -> fx.Node | None:
    """The normalized tensor, where the schema saves it."""
    x = monomial(stat.x)
    c = x - mean(x, stat.width) if centered else x
    return _saved(stat, c * normal_form(stat.shifted, (stat.x,)) ** Fraction(-1, 2), stat.x)


def _saved(stat: Statistic, formula: Poly, like: fx.Node) -> fx.Node | None:
    """The tensor that the schema saves, has the rows of ``like``, and computes ``formula``."""
    for node in stat.x.graph.nodes:
        is_like = SAVED_KEY in node.meta and same_numel(node, like)
        if is_like and computes(node, formula, (stat.x,)):
            return node
    return None


def mean_of(stat: Statistic) -> fx.Node:
    """The forward's mean over rows of the norm's input."""
    wanted = mean(monomial(stat.x), stat.width)
    for node in stat.x.graph.nodes:
        is_candidate = node.op == "call_function" and node.target in _MEANS
        if is_candidate and computes(node, wanted, (stat.x,)):
            return node
    raise Miss(f"the mean of {stat.x.name} is not in the forward")


def with_residual(dx: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """A gradient as it leaves a composite norm op, and the residual gradient added to it.

    Returns:
        (``dx`` or the sum that alone uses it, the other term or None).
    """
    rounded = final_cast(dx)
    user = only_user(rounded)
    if (
        user is not None
        and user.op == "call_function"
        and user.target is aten.add.Tensor
        and user.kwargs.get("alpha", 1) == 1
    ):
        others = [a for a in user.args if a is not rounded]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            other = others[0]
            if same_size(value(other).shape, value(dx).shape) and other not in reachable(dx):
                return user, other
    return rounded, None
