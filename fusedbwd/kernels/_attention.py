"""The Triton kernels of :mod:`fusedbwd.kernels.attention`.

Sizes: S = seq queries and as many keys, ``heads`` query heads, ``heads / GROUP`` kv heads of
2 * HALF columns. Each (batch, head) has S rows of P; BLOCK of them share an entry of ``ends``.
P's copy and dS have ``padded`` columns, S rounded up to eight, so that their rows start at
16-byte boundaries.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepare_kernel(
    probs_ptr,
    ends_ptr,
    seq,
    misaligned,
    probs_stride_b,
    probs_stride_n,
    probs_stride_s,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Where the nonzero columns of BLOCK rows of a head end."""
    head, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * probs_stride_b + head.to(tl.int64) * probs_stride_n
    row = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    in_rows = row < seq
    rows = first + row * probs_stride_s
    last = first + (tl.minimum((block + 1) * BLOCK, seq) - 1).to(tl.int64) * probs_stride_s
    if misaligned == 0:  # multiples of eight: the compiler may load 16 bytes at a time
        padded = (seq + 7) // 8 * 8
        end = _nonzero_end(probs_ptr, rows // 8 * 8, last // 8 * 8, in_rows, padded, COLUMNS)
    else:
        end = _nonzero_end(probs_ptr, rows, last, in_rows, seq, COLUMNS)
    heads, blocks = tl.num_programs(0), tl.num_programs(1)
    tl.store(ends_ptr + (batch * heads + head) * blocks + block, end)


@triton.jit
def query_kernel(
    grad_ptr,
    probs_ptr,
    copy_ptr,
    ends_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    dscores_ptr,
    dq_ptr,
    seq,
    copied,
    scale,
    grad_stride_b,
    grad_stride_n,
    grad_stride_s,
    probs_stride_b,
    probs_stride_n,
    probs_stride_s,
    key_stride_b,
    key_stride_n,
    key_stride_s,
    value_stride_b,
    value_stride_n,
    value_stride_s,
    table_stride_b,
    table_stride_s,
    dq_stride,
    CAUSAL: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dS and dq for ROWS queries of HEADS heads that share a kv head."""
    stack, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    heads = tl.num_programs(0) * HEADS
    kv_head = (stack * HEADS // GROUP).to(tl.int64)
    stacked = tl.arange(0, HEADS * ROWS)[:, None]
    head = (stack * HEADS + stacked // ROWS).to(tl.int64)
    row = (block * ROWS + stacked % ROWS).to(tl.int64)
    in_rows = row < seq
    padded = (seq + 7) // 8 * 8

    # P is zero from end on. furthest is the furthest such end among these and all earlier rows of
    # the group: the key kernel reads whole tiles of keys up to there.
    if CAUSAL:
        end = tl.minimum((block + 1) * ROWS, seq)
        furthest = end
    else:
        blocks = (seq + BLOCK - 1) // BLOCK
        mine = block * ROWS // BLOCK
        ends_ptr += batch * heads * blocks
        own_ends = ends_ptr + stack * HEADS * blocks + mine
        end = tl.max(tl.load(own_ends + tl.arange(0, HEADS) * blocks))
        furthest = _furthest_end(ends_ptr + kv_head * GROUP * blocks, blocks, mine + 1, GROUP)
    end = (end + COLUMNS - 1) // COLUMNS * COLUMNS
    stop = (furthest + KEYS - 1) // KEYS * KEYS

    key_ptr += batch * key_stride_b + kv_head * key_stride_n
    value_ptr += batch * value_stride_b + kv_head * value_stride_n
    dtype = key_ptr.dtype.element_ty
    grad_rows = batch * grad_stride_b + head * grad_stride_n + row * grad_stride_s
    grad = _load(grad_ptr, grad_rows, in_rows, 0, WIDTH, HALF)
    grad2 = grad
    if WIDTH2 > 0:
        grad2 = _load(grad_ptr, grad_rows, in_rows, WIDTH // 2, WIDTH2, HALF)

    # dP is computed twice, bit for bit the same: where a row of P is a single one, dS is zero.
    given = probs_ptr + batch * probs_stride_b + head * probs_stride_n + row * probs_stride_s
    own_rows = ((batch * heads + head) * seq + row) * padded
    copy_rows = copy_ptr + own_rows
    p_rows = given
    limit = seq
    if probs_ptr.dtype != copy_ptr.dtype:
        delta = _delta(
            given, seq, copy_rows, in_rows, end, grad, grad2, value_ptr, value_stride_s, seq,
            True, WIDTH, WIDTH2, HALF, COLUMNS,
        )  # fmt: skip
    else:
        limit = padded
        aligned_ptr, by_batch, by_head, by_row = _aligned(
            copied == 0, probs_ptr, probs_stride_b, probs_stride_n, probs_stride_s,
            copy_ptr, heads, seq,
        )  # fmt: skip
        p_rows = aligned_ptr + (batch * by_batch + head * by_head + row * by_row) * 8
        if copied == 0:
            delta = _delta(
                p_rows, padded, copy_rows, in_rows, end, grad, grad2, value_ptr, value_stride_s,
                seq, False, WIDTH, WIDTH2, HALF, COLUMNS,
            )  # fmt: skip
        else:
            delta = _delta(
                given, seq, copy_rows, in_rows, end, grad, grad2, value_ptr, value_stride_s,
                seq, True, WIDTH, WIDTH2, HALF, COLUMNS,
            )  # fmt: skip
            tl.debug_barrier()  # the copy is read below, by other threads than wrote it

    dq = tl.zeros([HEADS * ROWS, WIDTH], tl.float32)
    if WIDTH2 > 0:
        dq2 = tl.zeros([HEADS * ROWS, WIDTH2], tl.float32)
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        in_keys = (column < seq)[:, None]
        p = tl.load(p_rows + column[None, :], in_rows & (column[None, :] < limit), 0.0)
        dp = _dp(grad, grad2, value_ptr, value_stride_s, column, seq, WIDTH, WIDTH2, HALF)
        ds = (p.to(tl.float32) * (dp - delta) * scale).to(dtype)
        in_columns = in_rows & (column[None, :] < padded)
        tl.store(dscores_ptr + own_rows + column[None, :], ds, in_columns)
        key_rows = column.to(tl.int64)[:, None] * key_stride_s
        k = _load(key_ptr, key_rows, in_keys, 0, WIDTH, HALF)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        if WIDTH2 > 0:
            k2 = _load(key_ptr, key_rows, in_keys, WIDTH // 2, WIDTH2, HALF)
            dq2 = tl.dot(ds, k2, dq2, input_precision="ieee")

    zeros = tl.zeros([HEADS * ROWS, COLUMNS], dtype)
    for start in range(end, stop, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        in_columns = in_rows & (column < padded)
        tl.store(dscores_ptr + own_rows + column, zeros, in_columns)
        if copied != 0:
            tl.store(copy_rows + column, zeros, in_columns)

    rows = (batch * seq + row) * dq_stride + head * (2 * HALF)
    table = batch * table_stride_b + row * table_stride_s
    _store(dq_ptr, rows, in_rows, dq, cos_ptr, sin_ptr, table, in_rows, ROPE, 0, WIDTH, HALF)
    if WIDTH2 > 0:
        _store(
            dq_ptr, rows, in_rows, dq2,
            cos_ptr, sin_ptr, table, in_rows, ROPE, WIDTH // 2, WIDTH2, HALF,
        )  # fmt: skip


@triton.jit
def key_kernel(
    grad_ptr,
    probs_ptr,
    copy_ptr,
    ends_ptr,
    query_ptr,
    cos_ptr,
    sin_ptr,
    dscores_ptr,
    dk_ptr,
    dv_ptr,
    seq,
    copied,
    grad_stride_b,
    grad_stride_n,
    grad_stride_s,
    probs_stride_b,
    probs_stride_n,
    probs_stride_s,
    query_stride_b,
    query_stride_n,
    query_stride_s,
    table_stride_b,
    table_stride_s,
    dk_stride,
    CAUSAL: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dk = dS^T q (even programs) or dv = P^T grad (odd ones) for KEYS keys of a kv head."""
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(0) // 2
    is_value = tl.program_id(0) % 2 == 1
    kv_heads = tl.num_programs(0) // 2
    heads = kv_heads * GROUP
    start = tl.program_id(1) * KEYS
    key = start + tl.arange(0, KEYS)
    padded = (seq + 7) // 8 * 8

    if CAUSAL:
        first_row = start // ROWS * ROWS
    else:
        blocks = (seq + BLOCK - 1) // BLOCK
        ends_ptr += (batch * kv_heads + kv_head) * GROUP * blocks
        first_row = _first_block(ends_ptr, blocks, start, GROUP) * BLOCK
    chunks = tl.maximum((seq - first_row + CHUNK - 1) // CHUNK, 0)

    # P or its copy, or dS.
    given_ptr = copy_ptr
    if probs_ptr.dtype == copy_ptr.dtype:
        given_ptr = probs_ptr
    w_ptr, by_batch, by_head, by_row = _aligned(
        is_value & (copied == 0), given_ptr, probs_stride_b, probs_stride_n, probs_stride_s,
        tl.where(is_value, copy_ptr, dscores_ptr), heads, seq,
    )  # fmt: skip
    x_ptr = tl.where(is_value, grad_ptr, query_ptr)
    stride_b = tl.where(is_value, grad_stride_b, query_stride_b)
    stride_n = tl.where(is_value, grad_stride_n, query_stride_n)
    stride_s = tl.where(is_value, grad_stride_s, query_stride_s)
    acc = tl.zeros([KEYS, WIDTH], tl.float32)
    if WIDTH2 > 0:
        acc2 = tl.zeros([KEYS, WIDTH2], tl.float32)
    # One loop over the chunks of all heads, so that the pipeline fills once.
    for step in range(0, GROUP * chunks):
        head = (kv_head * GROUP + step // chunks).to(tl.int64)
        row = first_row + step % chunks * CHUNK + tl.arange(0, CHUNK)
        row = row.to(tl.int64)[:, None]
        in_rows = row < seq
        w_rows = w_ptr + (batch * by_batch + head * by_head + row * by_row) * 8
        w = tl.load(w_rows + key[None, :], in_rows & (key[None, :] < padded), 0.0)
        x_rows = batch * stride_b + head * stride_n + row * stride_s
        x = _load(x_ptr, x_rows, in_rows, 0, WIDTH, HALF)
        acc = tl.dot(tl.trans(w), x, acc, input_precision="ieee")
        if WIDTH2 > 0:
            x2 = _load(x_ptr, x_rows, in_rows, WIDTH // 2, WIDTH2, HALF)
            acc2 = tl.dot(tl.trans(w), x2, acc2, input_precision="ieee")

    key = key.to(tl.int64)[:, None]
    in_keys = key < seq
    in_table = tl.where(is_value, seq, key) < seq  # dv is not rotated
    out_ptr = dk_ptr
    if ROPE:
        out_head = heads + tl.where(is_value, kv_heads, 0) + kv_head
    else:
        out_head = kv_head
        out_ptr = tl.where(is_value, dv_ptr, dk_ptr)
    rows = (batch * seq + key) * dk_stride + out_head * (2 * HALF)
    table = batch * table_stride_b + key * table_stride_s
    _store(out_ptr, rows, in_keys, acc, cos_ptr, sin_ptr, table, in_table, ROPE, 0, WIDTH, HALF)
    if WIDTH2 > 0:
        _store(
            out_ptr, rows, in_keys, acc2,
            cos_ptr, sin_ptr, table, in_table, ROPE, WIDTH // 2, WIDTH2, HALF,
        )  # fmt: skip


@triton.jit
def _nonzero_end(ptr, rows, last, in_rows, limit, COLUMNS: tl.constexpr):
    """The end of the last column that is not zero in all rows; 0 if all are.

    A row of a causal P ends after the rows before it. So the end of the last row is found first,
    and all beyond is read without waiting for what it holds.
    """
    found = tl.zeros([], tl.int32)
    for start in range(0, limit, 1024):
        column = start + tl.arange(0, 1024)
        p = tl.load(ptr + last + column, column < limit, 0.0)
        found = tl.maximum(found, tl.max(tl.where(p != 0.0, column + 1, 0)))
    ends = tl.zeros([rows.shape[0], COLUMNS], tl.int32)
    for start in range(found // 8 * 8, limit, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        p = tl.load(ptr + rows + column, in_rows & (column < limit), 0.0)
        ends = tl.maximum(ends, tl.where(p != 0.0, column + 1, 0))
    return tl.maximum(found, tl.max(ends))


@triton.jit
def _first_block(ends_ptr, blocks, start, GROUP: tl.constexpr):
    """The first block of rows, in any of a group's heads, that ends after ``start``."""
    head = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
    found = tl.full([], blocks, tl.int32)
    for first in range(0, blocks, 64):
        block = first + tl.arange(0, 64)[None, :]
        end = tl.load(ends_ptr + head * blocks + block, (head < GROUP) & (block < blocks), 0)
        found = tl.minimum(found, tl.min(tl.where(end > start, block, blocks)))
    return found


@triton.jit
def _furthest_end(ends_ptr, blocks, stop, GROUP: tl.constexpr):
    """The furthest end of the blocks before ``stop``, in any of a group's heads."""
    head = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
    furthest = tl.zeros([], tl.int32)
    for first in range(0, stop, 64):
        block = first + tl.arange(0, 64)[None, :]
        end = tl.load(ends_ptr + head * blocks + block, (head < GROUP) & (block < stop), 0)
        furthest = tl.maximum(furthest, tl.max(end))
    return furthest


@triton.jit
def _dp(
    grad,
    grad2,
    value_ptr,
    value_stride_s,
    column,
    seq,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    HALF: tl.constexpr,
):
    """dP = grad V^T for the keys in ``column``; grad2 is the rest of grad if WIDTH2."""
    in_keys = (column < seq)[:, None]
    value_rows = column.to(tl.int64)[:, None] * value_stride_s
    v = _load(value_ptr, value_rows, in_keys, 0, WIDTH, HALF)
    dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
    if WIDTH2 > 0:
        v2 = _load(value_ptr, value_rows, in_keys, WIDTH // 2, WIDTH2, HALF)
        dp = tl.dot(grad2, tl.trans(v2), dp, input_precision="ieee")
    return dp


@triton.jit
def _delta(
    p_rows,
    limit,
    copy_rows,
    in_rows,
    end,
    grad,
    grad2,
    value_ptr,
    value_stride_s,
    seq,
    COPY: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """rowsum(dP P), and with COPY the copy of P, rounded to the copy's dtype."""
    padded = (seq + 7) // 8 * 8
    delta = tl.zeros([in_rows.shape[0], 1], tl.float32)
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        p = tl.load(p_rows + column[None, :], in_rows & (column[None, :] < limit), 0.0)
        dp = _dp(grad, grad2, value_ptr, value_stride_s, column, seq, WIDTH, WIDTH2, HALF)
        delta += tl.sum(p.to(tl.float32) * dp, 1, keep_dims=True)
        if COPY:
            in_columns = in_rows & (column[None, :] < padded)
            rounded = p.to(copy_rows.dtype.element_ty)
            tl.store(copy_rows + column[None, :], rounded, in_columns)
    return delta


@triton.jit
def _aligned(direct, given_ptr, stride_b, stride_n, stride_s, scratch_ptr, heads, seq):
    """A [B, N, S, S] tensor with aligned rows: the given one if ``direct``, else a scratch one.

    Returns:
        Its pointer and its strides by eights. Offsets are multiplied out of eights, which tells
        the compiler that loads can be wide.
    """
    by_row = tl.cast((seq + 7) // 8, tl.int64)
    by_head = by_row * seq
    by_batch = by_head * heads
    return (
        tl.where(direct, given_ptr, scratch_ptr),
        tl.where(direct, stride_b // 8, by_batch),
        tl.where(direct, stride_n // 8, by_head),
        tl.where(direct, stride_s // 8, by_row),
    )


@triton.jit
def _load(ptr, rows, in_rows, START: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """WIDTH columns of a head: WIDTH / 2 from START in its first half, and as many in its second.

    A head of 160 is a tile of 128 and one of 32, with what RoPE pairs in one tile.
    """
    column = tl.arange(0, WIDTH)[None, :]
    offset = START + column % (WIDTH // 2)
    mask = in_rows
    if START + WIDTH // 2 > HALF:
        mask = in_rows & (offset < HALF)
    return tl.load(ptr + rows + offset + column // (WIDTH // 2) * HALF, mask, 0.0)


@triton.jit
def _store(
    ptr,
    rows,
    in_rows,
    x,
    cos_ptr,
    sin_ptr,
    table_rows,
    in_table,
    ROPE: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
):
    """Stores what :func:`_load` would load; with ROPE, the rows in_table rotated back."""
    dtype = ptr.dtype.element_ty
    if ROPE:
        offset = START + tl.arange(0, WIDTH // 2)[None, :]
        inside = offset < HALF
        first, second = x.reshape(x.shape[0], 2, WIDTH // 2).permute(0, 2, 1).split()
        cos, sin, in_table = cos_ptr + table_rows, sin_ptr + table_rows, in_table & inside
        cos1 = tl.load(cos + offset, in_table, 1.0).to(tl.float32)
        cos2 = tl.load(cos + offset + HALF, in_table, 1.0).to(tl.float32)
        sin1 = tl.load(sin + offset, in_table, 0.0).to(tl.float32)
        sin2 = tl.load(sin + offset + HALF, in_table, 0.0).to(tl.float32)
        mask = in_rows & inside
        tl.store(ptr + rows + offset, (first * cos1 + second * sin2).to(dtype), mask)
        tl.store(ptr + rows + offset + HALF, (second * cos2 - first * sin1).to(dtype), mask)
    else:
        column = tl.arange(0, WIDTH)[None, :]
        offset = START + column % (WIDTH // 2)
        mask = in_rows
        if START + WIDTH // 2 > HALF:
            mask = in_rows & (offset < HALF)
        tl.store(ptr + rows + offset + column // (WIDTH // 2) * HALF, x.to(dtype), mask)
