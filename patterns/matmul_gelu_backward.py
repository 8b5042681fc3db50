"""The GELU backward in the epilogue of the matmul whose result is its incoming gradient.

Takes what the GELU fusion made: ``gelu_backward(grad @ fc2_weight, x)``, where nothing else uses
the product and the gradient at x goes on in the dtype of the matmul's operands: 16-bit layers, and
float32 ones whose matmuls have 16-bit operands.
"""

from __future__ import annotations

import operator

from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import value
from fusedbwd.kernels import gelu_backward, matmul_gelu_backward
from fusedbwd.kernels._routes import pays
from fusedbwd.kernels.matmul_gelu import matmul_gelu_backward_shape
from fusedbwd.patterns.matmuls import (
    pairs_of,
    product_of,
    require_epilogue,
    require_operands,
)
from fusedbwd.patterns.pattern import Pattern, Rewrite, require


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    dy, x, approximate, *_ = node.args
    product = product_of(dy)
    if product is None or len(pairs_of(product)) != 1:
        return None
    ((grad, weight),) = pairs_of(product)
    require_epilogue(node, product, x)
    outputs = tuple(n for n in node.users if n.target is operator.getitem)
    outputs = tuple(sorted(outputs, key=lambda n: n.args[1]))
    require([n.args[1] for n in outputs] == [0, 1], f"{node.name} is not used as dx and dbias")
    require_operands(grad, weight)
    dtype, dx = value(grad).dtype, value(outputs[0]).dtype
    require(dx == dtype, f"{outputs[0].name} is {dx}, the matmul's operands are {dtype}")
    shape = matmul_gelu_backward_shape(value(grad), value(weight), value(x), approximate)
    device = value(x).device
    require(pays(shape, device), f"as measured, cuBLAS and a kernel of its own are faster: {shape}")

    def replacement(grad, weight, x):
        return matmul_gelu_backward(grad, weight, x, approximate)

    return Rewrite(outputs, (grad, weight, x), replacement)


PATTERN = Pattern(
    name="matmul_gelu_backward",
    anchors=[CallFunctionVarArgs(gelu_backward)],
    prove=_prove,
)
