"""The GELU backward in the epilogue of the matmul whose result is its incoming gradient.

Takes what the GELU fusion made: ``gelu_backward(grad @ fc2_weight, x)``, where nothing else uses
the product and the gradient at x goes on in the dtype of the matmul's operands: 16-bit layers, and
float32 ones whose matmuls have 16-bit operands.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import same_size, value
from fusedbwd.kernels import gelu_backward, matmul_gelu_backward, sum_matmul
from fusedbwd.kernels._matmul import takes
from fusedbwd.kernels._routes import pays
from fusedbwd.kernels.matmul_gelu import matmul_gelu_backward_shape
from fusedbwd.patterns.pattern import Pattern, Rewrite, require
from fusedbwd.patterns.walk import VIEWS, product_of

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    dy, x, approximate, *_ = node.args
    product = product_of(dy) or _rounded_product(dy)
    if product is None:
        return None
    grad, weight = product.args[:2]
    if product.target is sum_matmul:
        (grad,), (weight,) = grad, weight
    rows, shape = value(product).shape, value(x).shape
    require(same_size(rows, shape), f"{product.name} is {list(rows)}, {x.name} {list(shape)}")
    users = [n.name for n in product.users]
    require(len(users) == 1, f"not {node.name} alone uses {product.name}, but {users}")
    outputs = tuple(n for n in node.users if n.target is operator.getitem)
    outputs = tuple(sorted(outputs, key=lambda n: n.args[1]))
    require([n.args[1] for n in outputs] == [0, 1], f"{node.name} is not used as dx and dbias")
    dtype = value(grad).dtype
    require(takes(dtype), f"{grad.name} is {dtype}: left to the library's matmuls")
    dx = value(outputs[0]).dtype
    require(dx == dtype, f"{outputs[0].name} is {dx}, the matmul's operands are {dtype}")
    for operand in (grad, weight):
        require(
            value(operand).stride(1) == 1,
            f"{operand.name} has strides {list(value(operand).stride())}",
        )
    shape = matmul_gelu_backward_shape(value(grad), value(weight), value(x), approximate)
    device = value(x).device
    require(pays(shape, device), f"as measured, cuBLAS and a kernel of its own are faster: {shape}")

    def replacement(grad, weight, x):
        return matmul_gelu_backward(grad, weight, x, approximate)

    return Rewrite(outputs, (grad, weight, x), replacement)


def _rounded_product(node: fx.Node) -> fx.Node | None:
    """The single matmul with 16-bit operands of which ``node`` is a view, or None."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    is_product = node.target is sum_matmul and len(node.args[0]) == 1 and node.args[2] is None
    return node if is_product else None


PATTERN = Pattern(
    name="matmul_gelu_backward",
    anchors=[CallFunctionVarArgs(gelu_backward)],
    prove=_prove,
)
