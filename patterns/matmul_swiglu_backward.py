"""The SwiGLU backward in the epilogue of the matmul whose result is its incoming gradient.

Takes what the SwiGLU fusion made: ``swiglu_backward(grad @ down_weight, act, linear)``, where
nothing else uses the product, which then is neither rounded nor stored.
"""

from __future__ import annotations

from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import same_size, value
from fusedbwd.kernels import matmul_swiglu_backward, swiglu_backward
from fusedbwd.kernels._matmul import takes
from fusedbwd.kernels._routes import pays
from fusedbwd.kernels.matmul_swiglu import matmul_swiglu_backward_shape
from fusedbwd.patterns.pattern import Pattern, Rewrite, require
from fusedbwd.patterns.walk import product_of


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    dy, act, linear, *linear_first = node.args
    require(not any(linear_first), f"{node.name} gives d_linear first")
    product = product_of(dy)
    if product is None:
        return None
    users = [n.name for n in product.users]
    require(len(users) == 1, f"not {node.name} alone uses {product.name}, but {users}")
    grad, weight = product.args
    shapes = value(product).shape, value(act).shape
    require(
        same_size(*shapes), f"{product.name} is {list(shapes[0])}, {act.name} {list(shapes[1])}"
    )
    for operand in (grad, weight):
        v = value(operand)
        require(takes(v.dtype), f"{operand.name} is {v.dtype}: left to the library's matmuls")
        require(v.stride(1) == 1, f"{operand.name} has strides {list(v.stride())}")
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
