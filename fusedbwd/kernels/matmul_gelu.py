"""GELU backward in the epilogue of the matmul that makes its incoming gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._matmul import (
    MatmulTile,
    block,
    describable,
    mm,
    multiply,
    operand,
    place,
    store_piece,
    subtiles,
)
from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._partials import sum_partials
from fusedbwd.kernels._routes import Shape, tile_for
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes, unit_stride
from fusedbwd.kernels.gelu import gelu_backward_launch, gelu_backward_reference, gelu_slope
from fusedbwd.numerics import dtype_name


def matmul_gelu_backward_reference(
    grad: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of a bias added to get x, under ``y = gelu(x) @ weight.T``.

    The gradient of gelu(x) is grad @ weight, accumulated in float32 and not rounded; the rest
    is :func:`gelu_backward_reference`.

    Args:
        grad: [T, H], gradient of y; any float dtype.
        weight: [H, I] of the same dtype.
        x: [T, I], GELU's input; any float dtype.
        approximate: "tanh" or "none", as in torch.nn.functional.gelu.

    Returns:
        dx [T, I] in grad's dtype, that of the matmuls it goes on to; dbias [I], its column sums
        before rounding, in float32 (float64 for float64 inputs).
    """
    wide = accumulation_dtype(grad, weight, x)
    product = grad.to(wide) @ weight.to(wide)
    dx, dbias = gelu_backward_reference(product, x.to(wide), approximate)
    return dx.to(grad.dtype), dbias


def matmul_gelu_backward_unfused(
    grad: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by cuBLAS, which rounds the gradient of gelu(x) unless x is float32, and the GELU
    kernel."""
    product = mm(grad, weight, torch.float32 if x.dtype == torch.float32 else grad.dtype)
    return gelu_backward_launch(product, x, approximate, grad.dtype)


@triton.jit
def _matmul_gelu_kernel(
    grad_ptr,
    weight_ptr,
    x_ptr,
    dx_ptr,
    partial_ptr,
    tokens,
    grad_stride,
    weight_stride,
    x_stride,
    TANH: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    EARLY: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    STAGED: tl.constexpr,
):
    PIECE: tl.constexpr = COLUMNS // SUBTILES
    a = operand(grad_ptr, tokens, HIDDEN, grad_stride, ROWS, DEPTH, DESCRIBED)
    b = operand(weight_ptr, HIDDEN, WIDTH, weight_stride, DEPTH, COLUMNS, DESCRIBED)
    x_source = operand(x_ptr, tokens, WIDTH, x_stride, ROWS, PIECE, STAGED)
    dx_target = operand(dx_ptr, tokens, WIDTH, WIDTH, ROWS, PIECE, STAGED)
    tiles_down, tiles_across = tl.cdiv(tokens, ROWS), tl.cdiv(WIDTH, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS):
        down, across = place(tile, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS
        x: tl.tuple = ()
        for i in tl.static_range(EARLY):
            left = column + i * PIECE
            x += (
                block(
                    x_source, row, left, tokens, WIDTH, x_stride, ROWS, PIECE, STAGED, ONCE=True,
                ),
            )  # fmt: skip
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc = multiply(
            acc, a, b, row, column, tokens, HIDDEN, WIDTH, grad_stride, weight_stride,
            0, tl.cdiv(HIDDEN, DEPTH), ROWS, COLUMNS, DEPTH, DESCRIBED,
        )  # fmt: skip
        pieces = subtiles(acc, SUBTILES)
        inside = (row + tl.arange(0, ROWS))[:, None] < tokens
        for i in tl.static_range(SUBTILES):
            if i + EARLY < SUBTILES:
                left = column + (i + EARLY) * PIECE
                x += (
                    block(
                        x_source, row, left, tokens, WIDTH, x_stride, ROWS, PIECE, STAGED,
                        ONCE=True,
                    ),
                )  # fmt: skip
            left = column + i * PIECE
            dx = pieces[i] * gelu_slope(x[i].to(tl.float32), TANH)
            rounded = dx.to(dx_ptr.dtype.element_ty)
            store_piece(dx_target, rounded, row, left, tokens, WIDTH, WIDTH, STAGED)
            # Past the last row dx is 0 times a weight: not a number if that is infinite.
            sums = tl.sum(tl.where(inside, dx, 0.0), 0, keep_dims=True)
            c = (left + tl.arange(0, PIECE))[None, :]
            tl.store(partial_ptr + down.to(tl.int64) * WIDTH + c, sums, c < WIDTH)


def matmul_gelu_backward_fused(
    grad: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    approximate: str,
    tile: MatmulTile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel, then adds up the row blocks' shares of dbias in a fixed order."""
    grad, weight, x = unit_stride(grad), unit_stride(weight), unit_stride(x)
    tokens, width = x.shape
    dx = x.new_empty((tokens, width), dtype=grad.dtype)
    blocks = (tokens + tile.rows - 1) // tile.rows
    partial = x.new_empty((blocks, 1, width), dtype=torch.float32)
    launch(_matmul_gelu_kernel, (tile.programs(x.device),))(
        grad,
        weight,
        x,
        dx,
        partial,
        tokens,
        grad.stride(0),
        weight.stride(0),
        x.stride(0),
        TANH=approximate == "tanh",
        HIDDEN=grad.shape[1],
        WIDTH=width,
        EARLY=tile.early,
        DESCRIBED=describable(grad, weight),
        STAGED=tile.staged and describable(x, dx),
        **tile.options(x.device),
    )
    return dx, sum_partials(partial)[0]


def matmul_gelu_backward_shape(grad, weight, x, approximate) -> Shape:
    """What the choice of a route depends on, beside the number of tokens."""
    return Shape(
        "matmul_gelu_backward", weight.shape[0], weight.shape[1], 1, False, dtype_name(x.dtype)
    )


def matmul_gelu_backward_launch(grad, weight, x, approximate) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel where it was measured to be faster, else cuBLAS and the GELU kernel."""
    shape = matmul_gelu_backward_shape(grad, weight, x, approximate)
    tile = tile_for(shape, grad, weight, epilogue=[x])
    if tile is None:
        return matmul_gelu_backward_unfused(grad, weight, x, approximate)
    return matmul_gelu_backward_fused(grad, weight, x, approximate, tile)


def _fake(grad, weight, x, approximate):
    hidden, (tokens, width) = weight.shape[0], x.shape
    check_shapes((tokens, hidden), grad=grad)
    check_shapes((hidden, width), weight=weight)
    dbias = x.new_empty((x.shape[1],), dtype=accumulation_dtype(grad, weight, x))
    return x.new_empty(x.shape, dtype=grad.dtype), dbias


matmul_gelu_backward = define_op(
    "matmul_gelu_backward(Tensor grad, Tensor weight, Tensor x, str approximate)"
    " -> (Tensor, Tensor)",
    reference=matmul_gelu_backward_reference,
    launcher=matmul_gelu_backward_launch,
    fake=_fake,
)
