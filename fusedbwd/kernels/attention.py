"""Attention backward on given probabilities, for grouped-query attention and any mask.

Three kernels. The first finds where the nonzero columns of every 64 rows of P end. The second, by
query blocks, writes dS and dq; and, where P's rows do not start at 16-byte boundaries or P is
wider than the other operands, the copy of P that the third reads. The third, by key blocks, is
one product: dk = dS^T q and dv = P^T grad, summed over the query heads of a group. Zero tiles at
the right are skipped by bounds of the loops: a test inside one would end its software pipelining.
dS is stored rather than computed twice: writing and reading it costs about as long as one matmul,
and the third kernel gets by without recomputing anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._attention import key_kernel, prepare_kernel, query_kernel
from fusedbwd.kernels._op import define_op, launch, next_power_of_2
from fusedbwd.kernels._tiles import accumulation_dtype, unit_stride
from fusedbwd.kernels.rope import rope_backward_reference

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class AttentionTile(NamedTuple):
    """How the kernels cut the scores into tiles.

    The query kernel takes ``rows`` queries of each of ``heads`` heads (a divisor of the group:
    stacked heads load k and v once) and ``columns`` keys at a time. The key kernel takes
    ``keys`` keys and ``chunk`` queries at a time. Each has its warps and pipeline stages.
    """

    heads: int
    rows: int
    columns: int
    query_warps: int
    query_stages: int
    keys: int
    chunk: int
    key_warps: int
    key_stages: int


def attention_tile(group: int, head_dim: int, itemsize: int, probs_itemsize: int) -> AttentionTile:
    """The tiles for ``group`` query heads a kv head, heads of ``head_dim``, and element sizes.

    For 16-bit elements found on an H200 at head_dim 160, with one, two and four heads stacked;
    the others are as large as registers and shared memory allow.

    Args:
        itemsize, probs_itemsize: bytes of an element of q, and of P.
    """
    if itemsize == 4:  # right, but slow: exact products of float32 have no tensor cores
        return AttentionTile(1, 32, 32, 8, 1, 32, 32, 8, 1)
    heads = math.gcd(group, 4)
    columns = 64 if probs_itemsize == 2 and heads > 1 else 32
    if head_dim > 192:
        heads = heads if probs_itemsize == 2 else 1
        return AttentionTile(heads, 64 // heads, columns, 8, 2, 64, 64, 8, 3)
    if heads == 1:
        return AttentionTile(1, 64, columns, 4, 3, 64, 64, 4, 4)
    stages = 3 if head_dim <= 160 else 2
    if probs_itemsize == 4:
        return AttentionTile(heads, 64 // heads, columns, 4, stages, 64, 64, 4, 4)
    return AttentionTile(heads, 128 // heads, columns, 8, stages, 64, 64, 4, 4)


def supported(head_dim: int) -> bool:
    """Whether the kernels take heads of ``head_dim`` columns: an even number up to 256."""
    return 0 < head_dim <= 256 and head_dim % 2 == 0


def attention_backward_reference(
    grad_out: torch.Tensor,
    probs: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of out = P v with P = softmax(scale q k^T + mask), for P as given.

    dP = grad v^T, dS = scale P (dP - rowsum(dP P)), dq = dS k, dk = dS^T q, dv = P^T grad:
    the chain rule, with softmax's Jacobian diag(P) - P P^T. P may be anything finite, whatever
    made it, and come in a wider dtype than the rest: dS is then computed from P as it comes, and
    dv from P rounded to q's dtype, as autograd does for a float32 softmax that is rounded before
    it meets v. dS is rounded to q's dtype; all sums, those over the query heads of a kv head too,
    are in float32.

    Args:
        grad_out: [B, N, S, D], gradient of out.
        probs: [B, N, S, S], any float dtype.
        q: [B, N, S, D].
        k, v: [B, K, S, D], one for N / K consecutive query heads; dtypes as q's.
        scale: the factor of q k^T.
        causal: the caller's word that P is zero above the diagonal. Tiles above it are then
            not read; otherwise zero tiles are looked for.

    Returns:
        dq [B, N, S, D], dk and dv [B, K, S, D] in q's dtype, each stored as [B, S, heads, D].
    """
    gradients = _gradients(grad_out, probs, q, k, v, scale)
    return tuple(g.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2) for g in gradients)


def attention_rope_backward_reference(
    grad_out: torch.Tensor,
    probs: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """As :func:`attention_backward_reference`, then back through RoPE, and packed.

    q and k are the rotated ones, y = z cos + rotate_half(z) sin with rotate_half([a, b]) =
    [-b, a] by halves (Su et al., "RoFormer", 2021). For g = [g1, g2], the gradient of y:
    dz = [g1 cos1 + g2 sin2, g2 cos2 - g1 sin1], where cos1 and cos2 are the table's halves, which
    need not be equal.

    Args:
        cos, sin: [B, S, D] or [1, S, D], any float dtype.

    Returns:
        [B S, (N + 2 K) D] in q's dtype: the gradients of q and k before RoPE, and of v.
    """
    dq, dk, dv = _gradients(grad_out, probs, q, k, v, scale)
    return rope_backward_reference(dq, dk, dv, cos, sin, 1).to(q.dtype)


def _gradients(grad_out, probs, q, k, v, scale):
    """dq, dk and dv in the dtype of accumulation."""
    wide = accumulation_dtype(grad_out, probs, q, k, v)
    kv_heads = k.shape[1]

    def grouped(x: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] -> [B, K, N / K, ...]."""
        return x.to(wide).unflatten(1, (kv_heads, x.shape[1] // kv_heads))

    grad, p = grouped(grad_out), grouped(probs)
    dp = grad @ grouped(v).transpose(-2, -1)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    ds = ds.to(q.dtype).to(wide)
    dq = (ds @ grouped(k)).flatten(1, 2)
    dk = (ds.transpose(-2, -1) @ grouped(q)).sum(2)
    dv = (grouped(probs.to(q.dtype)).transpose(-2, -1) @ grad).sum(2)
    return dq, dk, dv


def _widths(head_dim: int) -> tuple[int, int]:
    """Widths of the one or two tiles that cover a head: powers of two, half in either half."""
    half = head_dim // 2
    first = max(8, next_power_of_2(half + 1) // 2)
    rest = half - first
    return 2 * first, 2 * max(8, next_power_of_2(rest)) if rest > 0 else 0


def _launch(grad_out, probs, q, k, v, tables, scale, causal, outputs, tile) -> None:
    """Launches the kernels into ``outputs``: dq, dk, dv, or the packed buffer if ``tables``."""
    _check(grad_out, q, k, v)
    grad_out, probs, q, k, v = (unit_stride(x) for x in (grad_out, probs, q, k, v))
    batch, heads, seq, head_dim = q.shape
    group = heads // k.shape[1]
    tile = tile or attention_tile(group, head_dim, q.element_size(), probs.element_size())
    block = max(64, tile.rows)
    row_blocks, padded = (seq + block - 1) // block, (seq + 7) // 8 * 8

    # Sums of remainders rather than comparisons: under a compiler, sizes may be symbols.
    misaligned = sum(n % 8 for n in (seq, probs.storage_offset(), *probs.stride()[:3]))
    # 0 or 1: each remainder is at most 7.
    copied = (misaligned + 34) // 35 if probs.dtype == q.dtype else 1
    # One-dimensional and never empty, so that no size of theirs is asked for being 0 or 1.
    elements = batch * heads * seq * padded
    copy, dscores = q.new_empty((copied * elements + 8,)), q.new_empty((elements + 8,))
    ends = q.new_empty((batch * heads * row_blocks + 8,), dtype=torch.int32)
    if not causal:
        launch(prepare_kernel, (heads, row_blocks, batch))(
            probs, ends, seq, misaligned, *probs.stride()[:3],
            BLOCK=block, COLUMNS=128, num_warps=block // 8,
        )  # fmt: skip

    rope = tables is not None
    # The plain op has no tables: any tensor stands in for them, and is not read.
    cos, sin = (x.contiguous() for x in tables) if rope else (q, q)
    table_strides = (0, cos.stride(1))
    if rope and cos.shape[0] != 1:
        table_strides = cos.stride()[:2]
    dq, dk, dv = (outputs, outputs, q) if rope else outputs
    token = outputs.stride(0) if rope else None
    width, width2 = _widths(head_dim)
    constants = {
        "CAUSAL": causal,
        "ROPE": rope,
        "GROUP": group,
        "HALF": head_dim // 2,
        "WIDTH": width,
        "WIDTH2": width2,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "BLOCK": block,
    }
    launch(query_kernel, (heads // tile.heads, (seq + tile.rows - 1) // tile.rows, batch))(
        grad_out, probs, copy, ends, k, v, cos, sin, dscores, dq,
        seq, copied, scale,
        *grad_out.stride()[:3], *probs.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *table_strides, token or dq.stride(2),
        HEADS=tile.heads, COLUMNS=tile.columns,
        num_warps=tile.query_warps, num_stages=tile.query_stages, **constants,
    )  # fmt: skip
    launch(key_kernel, (2 * k.shape[1], (seq + tile.keys - 1) // tile.keys, batch))(
        grad_out, probs, copy, ends, q, cos, sin, dscores, dk, dv,
        seq, copied,
        *grad_out.stride()[:3], *probs.stride()[:3], *q.stride()[:3],
        *table_strides, token or dk.stride(2),
        CHUNK=tile.chunk,
        num_warps=tile.key_warps, num_stages=tile.key_stages, **constants,
    )  # fmt: skip


def _check(grad_out, q, k, v) -> None:
    if not supported(q.shape[3]):
        raise UnsupportedError(
            f"attention: expected an even head_dim up to 256, got q {tuple(q.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise UnsupportedError(
            "attention: expected query heads in whole groups, got "
            f"{q.shape[1]} of them for {k.shape[1]} of k"
        )
    if q.dtype not in _DTYPES:
        raise UnsupportedError(
            f"attention: expected q in bfloat16, float16 or float32, got {q.dtype}"
        )
    for name, x in (("grad_out", grad_out), ("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise UnsupportedError(f"attention: expected {name} in q's {q.dtype}, got {x.dtype}")


def _empty(grad_out, probs, q, k, v, scale, causal):
    """dq, dk and dv: [B, heads, S, D], stored as [B, S, heads, D]."""
    batch, _, seq, head_dim = q.shape
    heads = (q.shape[1], k.shape[1], k.shape[1])
    return tuple(q.new_empty((batch, seq, n, head_dim)).transpose(1, 2) for n in heads)


def _empty_packed(grad_out, probs, q, k, v, cos, sin, scale, causal):
    batch, heads, seq, head_dim = q.shape
    return q.new_empty((batch * seq, (heads + 2 * k.shape[1]) * head_dim))


def attention_backward_launch(
    grad_out, probs, q, k, v, scale, causal, tile: AttentionTile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernels, with the tiles of :func:`attention_tile` unless others are given."""
    outputs = _empty(grad_out, probs, q, k, v, scale, causal)
    _launch(grad_out, probs, q, k, v, None, scale, causal, outputs, tile)
    return outputs


def attention_rope_backward_launch(
    grad_out, probs, q, k, v, cos, sin, scale, causal, tile: AttentionTile | None = None
) -> torch.Tensor:
    """As :func:`attention_backward_launch`, into one packed buffer."""
    packed = _empty_packed(grad_out, probs, q, k, v, cos, sin, scale, causal)
    _launch(grad_out, probs, q, k, v, (cos, sin), scale, causal, packed, tile)
    return packed


attention_backward = define_op(
    "attention_backward(Tensor grad_out, Tensor probs, Tensor q, Tensor k, Tensor v, "
    "float scale, bool causal) -> (Tensor, Tensor, Tensor)",
    reference=attention_backward_reference,
    launcher=attention_backward_launch,
    fake=_empty,
)

attention_rope_backward = define_op(
    "attention_rope_backward(Tensor grad_out, Tensor probs, Tensor q, Tensor k, Tensor v, "
    "Tensor cos, Tensor sin, float scale, bool causal) -> Tensor",
    reference=attention_rope_backward_reference,
    launcher=attention_rope_backward_launch,
    fake=_empty_packed,
)
