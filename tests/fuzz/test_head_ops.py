"""Fused ops on heads: RoPE and attention."""

import torch
from fuzzing import DEVICE, FP16, FP32, GRADIENT_SCALES, dtypes, examples, judge, tensors
from hypothesis import given
from hypothesis import strategies as st

from fusedbwd.kernels.attention import (
    AttentionTile,
    attention_backward,
    attention_backward_launch,
    attention_rope_backward,
    attention_rope_backward_launch,
)
from fusedbwd.kernels.rope import rope_backward

batches, kv_heads, groups = st.integers(0, 3), st.integers(1, 3), st.integers(1, 5)
TILES = [
    AttentionTile(1, 16, 16, 4, 2, 32, 16, 4, 2),
    AttentionTile(1, 64, 32, 4, 2, 16, 64, 4, 2),
    AttentionTile(1, 128, 64, 4, 2, 64, 32, 4, 2),
]


@st.composite
def tables(draw, batch, seq, dim):
    """cos and sin, of any float dtype, for each batch entry or for all."""
    size = draw(st.sampled_from([1, batch])) if batch else 1
    dtype = draw(dtypes)
    return [draw(tensors((size, seq, dim), dtype)) for _ in range(2)]


@examples(8, 300)
@given(batches, kv_heads, groups, st.integers(1, 40), st.integers(1, 24), st.data())
def test_rope(batch, kv, group, seq, half, data):
    heads, dtype, dim = data.draw(st.integers(1, 9)), data.draw(dtypes), 2 * half
    dq = data.draw(tensors((batch, heads, seq, dim), dtype, scale=GRADIENT_SCALES))
    dk, dv = (data.draw(tensors((batch, kv * group, seq, dim), dtype)) for _ in range(2))
    cos, sin = data.draw(tables(batch, seq, dim))
    judge(rope_backward, (dq, dk, dv, cos, sin, group))


@st.composite
def probabilities(draw, batch, heads, seq, dtype):
    """P of any kind, not a softmax of anything; and whether it may be called causal."""
    p = draw(tensors((batch, heads, seq, seq), dtype)).abs()
    row = torch.arange(seq, device=DEVICE)[:, None]
    column = row.mT
    mask = draw(st.sampled_from(["none", "causal", "window", "rows", "columns"]))
    edge = draw(st.integers(0, seq))
    keep = {
        "none": row >= 0,
        "causal": row >= column,
        "window": (row >= column) & (row < column + edge),
        "rows": row.expand(seq, seq) < edge,
        "columns": column.expand(seq, seq) < edge,
    }[mask]
    return p * keep, mask in ("causal", "window") and draw(st.booleans())


@examples(8, 250)
@given(
    st.integers(0, 2), st.integers(1, 2), groups, st.integers(1, 75), st.integers(1, 20), st.data()
)
def test_attention(batch, kv, group, seq, half, data):
    heads, dtype, dim = kv * group, data.draw(dtypes), 2 * half
    grad = data.draw(tensors((batch, heads, seq, dim), dtype, scale=GRADIENT_SCALES))
    probs_dtype = data.draw(st.sampled_from([dtype, FP32]))
    probs, causal = data.draw(probabilities(batch, heads, seq, probs_dtype))
    q = data.draw(tensors((batch, heads, seq, dim), dtype))
    k, v = (data.draw(tensors((batch, kv, seq, dim), dtype)) for _ in range(2))
    tile = data.draw(st.sampled_from([None, *TILES]))
    args = (grad, probs, q, k, v)
    op, launch = attention_backward, attention_backward_launch
    if data.draw(st.booleans()):
        args += tuple(data.draw(tables(batch, seq, dim)))
        op, launch = attention_rope_backward, attention_rope_backward_launch
    coarsest = FP16 if FP16 in (dtype, probs.dtype) else FP32
    judge(op, (*args, 0.3, causal), launcher=lambda *a: launch(*a, tile), rounds_to=coarsest)
