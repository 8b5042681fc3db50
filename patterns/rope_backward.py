"""RoPE backward around SDPA's own backward: group sums, rotation and packing in one kernel.

Forward: q and k through RoPE by halves, k and v repeated for their groups of query heads or not,
then ``F.scaled_dot_product_attention`` in one of its fused flavours, whose backward gives dq, dk
and dv [B, heads, S, D] and stays as it is. What follows, up to the matrices that projections
read, becomes one pass::

    dz_q = rope_back(dq)    dz_k = rope_back(Σ_group dk)    dz_v = Σ_group dv

written side by side into one packed buffer [B·S, (heads + 2·kv_heads)·D], as
:mod:`fusedbwd.patterns.attention_backward` does. Without RoPE there is nothing to gain: packing
would read and write dq for the sake of two sums.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import same_size, value
from fusedbwd.kernels import rope_backward
from fusedbwd.patterns.heads import columns, flattened, group_sum, joined
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require
from fusedbwd.patterns.rope import Rotation, rotation_of
from fusedbwd.patterns.walk import final_cast

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite:
    dq, dk, dv = gradients = _gradients(match.output_node())
    k_sum, group = group_sum(final_cast(dk))
    v_sum, v_group = group_sum(final_cast(dv))
    require(
        group == v_group,
        f"{dk.name} is summed over groups of {group} heads, {dv.name} of {v_group}",
    )
    rope_q, rope_k = _rotation(dq), _rotation(k_sum)
    require(
        (rope_q.cos, rope_q.sin) == (rope_k.cos, rope_k.sin),
        f"{dq.name} and {dk.name} go back through RoPE by different tables",
    )
    batch, heads, seq, head_dim = value(dq).shape
    for n in (k_sum, v_sum):
        shape = (batch, value(k_sum).shape[1], seq, head_dim)
        require(
            same_size(value(n).shape, shape),
            f"{n.name} is {list(value(n).shape)}, self-attention has {list(shape)}",
        )
    kv_heads = value(k_sum).shape[1]
    require(
        all(isinstance(n, int) for n in (heads, kv_heads, head_dim)),
        f"the heads of {dq.name} are not static",
    )

    outputs = joined(tuple(_matrix(n) for n in (rope_q.dz, rope_k.dz, v_sum)))
    for n in gradients:
        require(not _passes_by(n, outputs), f"{n.name} is used for more than its projection")
    dtypes = {value(n).dtype for n in (*gradients, *outputs)}
    require(len(dtypes) == 1, f"the gradients around {match.output_node().name} differ: {dtypes}")

    def replacement(dq, dk, dv, cos, sin):
        return columns(rope_backward(dq, dk, dv, cos, sin, group), outputs, dq)

    return Rewrite(outputs, (*gradients, rope_q.cos, rope_q.sin), replacement)


def _gradients(node: fx.Node) -> tuple[fx.Node, ...]:
    """dq, dk and dv, the first three results of SDPA's backward."""
    items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    wanted = [items.get(i) for i in range(3)]
    require(
        all(n is not None and n.users for n in wanted),
        f"not all of the gradients of q, k and v are wanted of {node.name}",
    )
    return tuple(wanted)


def _rotation(dy: fx.Node) -> Rotation:
    rotation = rotation_of(dy)
    if rotation is None:
        raise Miss(f"{dy.name} does not go back through RoPE by halves")
    return rotation


def _matrix(node: fx.Node) -> fx.Node:
    matrix = flattened(node)
    require(matrix is not None, f"{node.name} is not flattened to [tokens, heads·D] alone")
    return matrix


def _passes_by(node: fx.Node, outputs: tuple[fx.Node, ...]) -> bool:
    """Whether ``node`` has a way to the graph's results that leads through none of ``outputs``."""
    seen, todo = set(outputs), [node]
    while todo:
        n = todo.pop()
        if n.op == "output":
            return True
        if n not in seen and not isinstance(value(n), torch.SymInt):
            seen.add(n)
            todo.extend(n.users)
    return False


PATTERN = Pattern(
    name="rope_backward",
    anchors=[
        CallFunctionVarArgs(op)
        for op in (
            aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    ],
    prove=_prove,
)
