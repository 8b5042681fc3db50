"""LayerNorm backward: input gradient, residual gradient added, weight and bias gradients."""

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
    max_norm_width,
    norm_tile,
    row_stride,
    unit_stride,
)

_SUMS = 2  # accumulated in registers: dw and db
_MAX_WIDTH_WITH_DX_SUM = 4096  # a third sum


def supported(width: int, sum_dx: bool = False) -> bool:
    """Whether the kernel takes rows of ``width`` elements: up to 8192, 4096 with ``sum_dx``."""
    return 0 < width <= (_MAX_WIDTH_WITH_DX_SUM if sum_dx else max_norm_width(_SUMS))


def layer_norm_backward_reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    weight: torch.Tensor | None,
    stat: torch.Tensor,
    eps: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    sum_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of y = n * weight + bias with n = (x - mean) r, r = 1 / sqrt(var + eps).

    With g = ``grad`` and c = g weight: dx = (c - mean(c) - n mean(c n)) r + residual,
    dw = sum over rows of g n, db = sum over rows of g (Ba, Kiros and Hinton, "Layer
    Normalization", 2016, differentiated). Statistics are used as given, whatever x is.

    Args:
        grad: [T, H], gradient of y; any float dtype, as are x, weight and residual.
        x: [T, H], the norm's input; n itself if ``mean`` is None.
        mean: [T, 1] or [T] float32, or None.
        weight: [H], or None for a norm without one.
        stat: [T, 1] or [T] float32: r if ``eps`` is None, else the biased variance.
        eps: scalar tensor on x's device, added to ``stat``; None if ``stat`` is r.
        residual: [T, H], a gradient to add to dx, or None.
        out_dtype: dtype of dx.
        sum_dx: also sum dx, unrounded, over rows: the bias gradient of a layer whose output,
            perhaps with a residual added, the norm took.

    Returns:
        dx [T, H], rounded once; dw, db and the sum of dx, each [H] (the last one [0] without
        ``sum_dx``), in float32 (float64 for float64 inputs).
    """
    wide = accumulation_dtype(grad, x)
    g, normalized = grad.to(wide), x.to(wide)
    r = stat.reshape(-1, 1).to(wide)
    if eps is not None:
        r = torch.rsqrt(r + eps)
    if mean is not None:
        normalized = (normalized - mean.reshape(-1, 1)) * r
    gw = g if weight is None else g * weight.to(wide)
    slope = (gw * normalized).mean(1, keepdim=True)
    dx = (gw - gw.mean(1, keepdim=True) - normalized * slope) * r
    if residual is not None:
        dx = dx + residual
    dx_sum = dx.sum(0) if sum_dx else dx.new_empty((0,))
    return dx.to(out_dtype).contiguous(), (g * normalized).sum(0), g.sum(0), dx_sum


def layer_norm_backward_dx_reference(
    grad, x, mean, weight, stat, eps, residual, out_dtype
) -> torch.Tensor:
    """dx alone, for frozen parameters; see :func:`layer_norm_backward_reference`."""
    return layer_norm_backward_reference(
        grad, x, mean, weight, stat, eps, residual, out_dtype, False
    )[0]


def layer_norm_backward_rounded_reference(
    grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx, rounded_dtype
) -> tuple[torch.Tensor, ...]:
    """As :func:`layer_norm_backward_reference`, and at the end dx in a second dtype too."""
    wide = accumulation_dtype(grad, x)
    dx, *sums = layer_norm_backward_reference(
        grad, x, mean, weight, stat, eps, residual, wide, sum_dx
    )
    return dx.to(out_dtype), *sums, dx.to(rounded_dtype, copy=True)


@triton.jit
def _layer_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    mean_ptr,
    weight_ptr,
    stat_ptr,
    eps_ptr,
    residual_ptr,
    dx_ptr,
    rounded_ptr,
    partial_ptr,
    tokens,
    grad_stride,
    x_stride,
    mean_stride,
    stat_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ROUNDED: tl.constexpr,
    SUMS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    in_width = column < WIDTH
    if HAS_EPS:
        eps = tl.load(eps_ptr).to(tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    db = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    step = tl.num_programs(0) * ROWS
    for start in tl.range(program * ROWS, tokens, step):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        in_rows = row < tokens
        mask = in_rows & in_width
        grad = tl.load(grad_ptr + row * grad_stride + column, mask, 0.0).to(tl.float32)
        normalized = tl.load(x_ptr + row * x_stride + column, mask, 0.0).to(tl.float32)
        rstd = tl.load(stat_ptr + row * stat_stride, in_rows, 1.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask, 0.0)
        if HAS_EPS:
            rstd = tl.rsqrt(rstd + eps)
        if HAS_MEAN:
            # Columns past the width become nonzero here; grad is 0 there, so no sum sees them.
            mean = tl.load(mean_ptr + row * mean_stride, in_rows, 0.0).to(tl.float32)
            normalized = (normalized - mean) * rstd

        if SUMS > 0:
            dw += grad * normalized
            db += grad
        if HAS_WEIGHT:
            # Read again for every row: it stays in the cache, and registers are scarce.
            weight = tl.load(weight_ptr + column, in_width, 0.0).to(tl.float32)
            grad *= weight
        offset = tl.sum(grad, 1, keep_dims=True) / WIDTH
        slope = tl.sum(grad * normalized, 1, keep_dims=True) / WIDTH
        dx = (grad - offset - normalized * slope) * rstd
        if HAS_RESIDUAL:
            dx += residual.to(tl.float32)
        if SUMS > 2:
            # Nonzero past the width, where nothing is stored; zero past the last row.
            dx_sum += tl.where(in_rows, dx, 0.0)
        tl.store(dx_ptr + row * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), mask)
        if HAS_ROUNDED:
            rounded = dx.to(rounded_ptr.dtype.element_ty)
            tl.store(rounded_ptr + row * WIDTH + by_fours(column), rounded, mask)
    share = partial_ptr + program * SUMS * WIDTH + column
    if SUMS > 0:
        tl.store(share, tl.sum(dw, 0, keep_dims=True), in_width)
        tl.store(share + WIDTH, tl.sum(db, 0, keep_dims=True), in_width)
    if SUMS > 2:
        tl.store(share + 2 * WIDTH, tl.sum(dx_sum, 0, keep_dims=True), in_width)


def _launch(grad, x, mean, weight, stat, eps, residual, out_dtype, sums, rounded=None):
    """Returns dx and each program's share of the ``sums``, [programs, sums, H].

    ``rounded``: [T, H], where dx is written too, or None.
    """
    grad, x = unit_stride(grad), unit_stride(x)
    weight = None if weight is None else unit_stride(weight)
    residual = None if residual is None else unit_stride(residual)
    tokens, width = x.shape
    tile = norm_tile(width, _SUMS)
    dx = x.new_empty((tokens, width), dtype=out_dtype)
    programs = tile.programs(x.device)
    partial = x.new_empty((programs, sums, width), dtype=torch.float32)
    # An absent operand's pointer is never followed: any tensor stands in for it.
    launch(_layer_norm_backward_kernel, (programs,))(
        grad,
        x,
        stat if mean is None else mean,
        x if weight is None else weight,
        stat,
        stat if eps is None else eps,
        x if residual is None else residual,
        dx,
        dx if rounded is None else rounded,
        stat if sums == 0 else partial,
        tokens,
        grad.stride(0),
        x.stride(0),
        row_stride(mean),
        stat.stride(0),
        row_stride(residual),
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HAS_MEAN=mean is not None,
        HAS_WEIGHT=weight is not None,
        HAS_EPS=eps is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_ROUNDED=rounded is not None,
        SUMS=sums,
        num_warps=tile.warps,
    )
    return dx, partial


def layer_norm_backward_launch(
    grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx, rounded=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernel, then adds up the programs' shares in a fixed order."""
    sums = _SUMS + sum_dx
    dx, partial = _launch(grad, x, mean, weight, stat, eps, residual, out_dtype, sums, rounded)
    dw, db, *rest = sum_partials(partial)
    return dx, dw, db, rest[0] if rest else dx.new_empty((0,), dtype=torch.float32)


def layer_norm_backward_rounded_launch(
    grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx, rounded_dtype
) -> tuple[torch.Tensor, ...]:
    """As :func:`layer_norm_backward_launch`; the kernel writes dx twice."""
    rounded = x.new_empty(x.shape, dtype=rounded_dtype)
    results = layer_norm_backward_launch(
        grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx, rounded
    )
    return *results, rounded


def layer_norm_backward_dx_launch(
    grad, x, mean, weight, stat, eps, residual, out_dtype
) -> torch.Tensor:
    """Launches the kernel without its sums."""
    return _launch(grad, x, mean, weight, stat, eps, residual, out_dtype, 0)[0]


def _fake(grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx):
    dx = _fake_dx(grad, x, mean, weight, stat, eps, residual, out_dtype)
    width, wide = x.shape[1], accumulation_dtype(grad, x)
    dw, db = x.new_empty((width,), dtype=wide), x.new_empty((width,), dtype=wide)
    dx_sum = x.new_empty((width if sum_dx else 0,), dtype=wide)
    return dx, dw, db, dx_sum


def _fake_rounded(grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx, rounded_dtype):
    results = _fake(grad, x, mean, weight, stat, eps, residual, out_dtype, sum_dx)
    return *results, x.new_empty(x.shape, dtype=rounded_dtype)


def _fake_dx(grad, x, mean, weight, stat, eps, residual, out_dtype):
    check_norm_shapes(grad, x, weight, residual, stat=stat, mean=mean)
    return x.new_empty(x.shape, dtype=out_dtype)


layer_norm_backward = define_op(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor? mean, Tensor? weight, Tensor stat, "
    "Tensor? eps, Tensor? residual, ScalarType out_dtype, bool sum_dx)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=layer_norm_backward_reference,
    launcher=layer_norm_backward_launch,
    fake=_fake,
)

layer_norm_backward_rounded = define_op(
    "layer_norm_backward_rounded(Tensor grad, Tensor x, Tensor? mean, Tensor? weight, "
    "Tensor stat, Tensor? eps, Tensor? residual, ScalarType out_dtype, bool sum_dx, "
    "ScalarType rounded_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=layer_norm_backward_rounded_reference,
    launcher=layer_norm_backward_rounded_launch,
    fake=_fake_rounded,
)

layer_norm_backward_dx = define_op(
    "layer_norm_backward_dx(Tensor grad, Tensor x, Tensor? mean, Tensor? weight, Tensor stat, "
    "Tensor? eps, Tensor? residual, ScalarType out_dtype) -> Tensor",
    reference=layer_norm_backward_dx_reference,
    launcher=layer_norm_backward_dx_launch,
    fake=_fake_dx,
)
