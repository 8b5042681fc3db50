"""The Triton kernels of :mod:`fusedbwd.kernels.attention`.

Sizes: S = seq queries and as many keys, ``heads`` query heads, ``heads / GROUP`` kv heads of
2 * HALF columns. Each (batch, head) has S rows of P; BLOCK of them, in HEADS heads, share an
entry of ``ends``. P's copy and dS have ``padded`` columns, S rounded up to eight, so that their
rows start at 16-byte boundaries.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepare_kernel(
    probs_ptr,
    copy_ptr,
    ends_ptr,
    seq,
    misaligned,
    probs_stride_b,
    probs_stride_n,
    probs_stride_s,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Where BLOCK rows of HEADS heads end, found from the right; and P's copy if misaligned."""
    stack, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    stacked = tl.arange(0, HEADS * BLOCK)[:, None]
    head = (stack * HEADS + stacked // BLOCK).to(tl.int64)
    row = (block * BLOCK + stacked % BLOCK).to(tl.int64)
    in_rows = row < seq
    rows = batch * probs_stride_b + head * probs_stride_n + row * probs_stride_s
    padded = (seq + 7) // 8 * 8
    if CAUSAL:
        end = tl.minimum((block + 1) * BLOCK, seq)
    else:
        if misaligned == 0:  # multiples of eight: the compiler may load 16 bytes at a time
            end = _nonzero_end(probs_ptr, rows // 8 * 8, in_rows, padded, COLUMNS)
        else:
            end = _nonzero_end(probs_ptr, rows, in_rows, seq, COLUMNS)
        stacks, blocks = tl.num_programs(0), tl.num_programs(1)
        tl.store(ends_ptr + (batch * stacks + stack) * blocks + block, end)
    if misaligned != 0:
        copy_rows = ((batch * tl.num_programs(0) * HEADS + head) * seq + row) * padded
        for start in range(0, end, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            p = tl.load(probs_ptr + rows + column, in_rows & (column < seq), 0.0)
            p = p.to(copy_ptr.dtype.element_ty)
            tl.store(copy_ptr + copy_rows + column, p, in_rows & (column < padded))


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
    misaligned,
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
        ends_ptr += batch * (heads // HEADS) * blocks
        end = tl.load(ends_ptr + stack * blocks + mine)
        ends_ptr += kv_head * (GROUP // HEADS) * blocks
        furthest = _furthest_end(ends_ptr, blocks, mine + 1, GROUP // HEADS)
    end = (end + COLUMNS - 1) // COLUMNS * COLUMNS
    stop = (furthest + KEYS - 1) // KEYS * KEYS

    p_rows = _probs_rows(
        probs_ptr, probs_stride_b, probs_stride_n, probs_stride_s,
        copy_ptr, misaligned, batch, head, row, heads, seq,
    )  # fmt: skip
    key_ptr += batch * key_stride_b + kv_head * key_stride_n
    value_ptr += batch * value_stride_b + kv_head * value_stride_n
    dtype = key_ptr.dtype.element_ty

    grad_rows = batch * grad_stride_b + head * grad_stride_n + row * grad_stride_s
    grad = _load(grad_ptr, grad_rows, in_rows, 0, WIDTH, HALF)
    if WIDTH2 > 0:
        grad2 = _load(grad_ptr, grad_rows, in_rows, WIDTH // 2, WIDTH2, HALF)

    # dP is computed twice, bit for bit the same: where a row of P is a single one, dS is zero.
    delta = tl.zeros([HEADS * ROWS, 1], tl.float32)
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        in_keys = (column < seq)[:, None]
        value_rows = column.to(tl.int64)[:, None] * value_stride_s
        p = tl.load(p_rows + column[None, :], in_rows & (column[None, :] < padded), 0.0)
        v = _load(value_ptr, value_rows, in_keys, 0, WIDTH, HALF)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        if WIDTH2 > 0:
            v2 = _load(value_ptr, value_rows, in_keys, WIDTH // 2, WIDTH2, HALF)
            dp = tl.dot(grad2, tl.trans(v2), dp, input_precision="ieee")
        delta += tl.sum(p.to(tl.float32) * dp, 1, keep_dims=True)

    own_rows = ((batch * heads + head) * seq + row) * padded
    dq = tl.zeros([HEADS * ROWS, WIDTH], tl.float32)
    if WIDTH2 > 0:
        dq2 = tl.zeros([HEADS * ROWS, WIDTH2], tl.float32)
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        in_keys = (column < seq)[:, None]
        value_rows = column.to(tl.int64)[:, None] * value_stride_s
        p = tl.load(p_rows + column[None, :], in_rows & (column[None, :] < padded), 0.0)
        v = _load(value_ptr, value_rows, in_keys, 0, WIDTH, HALF)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        if WIDTH2 > 0:
            v2 = _load(value_ptr, value_rows, in_keys, WIDTH // 2, WIDTH2, HALF)
            dp = tl.dot(grad2, tl.trans(v2), dp, input_precision="ieee")
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
        if misaligned != 0:
            tl.store(copy_ptr + own_rows + column, zeros, in_columns)

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
    misaligned,
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
    HEADS: tl.constexpr,
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
        ends_ptr += (batch * kv_heads + kv_head) * (GROUP // HEADS) * blocks
        first_row = _first_block(ends_ptr, blocks, start, GROUP // HEADS) * BLOCK
    chunks = tl.maximum((seq - first_row + CHUNK - 1) // CHUNK, 0)

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
        p_rows = _probs_rows(
            probs_ptr, probs_stride_b, probs_stride_n, probs_stride_s,
            copy_ptr, misaligned, batch, head, row, heads, seq,
        )  # fmt: skip
        ds_rows = dscores_ptr + ((batch * heads + head) * seq + row) * padded
        w_rows = tl.where(is_value, p_rows, ds_rows)
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
def _nonzero_end(ptr, rows, in_rows, limit, COLUMNS: tl.constexpr):
    """The end of the last COLUMNS columns that are not zero in all rows; 0 if all are."""
    end = tl.cdiv(limit, COLUMNS) * COLUMNS
    nonzero = tl.zeros([], tl.int32)
    while (end > 0) & (nonzero == 0):
        column = (end - COLUMNS + tl.arange(0, COLUMNS))[None, :]
        p = tl.load(ptr + rows + column, in_rows & (column < limit), 0.0)
        nonzero = tl.max((p != 0.0).to(tl.int32))
        end = tl.where(nonzero == 0, end - COLUMNS, end)
    return end


@triton.jit
def _first_block(ends_ptr, blocks, start, STACKS: tl.constexpr):
    """The first block of rows, in any of a group's stacks of heads, that ends after ``start``."""
    stack = tl.arange(0, triton.next_power_of_2(STACKS))[:, None]
    found = tl.full([], blocks, tl.int32)
    for first in range(0, blocks, 64):
        block = first + tl.arange(0, 64)[None, :]
        mask = (stack < STACKS) & (block < blocks)
        end = tl.load(ends_ptr + stack * blocks + block, mask, 0)
        found = tl.minimum(found, tl.min(tl.where(end > start, block, blocks)))
    return found


@triton.jit
def _furthest_end(ends_ptr, blocks, stop, STACKS: tl.constexpr):
    """The furthest end of the blocks before ``stop``, in any of a group's stacks of heads."""
    stack = tl.arange(0, triton.next_power_of_2(STACKS))[:, None]
    furthest = tl.zeros([], tl.int32)
    for first in range(0, stop, 64):
        block = first + tl.arange(0, 64)[None, :]
        end = tl.load(ends_ptr + stack * blocks + block, (stack < STACKS) & (block < stop), 0)
        furthest = tl.maximum(furthest, tl.max(end))
    return furthest


@triton.jit
def _probs_rows(
    probs_ptr, stride_b, stride_n, stride_s, copy_ptr, misaligned, batch, head, row, heads, seq
):
    """Where rows of P start: in P itself if it is aligned, else in the copy.

    Offsets are multiplied out of eights, which tells the compiler that loads can be wide.
    """
    copied = ((batch * heads + head) * seq + row) * ((seq + 7) // 8)
    if probs_ptr.dtype == copy_ptr.dtype:
        direct = misaligned == 0
        given = batch * (stride_b // 8) + head * (stride_n // 8) + row * (stride_s // 8)
        return tl.where(direct, probs_ptr, copy_ptr) + tl.where(direct, given, copied) * 8
    else:
        return copy_ptr + copied * 8


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
