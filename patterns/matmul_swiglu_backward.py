"""The SwiGLU backward in the epilogue of the matmul whose result is its incoming gradient.

Takes what the SwiGLU fusion made: ``swiglu_backward(grad @ down_weight, act, linear)``, where
nothing else uses the product, which then is neither rounded nor stored.
"""

from __future__ import annotations

from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import value
from fusedbwd.kernels import matmul_swiglu_backward, swiglu_backward
from fusedbwd.kernels._routes import pays
from fusedbwd.kernels.matmul_swiglu import matmul_swiglu_backward_shape
from fusedbwd.patterns.matmuls import product_of, require_epilogue, require_operands
from fusedbwd.patterns.pattern import Pattern, Rewrite, require


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    dy, act, linear, *linear_first = node.args
    require(not any(linear_first), f"{node.name} gives d_linear first")
    product = product_of(dy)
    if product is None:
        return None
    require_epilogue(node, product, act)
    grad, weight = product.args
    require_operands(grad, weight)
    shape = matmul_swiglu_backward_shape(*map(value, (grad, weight, act, linear)))
    device = value(node).device
    require(pays(shape, device), f"as measured, cuBLAS and a kernel of its own are faster: {shape}")

    def replacement(*operands):
        return (matmul_swiglu_backward(*operands),)

    return Rewrite((node,), (grad, weight, act, linear), replacement)


PATTERN = Pattern(
    name="matmul_swiglu_backward",
    anchors=[CallFunctionVarArgs(swiglu_backward)],
    prove=_prove,
)
