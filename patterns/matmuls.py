"""Steps that the patterns around matmuls share: which product a gradient is, what reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fusedbwd.graph import gradient_nodes, same_size, value
from fusedbwd.kernels import fp16_matmul, fp16_parts, sum_matmul
from fusedbwd.kernels._matmul import takes
from fusedbwd.kernels.fp16_parts import results_per_tensor
from fusedbwd.patterns.pattern import Rewrite, require
from fusedbwd.patterns.walk import VIEWS
from fusedbwd.precision import in_force

aten = torch.ops.aten


def product_of(node: fx.Node, *, alone: bool = False) -> fx.Node | None:
    """The matmul, with no residual, of which ``node`` is a view, or None.

    ``alone``: only where nothing but these views and ``node``'s one user reads its result.
    """
    node = _behind_views(node, alone)
    is_product = node is not None and (
        node.target is aten.mm.default or (node.target is sum_matmul and node.args[2] is None)
    )
    return node if is_product else None


def fp16_product_of(node: fx.Node) -> fx.Node | None:
    """The same of a matmul on float16 parts, whose result nothing else reads."""
    node = _behind_views(node, alone=True)
    is_product = node is not None and node.target is fp16_matmul and node.args[4] is None
    return node if is_product else None


def _behind_views(node: fx.Node, alone: bool) -> fx.Node | None:
    while node.op == "call_function" and node.target in VIEWS:
        if alone and len(node.users) != 1:
            return None
        node = node.args[0]
    return None if alone and len(node.users) != 1 else node


def pairs_of(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The operands of each matmul whose sum ``product`` is."""
    a, b = product.args[:2]
    return [(a, b)] if isinstance(a, fx.Node) else list(zip(a, b, strict=True))


def float32_of_backward(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The operands of a ``mm`` or ``addmm`` in float32 that has a gradient among them, and what
    is added to the product; None if ``node`` is another one, or scales its terms."""
    *added, a, b = node.args
    is_float32 = all(value(t).dtype == torch.float32 for t in (node, a, b))
    is_plain = all(node.kwargs.get(factor, 1) == 1 for factor in ("alpha", "beta"))
    if not is_float32 or not is_plain:
        return None
    gradients = gradient_nodes(node.graph)
    if a not in gradients and b not in gradients:  # a product of the forward, if of a backward's
        return None
    return a, b, added[0] if added else None


def on_fp16_parts(node: fx.Node, parts: int, allowed: Sequence[str]) -> Rewrite | None:
    """The rewrite of a float32 matmul of the backward to one on ``parts`` scaled float16 parts of
    each operand, if the precision in force is ``allowed``."""
    if (operands := float32_of_backward(node)) is None:
        return None
    precision = in_force()
    require(precision in allowed, f"{precision!r}, the precision in force, does not allow it")
    width = value(node).shape[1]
    require(isinstance(width, int), f"the width of {node.name} is not static")

    def replacement(a, b, added):
        residual = None if added is None else added.expand(a.shape[0], width)
        split = fp16_parts([a, b], parts)
        half = results_per_tensor(parts)
        return (fp16_matmul(a, b, split[:half], split[half:], residual),)

    # Verified on operands that one part represents: the allowed rounding is no disagreement.
    return Rewrite((node,), operands, replacement, rounds_to=torch.float16 if parts == 1 else None)


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
