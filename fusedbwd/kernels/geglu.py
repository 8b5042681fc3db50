"""GeGLU backward: y = linear * gelu(act), both gradients in one packed buffer."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._op import define_op
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes
from fusedbwd.kernels.gelu import gelu_backward_reference, gelu_phi_and_slope
from fusedbwd.kernels.swiglu import launch_packed


def geglu_backward_reference(
    grad: torch.Tensor,
    act: torch.Tensor,
    linear: torch.Tensor,
    approximate: str,
    linear_first: bool = False,
) -> torch.Tensor:
    """Gradients of ``linear * gelu(act)`` (Shazeer, "GLU Variants Improve Transformer", 2020).

    d_act = grad * linear * gelu'(act), with the slope of
    :func:`~fusedbwd.kernels.gelu.gelu_backward_reference`, and d_linear = grad * gelu(act), where
    gelu(act) is rounded to act's dtype, as the forward rounded it.

    Args:
        grad: [T, I], gradient of the product; any float dtype.
        act: [T, I], the factor that goes through GELU.
        linear: [T, I], the other factor.
        approximate: "tanh" or "none", as in torch.nn.functional.gelu.
        linear_first: swaps the halves of the result.

    Returns:
        [T, 2 * I] in act's dtype: columns [0, I) are d_act, [I, 2 * I) are d_linear.
    """
    wide = accumulation_dtype(grad, act, linear)
    g, a, b = grad.to(wide), act.to(wide), linear.to(wide)
    d_act, _ = gelu_backward_reference(g * b, a, approximate)
    if approximate == "tanh":
        gelu = a * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))
    else:
        gelu = a * (0.5 * (1 + torch.erf(a * math.sqrt(0.5))))
    d_linear = g * gelu.to(act.dtype).to(wide)
    halves = [d_linear, d_act] if linear_first else [d_act, d_linear]
    return torch.cat(halves, dim=1).to(act.dtype)


@triton.jit
def _geglu_backward_kernel(
    grad_ptr,
    act_ptr,
    linear_ptr,
    packed_ptr,
    tokens,
    grad_stride,
    act_stride,
    linear_stride,
    TANH: tl.constexpr,
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
    linear = tl.load(linear_ptr + row * linear_stride + column, mask).to(tl.float32)
    a = act.to(tl.float32)
    phi, slope = gelu_phi_and_slope(a, TANH)
    d_act = grad * linear * slope
    d_linear = grad * (a * phi).to(act.dtype).to(tl.float32)
    packed = packed_ptr + row * (2 * WIDTH) + column
    dtype = packed_ptr.dtype.element_ty
    tl.store(packed + D_ACT, d_act.to(dtype), mask)
    tl.store(packed + D_LINEAR, d_linear.to(dtype), mask)


def geglu_backward_launch(
    grad: torch.Tensor,
    act: torch.Tensor,
    linear: torch.Tensor,
    approximate: str,
    linear_first: bool = False,
) -> torch.Tensor:
    """Launches the kernel, tiled as SwiGLU's."""
    tanh = approximate == "tanh"
    return launch_packed(_geglu_backward_kernel, grad, act, linear, linear_first, TANH=tanh)


def _fake(grad, act, linear, approximate, linear_first=False):
    check_shapes(act.shape, grad=grad, linear=linear)
    return act.new_empty((act.shape[0], 2 * act.shape[1]))


geglu_backward = define_op(
    "geglu_backward(Tensor grad, Tensor act, Tensor linear, str approximate, "
    "bool linear_first=False) -> Tensor",
    reference=geglu_backward_reference,
    launcher=geglu_backward_launch,
    fake=_fake,
)
