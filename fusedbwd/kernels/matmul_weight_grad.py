"""Weight gradient, a.T @ b: summed over tokens, tiles split where they are too few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._matmul import (
    MatmulTile,
    block,
    describable,
    join,
    mm,
    operand,
    place,
    rounds,
    share,
    store_partial,
    store_sum,
    subtiles,
    takes,
    workspace,
)
from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._tiles import accumulation_dtype, unit_stride

TILE = MatmulTile(128, 256, 64, stages=3, warps=8, subtiles=4, split=True)


def weight_grad_reference(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``a.T @ b``, accumulated in float32 (float64 if an operand is).

    For y = x @ W.T, dW is this product of a = dy and b = x.

    Args:
        a: [T, M], e.g. a slice of a packed buffer; any float dtype.
        b: [T, N] of the same dtype.
        out_dtype: dtype of the result.

    Returns:
        [M, N], rounded once.
    """
    wide = accumulation_dtype(a, b)
    return (a.to(wide).t() @ b.to(wide)).to(out_dtype).contiguous()


def weight_grad_unfused(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The same by cuBLAS."""
    return mm(a.t(), b, out_dtype)


@triton.jit
def _weight_grad_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    partial_ptr,
    tokens,
    a_stride,
    b_stride,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    a = operand(a_ptr, tokens, HEIGHT, a_stride, DEPTH, ROWS, DESCRIBED)
    b = operand(b_ptr, tokens, WIDTH, b_stride, DEPTH, COLUMNS, DESCRIBED)
    steps = tl.cdiv(tokens, DEPTH)
    tiles_down, tiles_across = tl.cdiv(HEIGHT, ROWS), tl.cdiv(WIDTH, COLUMNS)
    full, rest, splits = rounds(tiles_down * tiles_across, PROGRAMS, steps, SPLIT)
    for unit in tl.range(tl.program_id(0), full + rest * splits, PROGRAMS):
        tile, begin, end = share(unit, full, rest, splits, steps)
        down, across = place(tile, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS

        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in tl.range(begin, end):
            k = step * DEPTH
            x = block(a, k, row, tokens, HEIGHT, a_stride, DEPTH, ROWS, DESCRIBED)
            y = block(b, k, column, tokens, WIDTH, b_stride, DEPTH, COLUMNS, DESCRIBED)
            acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")

        if (unit >= full) & (splits > 1):
            store_partial(partial_ptr, unit - full, acc, ROWS, COLUMNS, SUBTILES)
        else:
            pieces = subtiles(acc, SUBTILES)
            for i in tl.static_range(SUBTILES):
                store_sum(
                    out_ptr, out_ptr, 0, pieces[i], row,
                    column + i * (COLUMNS // SUBTILES), HEIGHT, WIDTH, False,
                )  # fmt: skip


def weight_grad_fused(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, tile: MatmulTile = TILE
) -> torch.Tensor:
    """Launches the kernel and, if tiles may be split, the one that joins them."""
    a, b = unit_stride(a), unit_stride(b)
    tokens, height = a.shape
    width = b.shape[1]
    out = a.new_empty((height, width), dtype=out_dtype)
    partial = workspace(out, tile)
    launch(_weight_grad_kernel, (tile.programs(out.device),))(
        a,
        b,
        out,
        out if partial is None else partial,
        tokens,
        a.stride(0),
        b.stride(0),
        HEIGHT=height,
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        SUBTILES=tile.subtiles,
        PROGRAMS=tile.programs(out.device),
        SPLIT=tile.split,
        DESCRIBED=describable(a, b),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if partial is not None:
        join(partial, out, None, (tokens + tile.depth - 1) // tile.depth, tile)
    return out


def weight_grad_launch(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The kernel for 16-bit operands, cuBLAS for others."""
    route = weight_grad_fused if takes(a.dtype) else weight_grad_unfused
    return route(a, b, out_dtype)


weight_grad = define_op(
    "weight_grad(Tensor a, Tensor b, ScalarType out_dtype) -> Tensor",
    reference=weight_grad_reference,
    launcher=weight_grad_launch,
    fake=lambda a, b, out_dtype: a.new_empty((a.shape[1], b.shape[1]), dtype=out_dtype),
)
