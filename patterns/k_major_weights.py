"""Weights copied K-major for the float32 matmuls of input gradients, where TF32 is allowed.

Hopper's tensor cores read 32-bit operands only if they are contiguous along the summed dimension
("K-major"; PTX ISA, ``wgmma``), so that cuBLAS's fast TF32 kernels are for that layout alone. In
``grad @ weight`` the gradient is K-major and the weight, [K, N] with contiguous rows, is not; a
copy of it is::

    grad @ weight  ->  grad @ weight.t().contiguous().t()

The same products are added up, in an order that is cuBLAS's in either case. Copying goes through
8 K N bytes where the matmul is 2 T K N FLOPs, and not every size has a faster kernel: what decides
are measurements by size and number of tokens (``kernels/_routes.py``).
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusedbwd.graph import gradient_nodes, same_size, value
from fusedbwd.kernels._routes import at, k_major
from fusedbwd.patterns.matmuls import float32_of_backward
from fusedbwd.patterns.pattern import Pattern, Rewrite, require
from fusedbwd.precision import HIGHEST, in_force

aten = torch.ops.aten
_PERMUTE = aten.permute.default


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if in_force() == HIGHEST or (operands := float32_of_backward(node)) is None:
        return None
    grad, weight, _ = operands
    if not _is_input_gradient(grad, weight):
        return None
    a, b = value(grad), value(weight)
    ranges = k_major(b.shape[0], b.shape[1], b.device)
    size = f"a copy of {weight.name}, {list(b.shape)},"
    require(bool(ranges), f"{size} was not measured on this {b.device.type}")
    require(any(pays for _, pays in ranges), f"{size} was measured to cost more than it saves")
    tokens = a.shape[0]
    require(not free_unbacked_symbols(tokens), f"nobody knows how many rows {grad.name} has")
    # Last: it leaves guards.
    require(
        at(ranges, tokens), f"{size} was not measured to pay for the {tokens} rows of {grad.name}"
    )

    def replacement(grad, weight):
        return (torch.mm(grad, weight.t().contiguous().t()),)

    return Rewrite((node,), (grad, weight), replacement)


def _is_input_gradient(a: fx.Node, b: fx.Node) -> bool:
    """Whether ``a`` is K-major, and ``b`` a tensor of the forward of static size that is not."""
    weight = value(b)
    is_static = all(isinstance(n, int) for n in (*weight.shape, *weight.stride()))
    return (
        is_static
        and weight.stride(1) == 1 < weight.stride(0)
        and same_size(value(a).stride()[1:], (1,))
        and b not in gradient_nodes(b.graph)
    )


def _copy_once(graph: fx.Graph) -> None:
    """Leaves one copy of each weight, and that in the backward: it is computed from the forward
    alone, where the partitioner would put it, to save it."""
    gradients = gradient_nodes(graph)
    copies: dict[tuple[fx.Node, str], fx.Node] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        source = weight = copy.args[0]
        around = {n.target for view in copy.users for n in (source, view, *view.users)}
        of_backward = copy.meta.get("partitioner_tag") == "is_backward"  # as its matmul
        if copy in gradients or not of_backward or around != {_PERMUTE, aten.mm.default}:
            continue
        copy.meta["partitioner_tag"] = "must_be_in_backward"
        while weight.target is _PERMUTE:
            weight = weight.args[0]
        layout = value(source).shape, value(source).stride()
        key = weight, str(layout)  # a text, since open sizes have no hash
        copy.replace_all_uses_with(copies.setdefault(key, copy))
    graph.eliminate_dead_code()


PATTERN = Pattern(
    name="k_major_weights",
    anchors=[CallFunctionVarArgs(aten.mm.default)],
    prove=_prove,
    finish=_copy_once,
)
