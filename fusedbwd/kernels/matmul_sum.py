"""A sum of matmuls, a_0 @ b_0 + a_1 @ b_1 + ..., and a residual: the input gradient of
projections that share their input. One kernel walks the summed dimension of every pair."""

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
    mm,
    multiply,
    operand,
    place,
    rounds,
    share,
    store_partial,
    store_piece,
    subtiles,
    workspace,
)
from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._routes import Shape, tile_for
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes, row_stride, unit_stride
from fusedbwd.numerics import dtype_name

MAX_PAIRS = 3


def sum_matmul_reference(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``sum(a_i @ b_i) + residual``, accumulated in float32 (float64 if an operand is).

    For y_i = x @ W_i.T with W_i [K_i, N], dx is this sum over a_i = dy_i and b_i = W_i.

    Args:
        a: one to three matrices [T, K_i], e.g. slices of one packed buffer; one float dtype.
        b: as many matrices [K_i, N] of that dtype.
        residual: [T, N] of any float dtype, a gradient to add, or None.
        out_dtype: dtype of the result.

    Returns:
        [T, N], rounded once.
    """
    wide = accumulation_dtype(*a, *b)
    total = residual
    for x, y in zip(a, b, strict=True):
        product = x.to(wide) @ y.to(wide)
        total = product if total is None else total + product
    assert total is not None  # there is a pair
    return total.to(out_dtype).contiguous()


def sum_matmul_unfused(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The same by cuBLAS, one matmul a pair, each adding to and rounding what came before."""
    pairs = list(zip(a, b, strict=True))
    if out_dtype != a[0].dtype:
        total = mm(*pairs[0], out_dtype)
        for x, y in pairs[1:]:
            total = total + mm(x, y, out_dtype)
        return total if residual is None else (total + residual).to(out_dtype)
    if residual is not None and residual.dtype == out_dtype:
        total = residual
    else:
        total, pairs = torch.mm(*pairs[0]), pairs[1:]
    for x, y in pairs:
        total = torch.addmm(total, x, y)
    if residual is not None and residual.dtype != out_dtype:
        total = (total + residual).to(out_dtype)
    return total


@triton.jit
def _store_tile(
    out_ptr,
    residuals,
    residual_stride,
    early,
    acc,
    row,
    column,
    tokens,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBTILES: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Writes a whole tile, SUBTILES pieces one after the other; ``early``: the residual's first
    EARLY pieces."""
    PIECE: tl.constexpr = COLUMNS // SUBTILES
    pieces = subtiles(acc, SUBTILES)
    residual = early
    for i in tl.static_range(SUBTILES):
        piece = pieces[i]
        if HAS_RESIDUAL:
            if i + EARLY < SUBTILES:
                left = column + (i + EARLY) * PIECE
                residual += (
                    block(
                        residuals, row, left, tokens, WIDTH, residual_stride, acc.shape[0], PIECE,
                        STAGED, ONCE=True,
                    ),
                )  # fmt: skip
            piece += residual[i].to(tl.float32)
        rounded = piece.to(out_ptr.dtype.element_ty)
        store_piece(out_ptr, rounded, row, column + i * PIECE, tokens, WIDTH, WIDTH, False)


@triton.jit
def _sum_matmul_kernel(
    a0_ptr,
    a1_ptr,
    a2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    tokens,
    a0_stride,
    a1_stride,
    a2_stride,
    b0_stride,
    b1_stride,
    b2_stride,
    residual_stride,
    DEPTH0: tl.constexpr,
    DEPTH1: tl.constexpr,
    DEPTH2: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    EARLY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DESCRIBED: tl.constexpr,
    STAGED: tl.constexpr,
):
    # Steps are numbered through the pairs; DEPTH1 and DEPTH2 are 0 where there is no such pair.
    STEPS0: tl.constexpr = (DEPTH0 + DEPTH - 1) // DEPTH
    STEPS1: tl.constexpr = (DEPTH1 + DEPTH - 1) // DEPTH
    STEPS2: tl.constexpr = (DEPTH2 + DEPTH - 1) // DEPTH
    STEPS: tl.constexpr = STEPS0 + STEPS1 + STEPS2
    a0 = operand(a0_ptr, tokens, DEPTH0, a0_stride, ROWS, DEPTH, DESCRIBED)
    b0 = operand(b0_ptr, DEPTH0, WIDTH, b0_stride, DEPTH, COLUMNS, DESCRIBED)
    if DEPTH1:
        a1 = operand(a1_ptr, tokens, DEPTH1, a1_stride, ROWS, DEPTH, DESCRIBED)
        b1 = operand(b1_ptr, DEPTH1, WIDTH, b1_stride, DEPTH, COLUMNS, DESCRIBED)
    if DEPTH2:
        a2 = operand(a2_ptr, tokens, DEPTH2, a2_stride, ROWS, DEPTH, DESCRIBED)
        b2 = operand(b2_ptr, DEPTH2, WIDTH, b2_stride, DEPTH, COLUMNS, DESCRIBED)

    PIECE: tl.constexpr = COLUMNS // SUBTILES
    residuals = operand(residual_ptr, tokens, WIDTH, residual_stride, ROWS, PIECE, STAGED)

    tiles_down, tiles_across = tl.cdiv(tokens, ROWS), tl.cdiv(WIDTH, COLUMNS)
    full, rest, splits = rounds(tiles_down * tiles_across, PROGRAMS, STEPS, SPLIT)
    for unit in tl.range(tl.program_id(0), full + rest * splits, PROGRAMS):
        tile, begin, end = share(unit, full, rest, splits, STEPS)
        down, across = place(tile, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS

        early: tl.tuple = ()
        for i in tl.static_range(EARLY):
            left = column + i * PIECE
            early += (
                block(
                    residuals, row, left, tokens, WIDTH, residual_stride, ROWS, PIECE, STAGED,
                    ONCE=True,
                ),
            )  # fmt: skip
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc = multiply(
            acc, a0, b0, row, column, tokens, DEPTH0, WIDTH, a0_stride, b0_stride,
            begin, tl.minimum(end, STEPS0), ROWS, COLUMNS, DEPTH, DESCRIBED,
        )  # fmt: skip
        if DEPTH1:
            acc = multiply(
                acc, a1, b1, row, column, tokens, DEPTH1, WIDTH, a1_stride, b1_stride,
                tl.maximum(begin - STEPS0, 0), tl.minimum(end - STEPS0, STEPS1),
                ROWS, COLUMNS, DEPTH, DESCRIBED,
            )  # fmt: skip
        if DEPTH2:
            acc = multiply(
                acc, a2, b2, row, column, tokens, DEPTH2, WIDTH, a2_stride, b2_stride,
                tl.maximum(begin - STEPS0 - STEPS1, 0), end - STEPS0 - STEPS1,
                ROWS, COLUMNS, DEPTH, DESCRIBED,
            )  # fmt: skip

        # SPLIT decides first: without it the partial pointer is a stand-in, and a store to it,
        # even one that never runs, would make the compiler take it for a result.
        if SPLIT:
            if (unit >= full) & (splits > 1):
                store_partial(partial_ptr, unit - full, acc, ROWS, COLUMNS, SUBTILES)
            else:
                _store_tile(
                    out_ptr, residuals, residual_stride, early, acc, row, column, tokens,
                    WIDTH, COLUMNS, SUBTILES, EARLY, HAS_RESIDUAL, STAGED,
                )  # fmt: skip
        else:
            _store_tile(
                out_ptr, residuals, residual_stride, early, acc, row, column, tokens,
                WIDTH, COLUMNS, SUBTILES, EARLY, HAS_RESIDUAL, STAGED,
            )  # fmt: skip


def sum_matmul_fused(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: MatmulTile,
) -> torch.Tensor:
    """Launches the kernel and, if tiles may be split, the one that joins them."""
    if not 0 < len(a) == len(b) <= MAX_PAIRS:
        raise UnsupportedError(
            f"sum_matmul: expected 1 to {MAX_PAIRS} pairs, got {len(a)} a and {len(b)} b"
        )
    a, b = [unit_stride(x) for x in a], [unit_stride(y) for y in b]
    residual = None if residual is None else unit_stride(residual)
    tokens, width = a[0].shape[0], b[0].shape[1]
    depths = [y.shape[0] for y in b]
    out = a[0].new_empty((tokens, width), dtype=out_dtype)
    partial = workspace(out, tile)
    # An absent operand's pointer is never followed: any tensor stands in for it.
    absent = MAX_PAIRS - len(a)
    launch(_sum_matmul_kernel, (tile.programs(out.device),))(
        *a,
        *a[:1] * absent,
        *b,
        *b[:1] * absent,
        out if residual is None else residual,
        out,
        out if partial is None else partial,
        tokens,
        *(x.stride(0) for x in a),
        *[0] * absent,
        *(y.stride(0) for y in b),
        *[0] * absent,
        row_stride(residual),
        **dict(zip(("DEPTH0", "DEPTH1", "DEPTH2"), [*depths, 0, 0], strict=False)),
        WIDTH=width,
        SPLIT=tile.split,
        EARLY=0 if tile.split or residual is None else tile.early,
        HAS_RESIDUAL=residual is not None,
        DESCRIBED=describable(*a, *b),
        STAGED=tile.staged and residual is not None and describable(residual),
        **tile.options(out.device),
    )
    if partial is not None:
        join(partial, out, residual, sum(-(-depth // tile.depth) for depth in depths), tile)
    return out


def sum_matmul_shape(a, b, residual, out_dtype) -> Shape:
    """What the choice of a route depends on, beside the number of tokens."""
    depth, width = sum(y.shape[0] for y in b), b[0].shape[1]
    return Shape("sum_matmul", depth, width, len(a), residual is not None, dtype_name(out_dtype))


def sum_matmul_launch(a, b, residual, out_dtype) -> torch.Tensor:
    """The kernel where it was measured to be faster, else cuBLAS."""
    epilogue = [] if residual is None else [residual]
    tile = tile_for(sum_matmul_shape(a, b, residual, out_dtype), *a, *b, epilogue=epilogue)
    if tile is None:
        return sum_matmul_unfused(a, b, residual, out_dtype)
    return sum_matmul_fused(a, b, residual, out_dtype, tile)


def _fake(a, b, residual, out_dtype):
    tokens, width = a[0].shape[0], b[0].shape[1]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        check_shapes((tokens, y.shape[0]), **{f"a[{i}]": x})
        check_shapes((y.shape[0], width), **{f"b[{i}]": y})
    check_shapes((tokens, width), residual=residual)
    return a[0].new_empty((tokens, width), dtype=out_dtype)


sum_matmul = define_op(
    "sum_matmul(Tensor[] a, Tensor[] b, Tensor? residual, ScalarType out_dtype) -> Tensor",
    reference=sum_matmul_reference,
    launcher=sum_matmul_launch,
    fake=_fake,
)
