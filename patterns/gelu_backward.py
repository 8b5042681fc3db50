"""GELU backward with the gradient of the bias that was added before it, in one pass.

Takes tanh and exact GELU, as the composite op or written out with ``tanh`` or ``erf``. Without a
bias gradient there is nothing to gain over the compiler's own pointwise code, and the pattern
does not fire.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, CallFunctionVarArgs, Match

from fusedbwd.graph import gradient_nodes, value
from fusedbwd.kernels import gelu_backward
from fusedbwd.patterns.algebra import (
    Function,
    Poly,
    computes,
    constant,
    is_arithmetic,
    monomial,
    normal_form,
    strip,
)
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require, users
from fusedbwd.patterns.walk import (
    cofactors,
    final_cast,
    pointwise_users,
    product_factors,
    same_numel,
    shaped_like,
    sum_over_rows,
    sums_above,
)

aten = torch.ops.aten

_CUBIC = 0.044715
_MAX_DESCENT = 16  # nodes from a tanh down to the input of the GELU that it is part of


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if node.target in (aten.tanh.default, aten.erf.default):
        found = _spelled_out(node)
        if found is None:
            return None
        grad, x, dx = found
        approximate = "tanh" if node.target is aten.tanh.default else "none"
    else:
        (grad, x), dx = node.args, node
        approximate = node.kwargs.get("approximate", "none")
    return _rewrite(grad, x, final_cast(dx), approximate)


def _rewrite(grad: fx.Node, x: fx.Node, dx: fx.Node, approximate: str) -> Rewrite:
    width = value(x).shape[-1]
    require(isinstance(width, int), f"the width of {x.name} is not static")
    bias_sum = sum_over_rows(dx)
    require(bias_sum is not None, f"no bias gradient is summed from {dx.name} ({users(dx)})")
    bias_shape, bias_dtype = value(bias_sum).shape, value(bias_sum).dtype
    dtype = value(dx).dtype
    require(value(x).dtype == dtype, f"{dx.name} is {dtype}, {x.name} {value(x).dtype}")

    def replacement(like, grad, x):
        g, x2 = grad.reshape(-1, width), x.reshape(-1, width)
        dx, d_bias = gelu_backward(g, x2, approximate)
        return dx.reshape(like.shape), d_bias.reshape(bias_shape).to(bias_dtype)

    # Behind an expand there are fewer elements than the kernel needs.
    whole = strip(grad) if same_numel(strip(grad), x) else grad
    require(same_numel(whole, x), f"{grad.name} and {x.name} differ in size")
    return Rewrite((dx, bias_sum), (shaped_like(dx, (x, whole)), whole, x), replacement)


def _spelled_out(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gradient, the input and its gradient of a GELU that is written with ``node``."""
    gradients = gradient_nodes(node.graph)
    x = None if node in gradients else input_of(node)
    if x is None:
        return None
    _, slope = value_and_slope(node, x)
    for grad in _gradients_beside(node, gradients):
        for top in sums_above(grad):
            if computes(top, monomial(grad) * slope, (grad, x)):
                return grad, x, top
    raise Miss(f"no sum is the gradient of the GELU of {x.name} spelled with {node.name}")


def input_of(node: fx.Node) -> fx.Node | None:
    """The x of which ``node`` is tanh(sqrt(2/pi) (x + 0.044715 x^3)) or erf(x / sqrt(2))."""

    def argument(x: Poly) -> Poly:
        if node.target is aten.erf.default:
            return x * math.sqrt(0.5)
        return (x + x**3 * _CUBIC) * math.sqrt(2 / math.pi)

    todo = [node.args[0]]
    for n in todo:
        x = strip(n)
        if computes(node.args[0], argument(monomial(x)), (x,)):
            return x
        if is_arithmetic(x) and len(todo) < _MAX_DESCENT:
            todo.extend(a for a in x.args if isinstance(a, fx.Node))
    return None


def value_and_slope(node: fx.Node, x: fx.Node) -> tuple[Poly, Poly]:
    """GELU of ``x``, spelled with the tanh or erf ``node``, and its derivative."""
    a, half = monomial(x), constant(0.5)
    name = "tanh" if node.target is aten.tanh.default else "erf"
    t = monomial(Function(name, normal_form(node.args[0], (x,)).canonical()))
    if name == "tanh":
        inner = constant(math.sqrt(2 / math.pi)) * (constant(1.0) + a**2 * (3 * _CUBIC))
        spread = half * a * (constant(1.0) - t**2) * inner
    else:
        density = monomial(Function("exp", a**2 * -0.5)) * (1 / math.sqrt(2 * math.pi))
        spread = a * density
    phi = half * (constant(1.0) + t)
    return a * phi, phi + spread


def _gradients_beside(node: fx.Node, gradients: set[fx.Node]) -> list[fx.Node]:
    """Incoming gradients that are multiplied with ``node`` or a linear function of it."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    for n in todo:
        for factor in cofactors(n):
            if factor in gradients:
                found |= dict.fromkeys((factor, *product_factors(factor)))
        for user in pointwise_users(n):
            is_linear = user.target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)
            is_linear &= sum(isinstance(a, fx.Node) for a in user.args) == 1
            if is_linear and user not in gradients:
                todo.append(user)
    return list(found)


PATTERN = Pattern(
    name="gelu_backward",
    anchors=[
        CallFunctionVarArgs(aten.gelu_backward.default),
        CallFunction(aten.tanh.default, Arg()),
        CallFunction(aten.erf.default, Arg()),
    ],
    prove=_prove,
)
