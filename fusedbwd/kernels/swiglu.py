"""SwiGLU backward: y = linear * silu(act), both gradients in one packed buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._op import define_op, launch, next_power_of_2
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes, unit_stride


def swiglu_backward_reference(
    grad: torch.Tensor, act: torch.Tensor, linear: torch.Tensor, linear_first: bool = False
) -> torch.Tensor:
    """Gradients of ``linear * silu(act)``, packed.

    With s = sigmoid(act): d_act = grad * linear * s * (1 + act * (1 - s)) and
    d_linear = grad * silu(act) (the product rule on silu(a) = a * sigmoid(a)). silu(act) is
    rounded to act's dtype, as the forward rounded it.

    Args:
        grad: [T, I], gradient of the product; any float dtype.
        act: [T, I], the factor that goes through SiLU.
        linear: [T, I], the other factor.
        linear_first: swaps the halves of the result.

    Returns:
        [T, 2 * I] in act's dtype: columns [0, I) are d_act, [I, 2 * I) are d_linear.
    """
    wide = accumulation_dtype(grad, act, linear)
    g, a, b = grad.to(wide), act.to(wide), linear.to(wide)
    s = torch.sigmoid(a)
    d_act = g * b * (s * (1 + a * (1 - s)))
    d_linear = g * (a * s).to(act.dtype).to(wide)
    halves = [d_linear, d_act] if linear_first else [d_act, d_linear]
    return torch.cat(halves, dim=1).to(act.dtype)


@triton.jit
def swiglu_gradients(grad, act, linear):
    """d_act and d_linear of one block, in float32; ``grad`` is in float32."""
    a = act.to(tl.float32)
    # sigmoid(a) = root * (root / total) with root = exp(-|a| / 2) for a < 0 and 1 otherwise.
    # The exponent is never positive, so nothing overflows; and multiplying by the two halves
    # in turn keeps products such as a * sigmoid(a) exact where sigmoid(a) itself is subnormal.
    half = tl.exp(-0.5 * tl.abs(a))
    total = 1 + half * half
    root = tl.where(a < 0, half, 1.0)
    complement = tl.where(a < 0, 1.0, half * half) / total  # 1 - sigmoid(a)
    silu = ((a * root) * (root / total)).to(act.dtype).to(tl.float32)
    slope = ((1 + a * complement) * root) * (root / total)
    return grad * linear.to(tl.float32) * slope, grad * silu


@triton.jit
def _swiglu_backward_kernel(
    grad_ptr,
    act_ptr,
    linear_ptr,
    packed_ptr,
    tokens,
    grad_stride,
    act_stride,
    linear_stride,
    D_ACT: tl.constexpr,
    D_LINEAR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < tokens) & (column < WIDTH)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask).to(tl.float32)
    act = tl.load(act_ptr + row * act_stride + column, mask)
    linear = tl.load(linear_ptr + row * linear_stride + column, mask)
    d_act, d_linear = swiglu_gradients(grad, act, linear)
    packed = packed_ptr + row * (2 * WIDTH) + column
    dtype = packed_ptr.dtype.element_ty
    tl.store(packed + D_ACT, d_act.to(dtype), mask)
    tl.store(packed + D_LINEAR, d_linear.to(dtype), mask)


def swiglu_backward_launch(
    grad: torch.Tensor, act: torch.Tensor, linear: torch.Tensor, linear_first: bool = False
) -> torch.Tensor:
    """Launches the kernel."""
    return launch_packed(_swiglu_backward_kernel, grad, act, linear, linear_first)


def launch_packed(
    kernel,
    grad: torch.Tensor,
    act: torch.Tensor,
    linear: torch.Tensor,
    linear_first: bool,
    **constants: bool,
) -> torch.Tensor:
    """Launches the ``kernel`` of a gated activation: one program a tile of 1024 elements, 16-byte
    loads. ``constants`` are its own."""
    grad, act, linear = unit_stride(grad), unit_stride(act), unit_stride(linear)
    tokens, width = act.shape
    packed = act.new_empty((tokens, 2 * width))
    columns = min(1024, next_power_of_2(width))
    rows = 1024 // columns
    grid = ((tokens + rows - 1) // rows, (width + columns - 1) // columns)
    launch(kernel, grid)(
        grad,
        act,
        linear,
        packed,
        tokens,
        grad.stride(0),
        act.stride(0),
        linear.stride(0),
        **constants,
        D_ACT=width if linear_first else 0,
        D_LINEAR=0 if linear_first else width,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return packed


def _fake(grad, act, linear, linear_first=False):
    check_shapes(act.shape, grad=grad, linear=linear)
    return act.new_empty((act.shape[0], 2 * act.shape[1]))


swiglu_backward = define_op(
    "swiglu_backward(Tensor grad, Tensor act, Tensor linear, bool linear_first=False) -> Tensor",
    reference=swiglu_backward_reference,
    launcher=swiglu_backward_launch,
    fake=_fake,
)
