"""A normal form for elementwise and row-reduction arithmetic: how a rewrite is proven.

Autograd spells one gradient in many ways: ``x * x`` or ``pow(x, 2)``, ``rsqrt(v)`` or
``1 / sqrt(v)``, sums in any order, casts anywhere. :func:`normal_form` reduces a node to a
polynomial in chosen leaf nodes, so that two spellings of one formula become equal values and
anything else does not. A matcher then *proves* a rewrite by comparing the graph's polynomial
with the formula of the fused kernel.

The arithmetic is exact but for four things, which is what a rewrite may change: the order of
sums and products, the rounding between them (casts between float16, bfloat16, float32 and
float64 are looked through), a coefficient's last bits, and what is not a number (x / x is 1,
whatever x is).

Values are functions on rows: leading dimensions index rows, the last dimension is the row
itself, and sums run over whole rows. A form does not tell how many rows its value has: where
two forms are equal, the values are equal if both have as many rows as each of the leaves that
has more than one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import torch
from torch import fx

from fusedbwd.patterns.pattern import Miss

aten = torch.ops.aten
prims = torch.ops.prims

_MAX_TERMS = 64  # a formula of ours has at most eight; more means it is not one
_MAX_DEPTH = 64  # nodes from a formula down to its leaves; deep graphs end here
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DIGITS = 9  # significant digits in which coefficients must agree


class NotPolynomial(Miss):
    """The value has no (small) normal form."""


@dataclass(frozen=True)
class RowSum:
    """The sum over a row of a polynomial without factors that are constant along the row."""

    of: Poly


@dataclass(frozen=True)
class Base:
    """A sum that is raised to a power other than a natural number, such as variance + eps."""

    of: Poly


@dataclass(frozen=True)
class Function:
    """A named function of a polynomial, such as a sigmoid."""

    name: str
    of: Poly


Atom: TypeAlias = fx.Node | RowSum | Base | Function
Monomial = frozenset  # of (Atom, Fraction) pairs: a product of powers


@dataclass(frozen=True)
class Poly:
    """A sum of monomials with coefficients. Compare with :meth:`matches`."""

    terms: frozenset  # of (Monomial, float)

    @staticmethod
    def total(terms: Iterable[tuple[Monomial, float]]) -> Poly:
        """The sum of ``terms``."""
        sums: dict[Monomial, float] = {}
        sizes: dict[Monomial, float] = {}
        for m, c in terms:
            sums[m] = sums.get(m, 0.0) + c
            sizes[m] = max(sizes.get(m, 0.0), abs(c))
        if len(sums) > _MAX_TERMS or not all(map(math.isfinite, sums.values())):
            raise NotPolynomial(f"more than {_MAX_TERMS} terms, or infinite ones")
        # What cancels to rounding noise is zero.
        return Poly(frozenset((m, c) for m, c in sums.items() if abs(c) > 1e-12 * sizes[m]))

    def matches(self, other: Poly) -> bool:
        """Whether both are the same polynomial, but for the last bits of coefficients."""
        mine, theirs = dict(self.terms), dict(other.terms)
        return mine.keys() == theirs.keys() and all(
            math.isclose(c, theirs[m], rel_tol=10.0**-_DIGITS) for m, c in mine.items()
        )

    def canonical(self) -> Poly:
        """This polynomial with rounded coefficients, which is how atoms hold theirs."""
        return Poly(frozenset((m, float(f"{c:.{_DIGITS - 1}e}")) for m, c in self.terms))

    def __add__(self, other: Poly) -> Poly:
        return Poly.total((*self.terms, *other.terms))

    def __mul__(self, other: Poly | float) -> Poly:
        if not isinstance(other, Poly):
            other = constant(other)
        if len(self.terms) * len(other.terms) > _MAX_TERMS:
            raise NotPolynomial(f"more than {_MAX_TERMS} terms")
        return Poly.total(
            (_times(m1, m2), c1 * c2) for m1, c1 in self.terms for m2, c2 in other.terms
        )

    def __sub__(self, other: Poly) -> Poly:
        return self + other * -1.0

    def __pow__(self, exponent: Fraction | int) -> Poly:
        exponent = Fraction(exponent)
        if exponent.denominator == 1 and 0 <= exponent <= 4:
            product = constant(1.0)
            for _ in range(int(exponent)):
                product = product * self
            return product
        if not self._distributes(exponent):
            return monomial(Base(self.canonical()), exponent)
        ((m, c),) = self.terms
        return Poly.total([(frozenset((a, e * exponent) for a, e in m), c ** float(exponent))])

    def _distributes(self, exponent: Fraction) -> bool:
        """Whether the power of this sum is the product of its factors' powers.

        A root is that of a single odd power alone: sqrt(x * x) is not x, and sqrt(x * y) is
        defined where neither sqrt(x) nor sqrt(y) is.
        """
        if len(self.terms) != 1:
            return False
        ((m, c),) = self.terms
        is_root = exponent.denominator != 1
        return not is_root or (c > 0 and len(m) <= 1 and all(e % 2 != 0 for _, e in m))

    def atoms(self) -> set[Atom]:
        """Every atom of every term, not looking inside sums and functions."""
        return {a for m, _ in self.terms for a, _ in m}


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, e in b:
        powers[atom] = powers.get(atom, Fraction(0)) + e
    return frozenset((atom, e) for atom, e in powers.items() if e)


def constant(c: float) -> Poly:
    return Poly.total([(frozenset(), float(c))])


def monomial(atom: Atom, exponent: Fraction | int = 1) -> Poly:
    return Poly.total([(frozenset([(atom, Fraction(exponent))]), 1.0)])


def row_sum(p: Poly, width: int) -> Poly:
    """The sum of ``p`` over rows of ``width``: what is constant along the row comes out."""
    total = constant(0.0)
    for m, c in p.terms:
        outer = frozenset((a, e) for a, e in m if is_row_constant(a))
        inner = m - outer
        summed = monomial(RowSum(Poly(frozenset([(inner, 1.0)])))) if inner else constant(width)
        total = total + Poly.total([(outer, c)]) * summed
    return total


def is_row_constant(atom: Atom) -> bool:
    """Whether ``atom`` has one value per row (or one in all)."""
    if isinstance(atom, RowSum):
        return True
    if isinstance(atom, (Base, Function)):
        return all(is_row_constant(a) for a in atom.of.atoms())
    shape = _shape(atom)
    return shape is not None and (len(shape) == 0 or _is(shape[-1], 1))


def normal_form(
    node: fx.Node | float,
    leaves: Iterable[fx.Node] = (),
    expandable: Callable[[fx.Node], bool] = lambda node: True,
) -> Poly:
    """The polynomial that ``node`` computes.

    Args:
        node: an FX node with fake values in its metadata, or a number.
        leaves: nodes that stay atoms.
        expandable: called for every other node; where it returns False the node stays an atom.

    Raises:
        NotPolynomial: the form grows beyond what a formula of ours could have.
    """
    stop = set(leaves)
    memo: dict[fx.Node, Poly] = {}
    depth = 0

    def form(n) -> Poly:
        nonlocal depth
        if isinstance(n, (int, float)):
            return constant(float(n))
        if not isinstance(n, fx.Node):
            raise NotPolynomial(f"operand {n!r}")
        if n not in memo:
            rule = _RULES.get(n.target) if n.op == "call_function" else None
            poly = None
            if n not in stop and rule is not None and expandable(n) and is_float(n):
                depth += 1
                if depth > _MAX_DEPTH:
                    raise NotPolynomial(f"more than {_MAX_DEPTH} operations deep")
                poly = rule(n, form)
                depth -= 1
            memo[n] = monomial(n) if poly is None else poly
        return memo[n]

    try:
        return form(node)
    except OverflowError:
        raise NotPolynomial("a coefficient overflows") from None


def computes(node: fx.Node, formula: Poly, leaves: Iterable[fx.Node], **options) -> bool:
    """Whether the form of ``node`` is ``formula``; ``options`` as for :func:`normal_form`."""
    try:
        return normal_form(node, leaves, **options).matches(formula)
    except NotPolynomial:
        return False


def is_arithmetic(node: fx.Node) -> bool:
    """Whether ``node`` is an operation that forms look into."""
    return node.op == "call_function" and node.target in _RULES


def strip(node: fx.Node) -> fx.Node:
    """The node behind floating casts, copies and views that keep rows whole."""
    while node.op == "call_function" and node.target in _TRANSPARENT and _keeps_rows(node):
        node = node.args[0]
    return node


# --- rules: one per aten op, (node, form) -> Poly, or None where the node stays an atom


def _shape(node: fx.Node):
    val = node.meta.get("val")
    return val.shape if isinstance(val, torch.Tensor) else None


def _is(size, n: int) -> bool:
    return isinstance(size, int) and size == n


def is_float(node: fx.Node) -> bool:
    """Whether ``node`` is a tensor of a dtype that is for arithmetic (float8 is for storage:
    a cast to it is a quantization)."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in _FLOATS


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a cast, copy, view or expand leaves rows what they are."""
    source = node.args[0]
    if not (isinstance(source, fx.Node) and is_float(source) and is_float(node)):
        return False
    before, after = _shape(source), _shape(node)
    if len(before) == 0:
        return True
    if len(after) == 0:
        return False
    if node.target is aten.expand.default:
        return _is(before[-1], 1) or before[-1] == after[-1]
    if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return isinstance(before[-1], int) and _is(after[-1], before[-1])
    if node.target is aten.unsqueeze.default:
        return node.args[1] % len(after) != len(after) - 1
    if node.target is aten.squeeze.dim:
        return node.args[1] % len(before) != len(before) - 1
    return True


def _transparent(n, form):
    return form(n.args[0]) if _keeps_rows(n) else None


def _unsqueeze(n, form):
    source, dim = n.args
    rank = len(_shape(n))
    if dim % rank == rank - 1 and source.op == "call_function":
        # A row reduction without keepdim, then unsqueeze(-1), is one with keepdim.
        if source.target in (aten.sum.dim_IntList, aten.mean.dim):
            return _reduce(source, form, keepdim=True)
        if source.target is aten.squeeze.dim and source.args[1] % rank == rank - 1:
            before = source.args[0]
            return form(before) if _is(_shape(before)[-1], 1) else None
    return _transparent(n, form)


def _reduce(n, form, keepdim=None):
    source = n.args[0]
    width = summed_width(n)
    kept = n.args[2] if len(n.args) > 2 else n.kwargs.get("keepdim", False)
    if width is None or not (kept or keepdim):
        return None
    return (mean if n.target is aten.mean.dim else row_sum)(form(source), width)


def summed_width(n) -> int | None:
    """The width of the rows that a reduction runs over; None where it is not over rows alone."""
    shape = _shape(n.args[0])
    dims = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    if not dims or not shape or [d % len(shape) for d in dims] != [len(shape) - 1]:
        return None
    return shape[-1] if isinstance(shape[-1], int) and shape[-1] > 0 else None


def _variance(n, form):
    """Biased variance over rows; any other correction stays an atom."""
    width = summed_width(n)
    if width is None or n.kwargs.get("correction") != 0 or not n.kwargs.get("keepdim", False):
        return None
    return variance(form(n.args[0]), width)


def _var_mean(n, form):
    source, index = n.args
    if source.target is not aten.var_mean.correction:
        return None
    var = _variance(source, form)
    if var is None or index == 0:
        return var
    return mean(form(source.args[0]), summed_width(source))


def mean(p: Poly, width: int) -> Poly:
    """The mean of ``p`` over rows of ``width``."""
    return row_sum(p, width) * (1.0 / width)


def variance(p: Poly, width: int) -> Poly:
    """The biased variance of ``p`` over rows of ``width``."""
    return mean((p - mean(p, width)) ** 2, width)


def _pow(n, form):
    exponent = n.args[1]
    if not isinstance(exponent, (int, float)):
        return None
    return (
        form(n.args[0]) ** Fraction(exponent).limit_denominator(8)
        if float(exponent * 8).is_integer()
        else None
    )


def _add(sign):
    def rule(n, form):
        alpha = n.args[2] if len(n.args) > 2 else n.kwargs.get("alpha", 1)
        if not isinstance(alpha, (int, float)):
            return None
        return form(n.args[0]) + form(n.args[1]) * (sign * alpha)

    return rule


def _div(n, form):
    if n.kwargs.get("rounding_mode") is not None:
        return None
    return form(n.args[0]) * form(n.args[1]) ** -1


def _function(name):
    return lambda n, form: monomial(Function(name, form(n.args[0]).canonical()))


def _full(n, form):
    fill = n.args[1]
    return constant(fill) if isinstance(fill, (int, float)) else None


_TRANSPARENT = {
    prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}

_RULES: dict[object, Callable] = {
    **dict.fromkeys(_TRANSPARENT, _transparent),
    aten.unsqueeze.default: _unsqueeze,
    aten.add.Tensor: _add(1),
    aten.add.Scalar: _add(1),
    aten.sub.Tensor: _add(-1),
    aten.sub.Scalar: _add(-1),
    aten.mul.Tensor: lambda n, form: form(n.args[0]) * form(n.args[1]),
    aten.mul.Scalar: lambda n, form: form(n.args[0]) * form(n.args[1]),
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.neg.default: lambda n, form: form(n.args[0]) * -1.0,
    aten.reciprocal.default: lambda n, form: form(n.args[0]) ** -1,
    aten.rsqrt.default: lambda n, form: form(n.args[0]) ** Fraction(-1, 2),
    aten.sqrt.default: lambda n, form: form(n.args[0]) ** Fraction(1, 2),
    aten.square.default: lambda n, form: form(n.args[0]) ** 2,
    aten.pow.Tensor_Scalar: _pow,
    aten.sum.dim_IntList: _reduce,
    aten.mean.dim: _reduce,
    aten.var.correction: _variance,
    operator.getitem: _var_mean,
    aten.sigmoid.default: _function("sigmoid"),
    aten.silu.default: lambda n, form: (
        form(n.args[0]) * monomial(Function("sigmoid", form(n.args[0]).canonical()))
    ),
    aten.exp.default: _function("exp"),
    aten.tanh.default: _function("tanh"),
    aten.erf.default: _function("erf"),
    aten.full.default: _full,
}
