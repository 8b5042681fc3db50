"""GELU backward with the gradient of the bias that was added before it, in one pass.

Takes tanh and exact GELU. Without a bias gradient there is nothing to gain over the
compiler's own pointwise code, and the pattern does not fire.
"""

from __future__ import annotations

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import value
from fusedbwd.kernels import gelu_backward
from fusedbwd.patterns.algebra import strip
from fusedbwd.patterns.pattern import Pattern, Rewrite, require, users
from fusedbwd.patterns.walk import final_cast, same_numel, sum_over_rows

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite:
    node = match.output_node()
    grad, x = node.args
    approximate = node.kwargs.get("approximate", "none")
    dx = final_cast(node)
    width = value(x).shape[-1]
    require(isinstance(width, int), f"the width of {x.name} is not static")
    bias_sum = sum_over_rows(dx)
    require(bias_sum is not None, f"no bias gradient is summed from {dx.name} ({users(dx)})")
    bias_shape, bias_dtype = value(bias_sum).shape, value(bias_sum).dtype
    dtype = value(dx).dtype
    require(value(x).dtype == dtype, f"{dx.name} is {dtype}, {x.name} {value(x).dtype}")

    def replacement(grad, x):
        g, x2 = grad.reshape(-1, width), x.reshape(-1, width)
        dx, d_bias = gelu_backward(g, x2, approximate)
        return dx.reshape(x.shape), d_bias.reshape(bias_shape).to(bias_dtype)

    # Behind an expand there are fewer elements than the kernel needs.
    whole = strip(grad) if same_numel(strip(grad), x) else grad
    return Rewrite((dx, bias_sum), (whole, x), replacement)


PATTERN = Pattern(
    name="gelu_backward",
    anchors=[CallFunctionVarArgs(aten.gelu_backward.default)],
    prove=_prove,
)
