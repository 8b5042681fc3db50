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
from torch._inductor.pattern_matcher import Arg, CallFunction, Match

from fusedbwd.kernels import swiglu_backward
from fusedbwd.patterns import gated
from fusedbwd.patterns.algebra import Function, monomial, strip
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require
from fusedbwd.patterns.walk import product_factors

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    act = strip(node.args[0] if node.target is aten.sigmoid.default else node.args[1])
    a, s = monomial(act), monomial(Function("sigmoid", monomial(act)))
    silu = a * s
    if node.target is aten.sigmoid.default:
        found = gated.spelled_out(node, act, silu, s + silu - silu * s)
        if found is None:
            return None
        dy, linear, d_act = found
    else:
        factors = gated.factors_of_gradient(node.args[0])
        if factors is None:
            raise Miss(
                f"{node.args[0].name} is not the product of an incoming gradient and one forward "
                f"tensor but of {[f.name for f in product_factors(node.args[0])]}"
            )
        (dy, linear), d_act = factors, node
    d_linear = gated.linear_gradients(dy, act, linear, silu)
    require(d_linear, f"no product of {dy.name} with silu({act.name}) beside {d_act.name}")
    return gated.rewrite(dy, act, linear, d_act, d_linear[0], swiglu_backward)


PATTERN = Pattern(
    name="swiglu_backward",
    anchors=[
        CallFunction(aten.silu_backward.default, Arg(), Arg()),
        CallFunction(aten.sigmoid.default, Arg()),
    ],
    prove=_prove,
)
