"""RoPE backward of q and k, group sums of k and v, and packing: what follows an attention's own
backward on the way to the projections.

The kernel moves memory and little else. A program takes a run of 16-byte vectors of tokens, and
either a stack of query heads, for which it loads the tables once, or one kv head of k or v.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._tiles import accumulation_dtype, unit_stride

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STACK = 4  # most query heads a program
_UNROLLED = 8  # most heads of a group whose loads are issued, and that are summed, together
_VECTORS = 128  # vectors a program, in either half of a head


def rope_backward_reference(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """Gradients of an attention's q, k and v, summed over groups, back through RoPE, packed.

    Forward y = z cos + rotate_half(z) sin with rotate_half([a, b]) = [-b, a] by halves (Su et
    al., "RoFormer", 2021) for q and k, then k and v repeated ``group`` times. For g = [g1, g2],
    the gradient of y: dz = [g1 cos1 + g2 sin2, g2 cos2 - g1 sin1], where cos1 and cos2 are the
    table's halves, which need not be equal. All in float32, rounded once.

    Args:
        dq: [B, N, S, D], gradient of the rotated q; D even.
        dk, dv: [B, K group, S, D], gradients of the rotated k and of v, each head repeated for
            ``group`` consecutive ones; dtypes as dq's.
        cos, sin: [B, S, D] or [1, S, D], any float dtype.
        group: heads summed into one; 1 where none were repeated.

    Returns:
        [B S, (N + 2 K) D] in dq's dtype: the gradients of q and k before RoPE, and of v.
    """
    wide = accumulation_dtype(dq, dk, dv)
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)

    def summed(g: torch.Tensor) -> torch.Tensor:
        return g.to(wide).unflatten(1, (g.shape[1] // group, group)).sum(2)

    def rotate_back(g: torch.Tensor) -> torch.Tensor:
        first, second = (g * sin).chunk(2, -1)
        return g * cos + torch.cat([second, -first], -1)

    packed = torch.cat([rotate_back(dq.to(wide)), rotate_back(summed(dk)), summed(dv)], 1)
    return packed.to(dq.dtype).transpose(1, 2).flatten(2).flatten(0, 1)


@triton.jit
def _rope_backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    cos_ptr,
    sin_ptr,
    packed_ptr,
    tokens,
    seq,
    dq_stride_b,
    dq_stride_n,
    dq_stride_s,
    dk_stride_b,
    dk_stride_n,
    dk_stride_s,
    dv_stride_b,
    dv_stride_n,
    dv_stride_s,
    cos_stride_b,
    cos_stride_s,
    sin_stride_b,
    sin_stride_s,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLLED: tl.constexpr,
    STACK: tl.constexpr,
    HALF: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Programs of the same tokens are neighbours, and write neighbouring columns.
    QUERIES: tl.constexpr = HEADS // STACK
    PROGRAMS: tl.constexpr = QUERIES + 2 * KV_HEADS
    program, block = tl.program_id(0) % PROGRAMS, tl.program_id(0) // PROGRAMS

    # VECTORS runs of WIDTH elements: with no regard to where rows end, so that none is wasted.
    vector = block * VECTORS + tl.arange(0, VECTORS)[:, None]
    row = vector // (HALF // WIDTH)
    column = vector % (HALF // WIDTH) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = row < tokens
    batch, token = (row // seq).to(tl.int64), (row % seq).to(tl.int64)
    is_value = program >= QUERIES + KV_HEADS

    in_table = row < tl.where(is_value, 0, tokens)  # for dv no tables are read
    cos = cos_ptr + batch * cos_stride_b + token * cos_stride_s + column
    sin = sin_ptr + batch * sin_stride_b + token * sin_stride_s + column
    cos1 = tl.load(cos, in_table).to(tl.float32)
    cos2 = tl.load(cos + HALF, in_table).to(tl.float32)
    sin1 = tl.load(sin, in_table).to(tl.float32)
    sin2 = tl.load(sin + HALF, in_table).to(tl.float32)

    dtype = packed_ptr.dtype.element_ty
    packed = packed_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + column
    if program < QUERIES:
        dq = dq_ptr + batch * dq_stride_b + token * dq_stride_s + column
        for index in tl.static_range(STACK):
            head = (program * STACK + index).to(tl.int64)
            g1 = tl.load(dq + head * dq_stride_n, mask).to(tl.float32)
            g2 = tl.load(dq + head * dq_stride_n + HALF, mask).to(tl.float32)
            dz = packed + head * (2 * HALF)
            tl.store(dz, (g1 * cos1 + g2 * sin2).to(dtype), mask)
            tl.store(dz + HALF, (g2 * cos2 - g1 * sin1).to(dtype), mask)
    else:
        stride_b = tl.where(is_value, dv_stride_b, dk_stride_b)
        stride_n = tl.where(is_value, dv_stride_n, dk_stride_n)
        stride_s = tl.where(is_value, dv_stride_s, dk_stride_s)
        source = tl.where(is_value, dv_ptr, dk_ptr)
        source += batch * stride_b + token * stride_s + column
        first_head = ((program - QUERIES) % KV_HEADS).to(tl.int64) * GROUP
        g1 = tl.zeros([VECTORS, WIDTH], tl.float32)
        g2 = tl.zeros([VECTORS, WIDTH], tl.float32)
        # In two steps, for the sake of wide groups: an error grows with the length of a sum.
        for start in range(0, GROUP, UNROLLED):
            part1 = tl.zeros([VECTORS, WIDTH], tl.float32)
            part2 = tl.zeros([VECTORS, WIDTH], tl.float32)
            for member in tl.static_range(UNROLLED):
                if GROUP % UNROLLED == 0:
                    is_member = mask
                else:
                    is_member = row < tl.where(start + member < GROUP, tokens, 0)
                member_of_group = source + (first_head + start + member) * stride_n
                part1 += tl.load(member_of_group, is_member, 0.0).to(tl.float32)
                part2 += tl.load(member_of_group + HALF, is_member, 0.0).to(tl.float32)
            g1 += part1
            g2 += part2
        dz = packed + (HEADS + program - QUERIES) * (2 * HALF)
        dz1 = tl.where(is_value, g1, g1 * cos1 + g2 * sin2)
        dz2 = tl.where(is_value, g2, g2 * cos2 - g1 * sin1)
        tl.store(dz, dz1.to(dtype), mask)
        tl.store(dz + HALF, dz2.to(dtype), mask)


def _check(dq, dk, dv, cos, sin, group: int) -> None:
    batch, _, seq, dim = dq.shape
    if dim % 2:
        raise UnsupportedError(f"rope: expected an even head_dim, got dq {tuple(dq.shape)}")
    if dq.dtype not in _DTYPES:
        raise UnsupportedError(f"rope: expected dq in bfloat16, float16 or float32, got {dq.dtype}")
    if dk.shape[1] % group:
        raise UnsupportedError(
            f"rope: expected heads of dk in whole groups of {group}, got {dk.shape[1]}"
        )
    for name, x in (("dk", dk), ("dv", dv)):
        if x.dtype != dq.dtype:
            raise UnsupportedError(f"rope: expected {name} in dq's {dq.dtype}, got {x.dtype}")
        expected = (batch, dk.shape[1], seq, dim)
        if x.shape != expected:
            raise UnsupportedError(f"rope: expected {name} {expected}, got {tuple(x.shape)}")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape[1:] != (seq, dim) or (x.shape[0] != 1 and x.shape[0] != batch):
            raise UnsupportedError(
                f"rope: expected {name} {(batch, seq, dim)} or {(1, seq, dim)}, "
                f"got {tuple(x.shape)}"
            )


def _empty(dq, dk, dv, cos, sin, group):
    batch, heads, seq, head_dim = dq.shape
    return dq.new_empty((batch * seq, (heads + 2 * (dk.shape[1] // group)) * head_dim))


def rope_backward_launch(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    group: int,
    *,
    stack: int = _STACK,
    vectors: int = _VECTORS,
    warps: int = 4,
) -> torch.Tensor:
    """Launches the kernel: a program for up to ``stack`` query heads, or one of k or v, and
    ``vectors`` vectors of either half.

    Raises:
        UnsupportedError: an odd head_dim, shapes or dtypes that do not fit together.
    """
    _check(dq, dk, dv, cos, sin, group)
    packed = _empty(dq, dk, dv, cos, sin, group)
    dq, dk, dv, cos, sin = (unit_stride(x) for x in (dq, dk, dv, cos, sin))
    batch, heads, seq, head_dim = dq.shape
    half, kv_heads = head_dim // 2, dk.shape[1] // group
    width = math.gcd(half, 16 // dq.element_size())
    stack = math.gcd(heads, stack)
    blocks = (batch * seq * (half // width) + vectors - 1) // vectors
    table_strides = [0 if x.shape[0] == 1 else x.stride(0) for x in (cos, sin)]
    launch(_rope_backward_kernel, (blocks * (heads // stack + 2 * kv_heads),))(
        dq, dk, dv, cos, sin, packed,
        batch * seq, seq,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        table_strides[0], cos.stride(1), table_strides[1], sin.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        UNROLLED=min(_UNROLLED, group),
        STACK=stack,
        HALF=half,
        VECTORS=vectors,
        WIDTH=width,
        num_warps=warps,
    )  # fmt: skip
    return packed


rope_backward = define_op(
    "rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, int group) -> Tensor",
    reference=rope_backward_reference,
    launcher=rope_backward_launch,
    fake=_empty,
)
