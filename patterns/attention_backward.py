"""Attention backward on given probabilities: dq, dk and dv from dO, P, q, k and v.

Forward ``O = P·V`` with ``P = softmax(scale·(Q·Kᵀ) + mask)``, the heads of k and v repeated for
their groups or not. With ``dP = dO·Vᵀ``::

    dS = P·(dP − rowsum(dP·P))·scale
    dq = dS·K    dk = Σ_group dSᵀ·Q    dv = Σ_group Pᵀ·dO

P is read as it is, whatever mask made it; nothing is recomputed from q and k. Where the softmax is
in float32 and P is its rounding, as in Hugging Face's eager attention, autograd takes dS from the
float32 one and dv from P, and so does the fused op: it reads the softmax, and rounds it itself.
If a schema saves the rounded P, which asks for it to be used, it alone is read.

Where dq and dk then go back through RoPE (:mod:`fusedbwd.patterns.rope`) and all three are
flattened to [tokens, heads·D], as projections want them, that joins the fusion: the three are
written side by side into one packed buffer.

A mask that was filled in rather than added (``masked_fill``) appears in the backward and is not
matched: where a whole row is masked the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import SAVED_KEY, same_size, value
from fusedbwd.kernels import attention_backward, attention_rope_backward
from fusedbwd.kernels.attention import supported
from fusedbwd.patterns.heads import columns, flattened, group_sum, joined
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, only_user, require, users
from fusedbwd.patterns.rope import rotation_of
from fusedbwd.patterns.walk import VIEWS

aten = torch.ops.aten
prims = torch.ops.prims

_CAST = prims.convert_element_type.default
_REPEATING = (*VIEWS, aten.clone.default, aten.expand.default, aten.unsqueeze.default)


def _prove(match: Match) -> Rewrite:
    node = match.output_node()
    d_probs, softmax, dim = node.args[:3]
    rank = value(softmax).dim()
    require(rank == 4, f"{softmax.name} has {rank} dimensions, not [batch, heads, query, key]")
    require(dim % rank == rank - 1, f"{node.name} is over dimension {dim}, not the last")

    d_out, v = _values_matmul(d_probs)
    probs, rounded = _probabilities(softmax, value(d_out).dtype)
    d_scores, scale = _scaled(node)
    q, k, dq, dk = _scores_matmul(d_scores)
    dv = _values_gradient(rounded, d_out)

    k, group = _unrepeated(k)
    v, v_group = _unrepeated(v)
    require(group == v_group, f"{k.name} is repeated {group} times, {v.name} {v_group} times")
    dk, dv = _group_sum(dk, group), _group_sum(dv, group)
    batch, heads, seq, head_dim = value(q).shape
    kv_shape = (batch, heads // group, seq, head_dim)
    for nodes, shape in (
        ((probs,), (batch, heads, seq, seq)),
        ((q, d_out, dq), (batch, heads, seq, head_dim)),
        ((k, v, dk, dv), kv_shape),
    ):
        for n in nodes:
            require(
                same_size(value(n).shape, shape),
                f"{n.name} is {list(value(n).shape)}, self-attention has {list(shape)}",
            )
    dtypes = {value(n).dtype for n in (d_out, *rounded, q, k, v, dq, dk, dv)}
    require(len(dtypes) == 1, f"the operands of the attention at {node.name} differ: {dtypes}")
    (dtype,) = dtypes
    require(dtype.itemsize == 2, f"{dtype} is left to the library's matmuls")
    even = f"head_dim {head_dim} is not an even number up to 256"
    require(isinstance(head_dim, int) and supported(head_dim), even)

    operands = (d_out, probs, q, k, v)
    packed = _packed(dq, dk, dv, operands, scale)
    if packed is not None:
        return packed

    def replacement(d_out, probs, q, k, v):
        return attention_backward(d_out, probs, q, k, v, scale, False)

    return Rewrite((dq, dk, dv), operands, replacement, width=head_dim)


def _packed(dq, dk, dv, operands, scale: float) -> Rewrite | None:
    """The rewrite through RoPE into one buffer, where the graph goes on like that."""
    rope_q, rope_k = rotation_of(dq), rotation_of(dk)
    if rope_q is None or rope_k is None:
        return None
    if (rope_q.cos, rope_q.sin) != (rope_k.cos, rope_k.sin):
        return None
    flat = tuple(flattened(n) for n in (rope_q.dz, rope_k.dz, dv))
    if None in flat:
        return None
    outputs = joined(flat)

    def replacement(d_out, probs, q, k, v, cos, sin):
        packed = attention_rope_backward(d_out, probs, q, k, v, cos, sin, scale, False)
        return columns(packed, outputs, q)

    tables = (rope_q.cos, rope_q.sin)
    head_dim = value(dq).shape[-1]
    return Rewrite(outputs, (*operands, *tables), replacement, width=head_dim)


def _values_matmul(d_probs: fx.Node) -> tuple[fx.Node, fx.Node]:
    """dO and V, from ``d_probs = dO·Vᵀ``."""
    product = _rounded_product(d_probs)
    (d_out, d_out_t), (v, v_t) = map(_heads, product.args)
    require(not d_out_t and v_t, f"{product.name} is not dO times V transposed")
    return d_out, v


def _probabilities(softmax: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, list[fx.Node]]:
    """P as the fused op reads it, and its forms in ``dtype`` that ``P·V`` may have been given."""
    if value(softmax).dtype == dtype:
        return softmax, [softmax]
    casts = [n for n in softmax.users if n.target is _CAST and value(n).dtype == dtype]
    for probs in casts:
        if SAVED_KEY in probs.meta:
            return probs, [probs]
    wide = value(softmax).dtype
    require(wide == torch.float32, f"{softmax.name} is {wide}, the operands {dtype}")
    return softmax, casts


def _values_gradient(rounded: list[fx.Node], d_out: fx.Node) -> fx.Node:
    """``dv = Pᵀ·dO``, for P in any of the forms ``rounded``."""
    for probs in rounded:
        dv = _matmul(d_out.graph, (probs, True), (d_out, False))
        if dv is not None:
            return dv
    names = ", ".join(n.name for n in rounded)
    raise Miss(f"no value gradient is computed from {names or 'P'} and {d_out.name}")


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """The gradient of Q·Kᵀ: what ``node`` flows into through scaling and casts, and the scale."""
    scale = 1.0
    while True:
        user = only_user(node)
        if user is None or user.op != "call_function":
            return node, scale
        if user.target is aten.mul.Tensor and isinstance(user.args[1], (int, float)):
            scale *= user.args[1]
        elif user.target is aten.div.Tensor and isinstance(user.args[1], (int, float)):
            scale /= user.args[1]
        elif user.target is not _CAST:
            return node, scale
        node = user


def _scores_matmul(d_scores: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """q, k and their gradients' nodes, from the two matmuls that read ``d_scores``."""
    dq = q = dk = k = None
    for product in d_scores.graph.find_nodes(op="call_function", target=aten.bmm.default):
        (a, a_t), (b, b_t) = map(_heads, product.args)
        if a is d_scores and not a_t and not b_t:
            k, dq = b, _result(product, transposed=False)
        elif a is d_scores and a_t and not b_t:
            q, dk = b, _result(product, transposed=False)
        elif b is d_scores and not b_t and a_t:
            q, dk = a, _result(product, transposed=True)
        elif d_scores in (a, b):
            raise Miss(f"{product.name} uses {d_scores.name} in no way that attention does")
    require(dq is not None and dk is not None, f"{d_scores.name} does not give both dq and dk")
    consumers = set(_consumers(d_scores))
    names = ", ".join(sorted(n.name for n in consumers))
    require(len(consumers) == 2, f"{d_scores.name} is wanted for more than dq and dk: {names}")
    return q, k, dq, dk


def _consumers(node: fx.Node) -> Iterator[fx.Node]:
    """What uses ``node``, behind views."""
    for user in node.users:
        if user.target in (*VIEWS, aten.permute.default, aten.expand.default):
            yield from _consumers(user)
        else:
            yield user


def _matmul(graph: fx.Graph, left: tuple, right: tuple) -> fx.Node | None:
    """The 4-d result of the batched matmul of ``left`` and ``right``: (node, transposed) each."""
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        if _heads(product.args[0]) == left and _heads(product.args[1]) == right:
            return _result(product, transposed=False)
    return None


def _heads(node: fx.Node) -> tuple[fx.Node, bool]:
    """A bmm operand [B·N, M, K] as the [B, N, M, K] node behind it, and whether transposed."""
    transposed = False
    while node.op == "call_function":
        source = node.args[0]
        if node.target is aten.permute.default:
            dims = list(node.args[1])
            if dims not in ([0, 2, 1], [0, 1, 3, 2]):
                break
            transposed = not transposed
        elif node.target in VIEWS:
            before, after = value(source).shape, value(node).shape
            if len(before) != 4 or len(after) != 3 or not same_size(before[2:], after[1:]):
                break
        elif node.target in (aten.expand.default, aten.clone.default, aten.alias.default):
            if not same_size(value(source).shape, value(node).shape):
                break
        else:
            break
        node = source
    return node, transposed


def _rounded_product(node: fx.Node) -> fx.Node:
    """The bmm behind views and casts."""
    product = node
    while product.op == "call_function" and product.target in (*VIEWS, _CAST):
        product = product.args[0]
    if product.op != "call_function" or product.target is not aten.bmm.default:
        raise Miss(f"{node.name} is not a batched matmul")
    return product


def _result(product: fx.Node, *, transposed: bool) -> fx.Node:
    """The [B, N, M, K] node that a bmm's result is used as."""
    node = only_user(product)
    if node is None or node.target not in VIEWS or value(node).dim() != 4:
        raise Miss(f"{product.name} is not used as [batch, heads, ., .] alone ({users(product)})")
    if not transposed:
        return node
    back = only_user(node)
    if back is None or back.target is not aten.permute.default or back.args[1] != [0, 1, 3, 2]:
        raise Miss(f"{product.name} is not transposed back ({users(node)})")
    return back


def _unrepeated(node: fx.Node) -> tuple[fx.Node, int]:
    """[B, K, S, D] and the group size, behind ``unsqueeze(2).expand(…).reshape(…)``."""
    inner = node
    steps: list[fx.Node] = []
    while inner.target in _REPEATING and len(steps) < 4:
        steps.append(inner)
        if inner.target is aten.unsqueeze.default:
            break
        inner = inner.args[0]
    shapes = [value(s).shape for s in steps]
    targets = [s.target for s in steps if s.target is not aten.clone.default]
    if (
        len(targets) == 3
        and targets[0] in VIEWS
        and targets[1:] == [aten.expand.default, aten.unsqueeze.default]
        and steps[-1].args[1] == 2
        and len(shapes[-1]) == 5
        and isinstance(shapes[-2][2], int)
        and same_size(value(node).shape, _merged(shapes[-2]))
    ):
        return steps[-1].args[0], shapes[-2][2]
    return node, 1


def _merged(shape) -> tuple:
    """[B, K, G, S, D] as [B, K·G, S, D]."""
    batch, heads, group, seq, head_dim = shape
    return batch, heads * group, seq, head_dim


def _group_sum(node: fx.Node, group: int) -> fx.Node:
    """The gradient of the un-repeated heads, from that of the repeated ones."""
    if group == 1:
        return node
    summed, found = group_sum(node)
    require(
        found == group, f"{node.name} is not summed over groups of {group} heads ({users(node)})"
    )
    return summed


PATTERN = Pattern(
    name="attention_backward",
    anchors=[CallFunctionVarArgs(aten._softmax_backward_data.default)],
    prove=_prove,
)
