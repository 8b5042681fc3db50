"""SwiGLU backward in the epilogue of the matmul that makes its incoming gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._matmul import (
    MatmulTile,
    block,
    describable,
    multiply,
    operand,
    place,
    store_piece,
    subtiles,
)
from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._routes import Shape, tile_for
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes, unit_stride
from fusedbwd.kernels.swiglu import (
    swiglu_backward_launch,
    swiglu_backward_reference,
    swiglu_gradients,
)
from fusedbwd.numerics import dtype_name


def matmul_swiglu_backward_reference(
    grad: torch.Tensor, weight: torch.Tensor, act: torch.Tensor, linear: torch.Tensor
) -> torch.Tensor:
    """Gradients of ``linear * silu(act)`` under ``y = (linear * silu(act)) @ weight.T``.

    The gradient of the product is grad @ weight, accumulated in float32 and not rounded; the
    rest is :func:`swiglu_backward_reference`.

    Args:
        grad: [T, H], gradient of y; any float dtype.
        weight: [H, I] of the same dtype.
        act, linear: [T, I], the factor that goes through SiLU, and the other one.

    Returns:
        [T, 2 * I] in act's dtype: columns [0, I) are d_act, [I, 2 * I) are d_linear.
    """
    wide = accumulation_dtype(grad, weight, act, linear)
    return swiglu_backward_reference(grad.to(wide) @ weight.to(wide), act, linear)


def matmul_swiglu_backward_unfused(
    grad: torch.Tensor, weight: torch.Tensor, act: torch.Tensor, linear: torch.Tensor
) -> torch.Tensor:
    """The same by cuBLAS, which rounds the product's gradient, and the SwiGLU kernel."""
    return swiglu_backward_launch(torch.mm(grad, weight), act, linear)


@triton.jit
def _matmul_swiglu_kernel(
    grad_ptr,
    weight_ptr,
    act_ptr,
    linear_ptr,
    packed_ptr,
    tokens,
    grad_stride,
    weight_stride,
    act_stride,
    linear_stride,
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
    acts = operand(act_ptr, tokens, WIDTH, act_stride, ROWS, PIECE, STAGED)
    linears = operand(linear_ptr, tokens, WIDTH, linear_stride, ROWS, PIECE, STAGED)
    d_acts = operand(packed_ptr, tokens, WIDTH, 2 * WIDTH, ROWS, PIECE, STAGED)
    d_linears = operand(packed_ptr + WIDTH, tokens, WIDTH, 2 * WIDTH, ROWS, PIECE, STAGED)
    tiles_down, tiles_across = tl.cdiv(tokens, ROWS), tl.cdiv(WIDTH, COLUMNS)
    dtype = packed_ptr.dtype.element_ty
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS):
        down, across = place(tile, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS
        act: tl.tuple = ()
        linear: tl.tuple = ()
        for i in tl.static_range(EARLY):
            left = column + i * PIECE
            act += (
                block(
                    acts, row, left, tokens, WIDTH, act_stride, ROWS, PIECE, STAGED, ONCE=True,
                ),
            )  # fmt: skip
            linear += (
                block(
                    linears, row, left, tokens, WIDTH, linear_stride, ROWS, PIECE, STAGED,
                    ONCE=True,
                ),
            )  # fmt: skip
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc = multiply(
            acc, a, b, row, column, tokens, HIDDEN, WIDTH, grad_stride, weight_stride,
            0, tl.cdiv(HIDDEN, DEPTH), ROWS, COLUMNS, DEPTH, DESCRIBED,
        )  # fmt: skip
        pieces = subtiles(acc, SUBTILES)
        for i in tl.static_range(SUBTILES):
            if i + EARLY < SUBTILES:
                left = column + (i + EARLY) * PIECE
                act += (
                    block(
                        acts, row, left, tokens, WIDTH, act_stride, ROWS, PIECE, STAGED, ONCE=True,
                    ),
                )  # fmt: skip
                linear += (
                    block(
                        linears, row, left, tokens, WIDTH, linear_stride, ROWS, PIECE, STAGED,
                        ONCE=True,
                    ),
                )  # fmt: skip
            left = column + i * PIECE
            d_act, d_linear = swiglu_gradients(pieces[i], act[i], linear[i])
            store_piece(d_acts, d_act.to(dtype), row, left, tokens, WIDTH, 2 * WIDTH, STAGED)
            store_piece(d_linears, d_linear.to(dtype), row, left, tokens, WIDTH, 2 * WIDTH, STAGED)


def matmul_swiglu_backward_fused(
    grad: torch.Tensor,
    weight: torch.Tensor,
    act: torch.Tensor,
    linear: torch.Tensor,
    tile: MatmulTile,
) -> torch.Tensor:
    """Launches the kernel."""
    grad, weight = unit_stride(grad), unit_stride(weight)
    act, linear = unit_stride(act), unit_stride(linear)
    tokens, width = act.shape
    packed = act.new_empty((tokens, 2 * width))
    launch(_matmul_swiglu_kernel, (tile.programs(act.device),))(
        grad,
        weight,
        act,
        linear,
        packed,
        tokens,
        grad.stride(0),
        weight.stride(0),
        act.stride(0),
        linear.stride(0),
        HIDDEN=grad.shape[1],
        WIDTH=width,
        EARLY=tile.early,
        DESCRIBED=describable(grad, weight),
        STAGED=tile.staged and describable(act, linear, packed[:, width:]),
        **tile.options(act.device),
    )
    return packed


def matmul_swiglu_backward_shape(grad, weight, act, linear) -> Shape:
    """What the choice of a route depends on, beside the number of tokens."""
    return Shape(
        "matmul_swiglu_backward", weight.shape[0], weight.shape[1], 1, False, dtype_name(act.dtype)
    )


def matmul_swiglu_backward_launch(grad, weight, act, linear) -> torch.Tensor:
    """The kernel where it was measured to be faster, else cuBLAS and the SwiGLU kernel."""
    shape = matmul_swiglu_backward_shape(grad, weight, act, linear)
    tile = tile_for(shape, grad, weight, epilogue=[act, linear])
    if tile is None:
        return matmul_swiglu_backward_unfused(grad, weight, act, linear)
    return matmul_swiglu_backward_fused(grad, weight, act, linear, tile)


def _fake(grad, weight, act, linear):
    hidden, (tokens, width) = weight.shape[0], act.shape
    check_shapes((tokens, hidden), grad=grad)
    check_shapes((hidden, width), weight=weight)
    check_shapes((tokens, width), linear=linear)
    return act.new_empty((tokens, 2 * width))


matmul_swiglu_backward = define_op(
    "matmul_swiglu_backward(Tensor grad, Tensor weight, Tensor act, Tensor linear) -> Tensor",
    reference=matmul_swiglu_backward_reference,
    launcher=matmul_swiglu_backward_launch,
    fake=_fake,
)
