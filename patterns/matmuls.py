"""Steps that the patterns around matmuls share: which product a gradient is, what reads it."""

from __future__ import annotations

import torch
from torch import fx

from fusedbwd.graph import same_size, value
from fusedbwd.kernels import sum_matmul
from fusedbwd.kernels._matmul import takes
from fusedbwd.patterns.pattern import require
from fusedbwd.patterns.walk import VIEWS

aten = torch.ops.aten


def product_of(node: fx.Node, *, alone: bool = False) -> fx.Node | None:
    """The matmul, with no residual, of which ``node`` is a view, or None.

    ``alone``: only where nothing but these views and ``node``'s one user reads its result.
    """
    while node.op == "call_function" and node.target in VIEWS:
        if alone and len(node.users) != 1:
            return None
        node = node.args[0]
    is_product = node.target is aten.mm.default or (
        node.target is sum_matmul and node.args[2] is None
    )
    return node if is_product and not (alone and len(node.users) != 1) else None


def pairs_of(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The operands of each matmul whose sum ``product`` is."""
    a, b = product.args[:2]
    return [(a, b)] if isinstance(a, fx.Node) else list(zip(a, b, strict=True))


def require_operands(*operands: fx.Node) -> None:
    """Raises a miss unless the matmul kernels take all of these matrices."""
    for operand in operands:
        v = value(operand)
        require(takes(v.dtype), f"{operand.name} is {v.dtype}: left to the library's matmuls")
        require(v.stride(1) == 1, f"{operand.name} has strides {list(v.stride())}")


def require_epilogue(node: fx.Node, product: fx.Node, like: fx.Node) -> None:
    """Raises a miss unless ``node`` alone reads ``product``, as the matrix that it is: as large as
    ``like`` [T, I]. Results of other shapes can look alike behind their views."""
    users = [n.name for n in product.users]
    require(len(users) == 1, f"not {node.name} alone uses {product.name}, but {users}")
    rows, shape = value(product).shape, value(like).shape
    require(same_size(rows, shape), f"{product.name} is {list(rows)}, {like.name} {list(shape)}")
