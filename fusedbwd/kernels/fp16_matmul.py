"""A float32 matmul on scaled float16 parts of its operands, and in float32 where these may not
stand for them.

One part each: one product, with TF32's 10 mantissa bits. Two parts each: three products, the two
small ones added up by themselves, and the partial sums over each step of the summed dimension, 64
of it, added up outside the tensor core, whose own additions are less exact than float32's.

Whether the operands' parts are safe is known on the device only. The kernel asks there, and
multiplies the float32 operands themselves, by float32 instructions, if one is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._matmul import (
    MatmulTile,
    block,
    describable,
    join,
    operand,
    place,
    rounds,
    share,
    store_sum,
    subtiles,
    workspace,
)
from fusedbwd.kernels._op import define_op, launch, next_power_of_2
from fusedbwd.kernels._tiles import check_shapes, row_stride, unit_stride
from fusedbwd.kernels.fp16_parts import (
    PART_SCALE,
    exponent_of_scale,
    scale_exponent,
    times_power_of_2,
)

PARTIAL_SUM = 512
"""The most of the summed dimension that is added up before the total is: in the reference and in
float32. On the tensor core, which adds less carefully, a step of the tile's depth is."""

TILES = {
    1: MatmulTile(128, 256, 64, stages=3, warps=8, subtiles=4, split=True),
    2: MatmulTile(128, 128, 64, stages=3, warps=8, split=True),
}
"""By the number of parts. Not tuned."""

_EXACT = 64  # rows and columns that are computed in float32 at a time


def fp16_matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """``a @ b + residual`` by the parts, or by ``a`` and ``b`` if a flag is set.

    Args:
        a: [M, K], float32.
        b: [K, N], float32.
        a_parts: of ``a`` as :func:`fp16_parts` gives them: the float16 parts, seen as [M, K]; the
            sample's maxima, the maxima and the flags.
        b_parts: of ``b``, as many.
        residual: [M, N] in float32, or None.

    Returns:
        [M, N] in float32, contiguous.
    """
    *a_halves, a_sample, a_maxima, a_flags = a_parts
    *b_halves, b_sample, b_maxima, b_flags = b_parts
    if a_flags.any() or b_flags.any():
        product = a @ b
    else:
        scaled = _product([h.float() for h in a_halves], [h.float() for h in b_halves])
        exponent = scale_exponent(a_sample, a_maxima) + scale_exponent(b_sample, b_maxima)
        product = torch.ldexp(scaled.double(), scaled.new_tensor(-exponent).double()).float()
    return (product if residual is None else product + residual).contiguous()


def _product(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(a) == 1:
        return a[0] @ b[0]
    total = (a[0] @ b[1] + a[1] @ b[0]) / PART_SCALE
    for x, y in zip(a[0].split(PARTIAL_SUM, 1), b[0].split(PARTIAL_SUM), strict=True):
        total = total + x @ y
    return total


@triton.jit
def _is_flagged(flags_ptr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    index = tl.arange(0, PADDED)
    return tl.max(tl.load(flags_ptr + index, index < COUNT, 0), 0)


@triton.jit
def _source_of(
    ptr,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """What :func:`_tile_of` loads from: ``operand`` of the matrix as it is stored."""
    if TRANSPOSED:
        return operand(ptr, columns, rows, stride, COLUMNS, ROWS, DESCRIBED)
    else:
        return operand(ptr, rows, columns, stride, ROWS, COLUMNS, DESCRIBED)


@triton.jit
def _tile_of(
    source,
    row,
    column,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """As ``block``, of a matrix that is stored transposed if TRANSPOSED."""
    if TRANSPOSED:
        stored = block(source, column, row, columns, rows, stride, COLUMNS, ROWS, DESCRIBED)
        return tl.trans(stored)
    else:
        return block(source, row, column, rows, columns, stride, ROWS, COLUMNS, DESCRIBED)


@triton.jit
def _exact_product(
    a_ptr,
    b_ptr,
    row,
    column,
    begin,
    end,
    rows,
    columns,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """a[row:, begin:end] @ b[begin:end, column:] in float32, by partial sums."""
    r = (row + tl.arange(0, SIZE))[:, None].to(tl.int64)
    c = (column + tl.arange(0, SIZE))[None, :].to(tl.int64)
    k = tl.arange(0, DEPTH).to(tl.int64)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for start in tl.range(begin, end, PARTIAL):
        acc = tl.zeros([SIZE, SIZE], tl.float32)
        for first in tl.range(start, tl.minimum(start + PARTIAL, end), DEPTH):
            down, across = (first + k)[:, None], (first + k)[None, :]
            x_mask, y_mask = (r < rows) & (across < end), (down < end) & (c < columns)
            x = tl.load(a_ptr + r * a_row_stride + across * a_column_stride, x_mask, 0.0)
            y = tl.load(b_ptr + down * b_row_stride + c * b_column_stride, y_mask, 0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
        total += acc
    return total


@triton.jit
def _store(
    out_ptr,
    residual_ptr,
    partial_ptr,
    residual_stride,
    acc,
    is_split,
    slot,
    row,
    column,
    down,
    across,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Writes a piece of a tile, ``down`` and ``across`` in the tile at ``row`` and ``column``."""
    if is_split:
        r = (down + tl.arange(0, acc.shape[0]))[:, None]
        c = (across + tl.arange(0, acc.shape[1]))[None, :]
        tl.store(partial_ptr + slot.to(tl.int64) * ROWS * COLUMNS + r * COLUMNS + c, acc)
    else:
        store_sum(
            out_ptr, residual_ptr, residual_stride, acc, row + down, column + across, rows,
            WIDTH, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _fp16_matmul_kernel(
    a_ptr,
    b_ptr,
    a1_ptr,
    a2_ptr,
    b1_ptr,
    b2_ptr,
    a_sample_ptr,
    b_sample_ptr,
    a_maxima_ptr,
    b_maxima_ptr,
    a_flags_ptr,
    b_flags_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    rows,
    depth,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    a_parts_stride,
    b_parts_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    PARTIAL: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    steps = tl.cdiv(depth, DEPTH)
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(WIDTH, COLUMNS)
    full, rest, splits = rounds(tiles_down * tiles_across, PROGRAMS, steps, True)
    a_flag = _is_flagged(a_flags_ptr, COUNT, PADDED)
    if tl.maximum(a_flag, _is_flagged(b_flags_ptr, COUNT, PADDED)) > 0:
        for unit in tl.range(tl.program_id(0), full + rest * splits, PROGRAMS):
            tile, begin, end = share(unit, full, rest, splits, steps)
            tile_down, tile_across = place(tile, tiles_down, tiles_across, GROUP)
            row, column = tile_down * ROWS, tile_across * COLUMNS
            is_split = (unit >= full) & (splits > 1)
            for down in tl.range(0, ROWS, EXACT):
                for across in tl.range(0, COLUMNS, EXACT):
                    acc = _exact_product(
                        a_ptr, b_ptr, row + down, column + across,
                        begin * DEPTH, tl.minimum(end * DEPTH, depth), rows, WIDTH,
                        a_row_stride, a_column_stride, b_row_stride, b_column_stride,
                        EXACT, 16, PARTIAL,
                    )  # fmt: skip
                    _store(
                        out_ptr, residual_ptr, partial_ptr, residual_stride, acc, is_split,
                        unit - full, row, column, down, across, rows,
                        WIDTH, ROWS, COLUMNS, HAS_RESIDUAL,
                    )  # fmt: skip
    else:
        exponent = -exponent_of_scale(a_sample_ptr, a_maxima_ptr, COUNT, PADDED)
        exponent -= exponent_of_scale(b_sample_ptr, b_maxima_ptr, COUNT, PADDED)
        a1 = _source_of(a1_ptr, rows, depth, a_parts_stride, ROWS, DEPTH, DESCRIBED, A_TRANSPOSED)
        b1 = _source_of(
            b1_ptr, depth, WIDTH, b_parts_stride, DEPTH, COLUMNS, DESCRIBED, B_TRANSPOSED
        )
        if PARTS > 1:
            a2 = _source_of(
                a2_ptr, rows, depth, a_parts_stride, ROWS, DEPTH, DESCRIBED, A_TRANSPOSED
            )
            b2 = _source_of(
                b2_ptr, depth, WIDTH, b_parts_stride, DEPTH, COLUMNS, DESCRIBED, B_TRANSPOSED
            )

        for unit in tl.range(tl.program_id(0), full + rest * splits, PROGRAMS):
            tile, begin, end = share(unit, full, rest, splits, steps)
            tile_down, tile_across = place(tile, tiles_down, tiles_across, GROUP)
            row, column = tile_down * ROWS, tile_across * COLUMNS
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for step in tl.range(begin, end):
                k = step * DEPTH
                x = _tile_of(
                    a1, row, k, rows, depth, a_parts_stride, ROWS, DEPTH, DESCRIBED, A_TRANSPOSED
                )
                y = _tile_of(
                    b1, k, column, depth, WIDTH, b_parts_stride,
                    DEPTH, COLUMNS, DESCRIBED, B_TRANSPOSED,
                )  # fmt: skip
                if PARTS == 1:
                    acc = tl.dot(x, y, acc)
                else:
                    x_rest = _tile_of(
                        a2, row, k, rows, depth, a_parts_stride,
                        ROWS, DEPTH, DESCRIBED, A_TRANSPOSED,
                    )  # fmt: skip
                    y_rest = _tile_of(
                        b2, k, column, depth, WIDTH, b_parts_stride,
                        DEPTH, COLUMNS, DESCRIBED, B_TRANSPOSED,
                    )  # fmt: skip
                    small = tl.dot(x_rest, y, tl.dot(x, y_rest))
                    # A sum of three: Triton makes acc + dot(x, y) one dot that adds to acc, on the
                    # tensor core.
                    acc += tl.dot(x, y) + small * 0.00048828125  # 2^-11
            pieces = subtiles(times_power_of_2(acc, exponent), SUBTILES)
            for i in tl.static_range(SUBTILES):
                _store(
                    out_ptr, residual_ptr, partial_ptr, residual_stride, pieces[i],
                    (unit >= full) & (splits > 1), unit - full, row, column,
                    0, i * (COLUMNS // SUBTILES), rows, WIDTH, ROWS, COLUMNS, HAS_RESIDUAL,
                )  # fmt: skip


def fp16_matmul_fused(
    a: torch.Tensor,
    b: torch.Tensor,
    a_parts: Sequence[torch.Tensor],
    b_parts: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    tile: MatmulTile,
) -> torch.Tensor:
    """Launches the kernel and the one that joins split tiles."""
    *a_halves, a_sample, a_maxima, a_flags = a_parts
    *b_halves, b_sample, b_maxima, b_flags = b_parts
    if not 0 < len(a_halves) == len(b_halves) <= 2:
        raise UnsupportedError(
            f"fp16_matmul: expected 1 or 2 parts each, got {len(a_halves)} and {len(b_halves)}"
        )
    a_stored, b_stored = [_stored(h) for h in a_halves], [_stored(h) for h in b_halves]
    a_halves, b_halves = [h for h, _ in a_stored], [h for h, _ in b_stored]
    residual = None if residual is None else unit_stride(residual)
    (rows, depth), width = a.shape, b.shape[1]
    out = a.new_empty((rows, width))
    partial = workspace(out, tile._replace(split=True))
    assert partial is not None
    count = a_maxima.shape[0]
    launch(_fp16_matmul_kernel, (tile.programs(out.device),))(
        a,
        b,
        a_halves[0],
        a_halves[-1],  # the first again, if it is alone
        b_halves[0],
        b_halves[-1],
        a_sample,
        b_sample,
        a_maxima,
        b_maxima,
        a_flags,
        b_flags,
        out if residual is None else residual,
        out,
        partial,
        rows,
        depth,
        *a.stride(),
        *b.stride(),
        a_halves[0].stride(0),
        b_halves[0].stride(0),
        row_stride(residual),
        WIDTH=width,
        PARTS=len(a_halves),
        A_TRANSPOSED=a_stored[0][1],
        B_TRANSPOSED=b_stored[0][1],
        COUNT=count,
        PADDED=next_power_of_2(count),
        PARTIAL=PARTIAL_SUM,
        EXACT=min(_EXACT, tile.rows, tile.columns),
        HAS_RESIDUAL=residual is not None,
        DESCRIBED=describable(*a_halves, *b_halves),
        **tile.options(out.device),
    )
    join(partial, out, residual, -(-depth // tile.depth), tile)
    return out


def _stored(part: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``part`` as it lies in memory, by rows, and whether that is transposed."""
    if part.stride(1) != 1 and part.stride(0) == 1:
        return part.t(), True
    return unit_stride(part), False


def fp16_matmul_launch(a, b, a_parts, b_parts, residual) -> torch.Tensor:
    """The kernel, in the tile for this number of parts."""
    return fp16_matmul_fused(a, b, a_parts, b_parts, residual, TILES[len(a_parts) - 3])


def _fake(a, b, a_parts, b_parts, residual):
    (rows, depth), width = a.shape, b.shape[1]
    check_shapes((depth, width), b=b)
    for i, part in enumerate(a_parts[:-3]):
        check_shapes((rows, depth), **{f"a_parts[{i}]": part})
    for i, part in enumerate(b_parts[:-3]):
        check_shapes((depth, width), **{f"b_parts[{i}]": part})
    check_shapes((rows, width), residual=residual)
    return a.new_empty((rows, width))


fp16_matmul = define_op(
    "fp16_matmul(Tensor a, Tensor b, Tensor[] a_parts, Tensor[] b_parts, Tensor? residual)"
    " -> Tensor",
    reference=fp16_matmul_reference,
    launcher=fp16_matmul_launch,
    fake=_fake,
)
