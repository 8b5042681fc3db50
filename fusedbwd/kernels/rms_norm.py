"""RMSNorm backward: input gradient, residual gradient added, weight gradient, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._op import define_op, launch
from fusedbwd.kernels._partials import sum_partials
from fusedbwd.kernels._tiles import (
    accumulation_dtype,
    by_fours,
    check_norm_shapes,
    check_shapes,
    max_norm_width,
    norm_tile,
    row_stride,
    unit_stride,
)

_SUMS = 1  # accumulated in registers: dw


def supported(width: int) -> bool:
    """Whether the kernel takes rows of ``width`` elements: up to 16384."""
    return 0 < width <= max_norm_width(_SUMS)


def rms_norm_backward_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stat: torch.Tensor,
    eps: torch.Tensor | None,
    x_hat: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight_offset: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), w = weight + weight_offset.

    dx = g w r - x r^3 mean(g w x) + residual and dw = sum over rows of g x r, where g is
    ``grad`` (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, differentiated).
    Statistics are used as given, whatever x is.

    Args:
        grad: [T, H], gradient of y; any float dtype, as are x, weight, x_hat and residual.
        x: [T, H], the norm's input.
        weight: [H], or None for a norm without one (w = 1).
        stat: [T, 1] or [T] float32: r if ``eps`` is None, else mean(x^2).
        eps: scalar tensor on x's device, added to ``stat``; None if ``stat`` is r.
        x_hat: [T, H], used for dw in place of x r if given.
        residual: [T, H], a gradient to add to dx, or None.
        weight_offset: added to the weight in float32 (1.0 for Gemma's 1 + w).
        out_dtype: dtype of dx.

    Returns:
        dx [T, H], rounded once; dw [H] in float32 (float64 for float64 inputs).
    """
    wide = accumulation_dtype(grad, x)
    g = grad.to(wide)
    r = stat.reshape(-1, 1).to(wide)
    if eps is not None:
        r = torch.rsqrt(r + eps)
    normalized = x.to(wide) * r
    dw = (g * (normalized if x_hat is None else x_hat.to(wide))).sum(0)
    gw = g if weight is None else g * (weight.to(wide) + weight_offset)
    dx = (gw - normalized * (gw * normalized).mean(1, keepdim=True)) * r
    if residual is not None:
        dx = dx + residual
    return dx.to(out_dtype).contiguous(), dw


def rms_norm_backward_dx_reference(
    grad, x, weight, stat, eps, residual, weight_offset, out_dtype
) -> torch.Tensor:
    """dx alone, for a norm whose weight is frozen; see :func:`rms_norm_backward_reference`."""
    return rms_norm_backward_reference(
        grad, x, weight, stat, eps, None, residual, weight_offset, out_dtype
    )[0]


def rms_norm_backward_rounded_reference(
    grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, rounded_dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`rms_norm_backward_reference`, and at the end dx in a second dtype too."""
    wide = accumulation_dtype(grad, x)
    dx, dw = rms_norm_backward_reference(
        grad, x, weight, stat, eps, x_hat, residual, weight_offset, wide
    )
    return dx.to(out_dtype), dw, dx.to(rounded_dtype, copy=True)


@triton.jit
def _rms_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    stat_ptr,
    eps_ptr,
    x_hat_ptr,
    residual_ptr,
    dx_ptr,
    rounded_ptr,
    partial_ptr,
    tokens,
    grad_stride,
    x_stride,
    stat_stride,
    x_hat_stride,
    residual_stride,
    WEIGHT_OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_X_HAT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ROUNDED: tl.constexpr,
    HAS_DW: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    in_width = column < WIDTH
    if HAS_EPS:
        eps = tl.load(eps_ptr).to(tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(program * ROWS, tokens, step):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        in_rows = row < tokens
        mask = in_rows & in_width
        grad = tl.load(grad_ptr + row * grad_stride + column, mask, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask, 0.0).to(tl.float32)
        rstd = tl.load(stat_ptr + row * stat_stride, in_rows, 1.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask, 0.0)
        if HAS_EPS:
            rstd = tl.rsqrt(rstd + eps)

        normalized = x * rstd
        if HAS_DW:
            if HAS_X_HAT:
                x_hat = tl.load(x_hat_ptr + row * x_hat_stride + column, mask, 0.0)
                dw += grad * x_hat.to(tl.float32)
            else:
                dw += grad * normalized
        if HAS_WEIGHT:
            # Read again for every row: it stays in the cache, and registers are scarce.
            weight = tl.load(weight_ptr + column, in_width, 0.0).to(tl.float32)
            grad *= weight + WEIGHT_OFFSET
        mean = tl.sum(grad * normalized, 1, keep_dims=True) / WIDTH
        dx = (grad - normalized * mean) * rstd
        if HAS_RESIDUAL:
            dx += residual.to(tl.float32)
        tl.store(dx_ptr + row * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), mask)
        if HAS_ROUNDED:
            rounded = dx.to(rounded_ptr.dtype.element_ty)
            tl.store(rounded_ptr + row * WIDTH + by_fours(column), rounded, mask)
    if HAS_DW:
        tl.store(partial_ptr + program * WIDTH + column, tl.sum(dw, 0, keep_dims=True), in_width)


def _launch(
    grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, partial, rounded=None
):
    grad, x = unit_stride(grad), unit_stride(x)
    weight = None if weight is None else unit_stride(weight)
    x_hat = None if x_hat is None else unit_stride(x_hat)
    residual = None if residual is None else unit_stride(residual)
    tokens, width = x.shape
    tile = norm_tile(width, _SUMS)
    dx = x.new_empty((tokens, width), dtype=out_dtype)
    # An absent operand's pointer is never followed: any tensor stands in for it.
    launch(_rms_norm_backward_kernel, (tile.programs(x.device),))(
        grad,
        x,
        x if weight is None else weight,
        stat,
        stat if eps is None else eps,
        x if x_hat is None else x_hat,
        x if residual is None else residual,
        dx,
        dx if rounded is None else rounded,
        stat if partial is None else partial,
        tokens,
        grad.stride(0),
        x.stride(0),
        stat.stride(0),
        row_stride(x_hat),
        row_stride(residual),
        WEIGHT_OFFSET=weight_offset,
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HAS_WEIGHT=weight is not None,
        HAS_EPS=eps is not None,
        HAS_X_HAT=x_hat is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_ROUNDED=rounded is not None,
        HAS_DW=partial is not None,
        num_warps=tile.warps,
    )
    return dx


def rms_norm_backward_launch(
    grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, rounded=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel, then adds up the programs' shares of dw in a fixed order."""
    width = x.shape[1]
    programs = norm_tile(width, _SUMS).programs(x.device)
    partial = x.new_empty((programs, width), dtype=torch.float32)
    dx = _launch(
        grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, partial, rounded
    )
    return dx, sum_partials(partial.unsqueeze(1))[0]


def rms_norm_backward_rounded_launch(
    grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, rounded_dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`rms_norm_backward_launch`; the kernel writes dx twice."""
    rounded = x.new_empty(x.shape, dtype=rounded_dtype)
    results = rms_norm_backward_launch(
        grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, rounded
    )
    return *results, rounded


def rms_norm_backward_dx_launch(
    grad, x, weight, stat, eps, residual, weight_offset, out_dtype
) -> torch.Tensor:
    """Launches the kernel without its weight-gradient part."""
    return _launch(grad, x, weight, stat, eps, None, residual, weight_offset, out_dtype, None)


def _fake(grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype):
    check_shapes(x.shape, x_hat=x_hat)
    dx = _fake_dx(grad, x, weight, stat, eps, residual, weight_offset, out_dtype)
    dw = x.new_empty((x.shape[1],), dtype=accumulation_dtype(grad, x))
    return dx, dw


def _fake_rounded(
    grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype, rounded_dtype
):
    results = _fake(grad, x, weight, stat, eps, x_hat, residual, weight_offset, out_dtype)
    return *results, x.new_empty(x.shape, dtype=rounded_dtype)


def _fake_dx(grad, x, weight, stat, eps, residual, weight_offset, out_dtype):
    check_norm_shapes(grad, x, weight, residual, stat=stat)
    return x.new_empty(x.shape, dtype=out_dtype)


rms_norm_backward = define_op(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor stat, Tensor? eps, "
    "Tensor? x_hat, Tensor? residual, float weight_offset, ScalarType out_dtype)"
    " -> (Tensor, Tensor)",
    reference=rms_norm_backward_reference,
    launcher=rms_norm_backward_launch,
    fake=_fake,
)

rms_norm_backward_rounded = define_op(
    "rms_norm_backward_rounded(Tensor grad, Tensor x, Tensor? weight, Tensor stat, Tensor? eps, "
    "Tensor? x_hat, Tensor? residual, float weight_offset, ScalarType out_dtype, "
    "ScalarType rounded_dtype) -> (Tensor, Tensor, Tensor)",
    reference=rms_norm_backward_rounded_reference,
    launcher=rms_norm_backward_rounded_launch,
    fake=_fake_rounded,
)

rms_norm_backward_dx = define_op(
    "rms_norm_backward_dx(Tensor grad, Tensor x, Tensor? weight, Tensor stat, Tensor? eps, "
    "Tensor? residual, float weight_offset, ScalarType out_dtype) -> Tensor",
    reference=rms_norm_backward_dx_reference,
    launcher=rms_norm_backward_dx_launch,
    fake=_fake_dx,
)
