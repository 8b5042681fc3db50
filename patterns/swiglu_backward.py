"""SwiGLU backward: both factors' gradients in one pass, written into one packed buffer.

Forward ``y = linear * silu(act)``. From dy, act and linear::

    d_linear = dy * silu(act)
    d_act    = dy * linear * silu'(act)

Replaces ``silu_backward``, or what autograd makes of ``act * sigmoid(act)``, and the products
around it; silu(act) itself is computed again in the kernel, which reads fewer bytes than loading
it would. Where both gradients are then joined, because act and linear are halves of one tensor,
the packed buffer is what they are joined to.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, Match

from fusedbwd.graph import gradient_nodes, value
from fusedbwd.kernels import swiglu_backward
from fusedbwd.patterns.algebra import Function, Poly, computes, monomial, strip
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require
from fusedbwd.patterns.walk import (
    cofactors,
    concatenation,
    final_cast,
    pointwise_users,
    product_factors,
    same_numel,
    shaped_like,
    sums_above,
)

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if node.target is aten.sigmoid.default:
        found = _spelled_out(node)
        if found is None:
            return None
        dy, act, linear, d_act = found
    else:
        (d_silu, act), d_act = node.args, node
        act = strip(act)
        dy, linear = _split(d_silu)
    wanted = monomial(dy) * _silu(act)
    d_linear = [
        n
        for n in pointwise_users(dy)
        if n.target is aten.mul.Tensor and computes(n, wanted, (dy, act, linear))
    ]
    require(d_linear, f"no product of {dy.name} with silu({act.name}) beside {d_act.name}")
    return _rewrite(dy, act, linear, final_cast(d_act), final_cast(d_linear[0]))


def _rewrite(
    dy: fx.Node, act: fx.Node, linear: fx.Node, d_act: fx.Node, d_linear: fx.Node
) -> Rewrite:
    for n in (linear, dy, d_act, d_linear):
        require(
            same_numel(n, act),
            f"{n.name} has shape {list(value(n).shape)}, {act.name} {list(value(act).shape)}",
        )
    dtypes = {value(n).dtype for n in (act, linear, d_act, d_linear)}
    require(len(dtypes) == 1, f"the operands of {d_act.name} differ in dtype: {dtypes}")
    width = value(act).shape[-1]
    require(isinstance(width, int), f"the width of {act.name} is not static")

    linear_first = False
    joined = concatenation(d_act, d_linear)
    if joined is None:
        joined = concatenation(d_linear, d_act)
        linear_first = joined is not None

    def replacement(like_act, like_linear, dy, act, linear):
        rows = (t.reshape(-1, width) for t in (dy, act, linear))
        packed = swiglu_backward(*rows, linear_first)
        if joined is not None:
            return (packed.reshape(*like_act.shape[:-1], 2 * width),)
        d_act, d_linear = packed[:, :width], packed[:, width:]
        return d_act.reshape(like_act.shape), d_linear.reshape(like_linear.shape)

    shapes = (shaped_like(n, (act, linear, dy)) for n in (d_act, d_linear))
    outputs = (d_act, d_linear) if joined is None else (joined,)
    return Rewrite(outputs, (*shapes, dy, act, linear), replacement, width=width)


def _silu(act: fx.Node) -> Poly:
    return monomial(act) * monomial(Function("sigmoid", monomial(act)))


def _spelled_out(sigmoid: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """dy, act, linear and d_act of a SiLU that is written ``act * sigmoid(act)``."""
    gradients = gradient_nodes(sigmoid.graph)
    act = strip(sigmoid.args[0])
    if sigmoid in gradients or act in gradients:
        return None
    silus = [n for n in pointwise_users(sigmoid) if computes(n, _silu(act), (act,))]
    dys = [f for silu in silus for f in cofactors(silu) if f in gradients]
    if not silus:
        return None
    require(dys, f"silu({act.name}) is not a factor of a product whose other one is trained")
    s, a = monomial(Function("sigmoid", monomial(act))), monomial(act)
    slope = s + a * s - a * s**2
    for dy in dys:
        for linear in (f for f in cofactors(dy) if f not in gradients):
            formula = monomial(dy) * monomial(linear) * slope
            for top in sums_above(dy):
                if computes(top, formula, (dy, act, linear)):
                    return dy, act, linear, top
    raise Miss(f"no sum is the gradient of silu({act.name}), spelled with {sigmoid.name}")


def _split(d_silu: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``d_silu = dy * linear``: the backward factor and the forward one."""
    factors = product_factors(d_silu)
    gradients = gradient_nodes(d_silu.graph)
    backward = [f for f in factors if f in gradients]
    forward = [f for f in factors if f not in gradients]
    if len(backward) != 1 or len(forward) != 1:
        raise Miss(
            f"{d_silu.name} is not the product of an incoming gradient and one forward tensor "
            f"but of {[f.name for f in factors]}"
        )
    return backward[0], forward[0]


PATTERN = Pattern(
    name="swiglu_backward",
    anchors=[
        CallFunction(aten.silu_backward.default, Arg(), Arg()),
        CallFunction(aten.sigmoid.default, Arg()),
    ],
    prove=_prove,
)
