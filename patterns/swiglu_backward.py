"""SwiGLU backward: both factors' gradients in one pass, written into one packed buffer.

Forward ``y = linear * silu(act)``. From dy, act and linear::

    d_linear = dy * silu(act)
    d_act    = dy * linear * silu'(act)

Replaces ``silu_backward`` and the products around it; silu(act) itself is computed again in
the kernel, which reads fewer bytes than loading it would.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, Match

from fusedbwd.graph import gradient_nodes, value
from fusedbwd.kernels import swiglu_backward
from fusedbwd.patterns.algebra import Function, computes, monomial, strip
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require
from fusedbwd.patterns.walk import (
    final_cast,
    pointwise_users,
    product_factors,
    same_numel,
    shaped_like,
)

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite:
    d_silu, act = match.output_node().args
    node = match.output_node()
    act = strip(act)
    dy, linear = _split(d_silu)
    wanted = monomial(dy) * monomial(act) * monomial(Function("sigmoid", monomial(act)))
    d_linear = [
        n
        for n in pointwise_users(dy)
        if n.target is aten.mul.Tensor and computes(n, wanted, (dy, act, linear))
    ]
    require(d_linear, f"no product of {dy.name} with silu({act.name}) beside {node.name}")
    d_act, d_linear = final_cast(node), final_cast(d_linear[0])
    for n in (linear, dy, d_act, d_linear):
        require(
            same_numel(n, act),
            f"{n.name} has shape {list(value(n).shape)}, {act.name} {list(value(act).shape)}",
        )
    dtypes = {value(n).dtype for n in (act, linear, d_act, d_linear)}
    require(len(dtypes) == 1, f"the operands of {node.name} differ in dtype: {dtypes}")
    width = value(act).shape[-1]
    require(isinstance(width, int), f"the width of {act.name} is not static")

    def replacement(like_act, like_linear, dy, act, linear):
        packed = swiglu_backward(*(t.reshape(-1, width) for t in (dy, act, linear)))
        d_act, d_linear = packed[:, :width], packed[:, width:]
        return d_act.reshape(like_act.shape), d_linear.reshape(like_linear.shape)

    shapes = (shaped_like(n, (act, linear, dy)) for n in (d_act, d_linear))
    return Rewrite((d_act, d_linear), (*shapes, dy, act, linear), replacement)


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
    anchors=[CallFunction(aten.silu_backward.default, Arg(), Arg())],
    prove=_prove,
)
