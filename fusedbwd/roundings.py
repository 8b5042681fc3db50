"""Each tensor that matmuls want rounded is rounded once, and by what computes it if possible.

The pattern ``bf16_matmuls`` leaves a ``round_to`` before every matmul, the patterns ``fp16_scaled``
and ``fp16x3`` a ``fp16_parts``. Here

- a gradient that one of our kernels computes is rounded by that kernel: instead of the wide
  one if nothing else reads it, beside it where the kernel can write both; its sums over rows
  are of the unrounded gradient either way;
- any other gradient is cast, for Inductor to fuse with what computes it; but float16 parts, whose
  scale depends on the whole tensor, are always made by a kernel of their own;
- tensors of the forward (weights, activations) are rounded together with those that meet the
  same gradient, the weight and the input of one linear, just before the first matmul does:
  earlier, the copies would only take memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from fusedbwd.graph import gradient_nodes, inline, stable_topological_sort
from fusedbwd.kernels import (
    fp16_parts,
    gelu_backward,
    layer_norm_backward,
    layer_norm_backward_dx,
    layer_norm_backward_rounded,
    rms_norm_backward,
    rms_norm_backward_dx,
    rms_norm_backward_rounded,
    round_to,
)
from fusedbwd.kernels.rounding import MAX_ROUNDED

aten = torch.ops.aten
prims = torch.ops.prims

_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)

_DTYPE_OF_DX = {
    gelu_backward: "dx_dtype",
    layer_norm_backward: "out_dtype",
    layer_norm_backward_dx: "out_dtype",
    rms_norm_backward: "out_dtype",
    rms_norm_backward_dx: "out_dtype",
}
"""Ops that round dx themselves, by the argument that says to what."""

_ROUNDING_TOO = {
    layer_norm_backward: layer_norm_backward_rounded,
    rms_norm_backward: rms_norm_backward_rounded,
}
"""Ops of which another gives dx twice, the rounded one last."""


def place_roundings(graph: fx.Graph, op: Callable, to: torch.dtype | int) -> None:
    """Replaces every ``op(xs, to)`` of a joint graph as described above.

    ``op``: ``round_to``, to a dtype, or ``fp16_parts``, of so many parts.
    """
    roundings = [n for n in graph.find_nodes(op="call_function", target=op) if n.args[1] == to]
    if not roundings:
        return
    copies = to if isinstance(to, int) else 1  # other results have not the tensor's shape
    rounded: dict[fx.Node, list[fx.Node]] = {}
    # Read off before anything changes: what is rounded, and the views of it that are wanted.
    chains = {node: [_chain(source) for source in node.args[0]] for node in roundings}
    for node, bases in _groups(chains, gradient_nodes(graph)):
        rounded |= zip(bases, _round_together(graph, bases, op, to, before=node), strict=True)
    for node, sources in chains.items():
        for base, *_ in sources:
            if base in rounded:
                continue
            if isinstance(to, torch.dtype):
                rounded[base] = [_rounded_gradient(graph, base, to)]
            else:
                rounded[base] = inline(graph, op, ([base], to), before=base.next)
        for item in list(node.users):
            source, result = divmod(item.args[1], len(rounded[sources[0][0]]))
            base, *views = sources[source]
            new = rounded[base][result]
            if result < copies:
                new = _viewed(graph, new, views, before=item)
            item.replace_all_uses_with(new)
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _chain(node: fx.Node) -> list[fx.Node]:
    """``node``, before it what it is a view of, and so on: the first is no view."""
    chain = [node]
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
        chain.append(node)
    return chain[::-1]


def _groups(
    chains: dict[fx.Node, list[list[fx.Node]]], gradients: set[fx.Node]
) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Tensors of the forward that are rounded in one launch, and the rounding that is first to
    need one of them. A tensor is in one group only, the first that it could be in."""
    groups: dict[fx.Node, tuple[fx.Node, list[fx.Node]]] = {}
    grouped: set[fx.Node] = set()
    for node, sources in chains.items():
        bases = [base for base, *_ in sources]
        gradient = next(b for b in bases if b in gradients)
        for base in bases:
            if base not in gradients and base not in grouped:
                grouped.add(base)
                groups.setdefault(gradient, (node, []))[1].append(base)
    return [
        (node, bases[start : start + MAX_ROUNDED])
        for node, bases in groups.values()
        for start in range(0, len(bases), MAX_ROUNDED)
    ]


def _round_together(
    graph: fx.Graph, bases: list[fx.Node], op: Callable, to: torch.dtype | int, *, before: fx.Node
) -> list[list[fx.Node]]:
    """The results of one launch, by tensor."""
    results = inline(graph, op, (bases, to), before=before)
    for item in results:
        # Computed from the forward alone; the partitioner would put it there and save the copy.
        item.args[0].meta["partitioner_tag"] = "must_be_in_backward"
    each = len(results) // len(bases)
    return [results[start : start + each] for start in range(0, len(results), each)]


def _rounded_gradient(graph: fx.Graph, base: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``base`` in ``dtype``; if a kernel of ours computes it, that kernel does the rounding."""
    is_item = base.target is operator.getitem
    op, index = base.args if is_item else (base, 0)
    only_rounded = _is_only_rounded(base)
    args = list(op.args)
    if index == 0 and only_rounded and op.target in _DTYPE_OF_DX:
        target = op.target
        position = [a.name for a in target._schema.arguments].index(_DTYPE_OF_DX[target])
        args[position:] = [dtype, *args[position + 1 :]]
        dx, rounded = None, 0
    elif index == 0 and op.target in _ROUNDING_TOO:
        target = _ROUNDING_TOO[op.target]
        args.append(dtype)
        dx, rounded = 0, -1
    else:
        (cast,) = inline(graph, prims.convert_element_type.default, (base, dtype), before=base.next)
        return cast
    new = inline(graph, target, args, before=op)
    for item in list(op.users) if is_item else []:
        if item.args[1] != 0 or dx is not None:
            item.replace_all_uses_with(new[item.args[1]])
    return new[rounded]


def _is_only_rounded(node: fx.Node) -> bool:
    return all(
        user.target is round_to or (user.target in _VIEWS and _is_only_rounded(user))
        for user in node.users
    )


def _viewed(graph: fx.Graph, rounded: fx.Node, views: list[fx.Node], *, before: fx.Node) -> fx.Node:
    """``rounded``, seen through ``views``."""
    for view in views:
        # Rounded copies are contiguous, where what they are copies of may not have been.
        is_view = view.target in (aten.view.default, aten._unsafe_view.default)
        target = aten.reshape.default if is_view else view.target
        (rounded,) = inline(graph, target, (rounded, *view.args[1:]), before=before)
    return rounded


def sink_roundings(graph: fx.Graph) -> None:
    """Moves every rounding down to the first use of what it gives: until then the rounded
    copies would only take memory. Passes that order nodes by their users' depth put it early."""
    roundings = [
        node
        for op in (round_to, fp16_parts)
        for node in graph.find_nodes(op="call_function", target=op)
    ]
    for node in roundings:
        moving = [node]
        for n in moving:
            moving += [u for u in n.users if u.target in (operator.getitem, *_VIEWS)]
        position = {n: index for index, n in enumerate(graph.nodes)}
        uses = [u for n in moving for u in n.users if u not in moving]
        first_use = min(uses, key=position.__getitem__)
        for n in sorted(dict.fromkeys(moving), key=position.__getitem__):
            if position[n] < position[first_use]:
                first_use.prepend(n)
