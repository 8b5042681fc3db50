"""GELU backward (tanh and exact) with the bias gradient, in one pass over memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._op import define_op, launch, next_power_of_2, sm_count
from fusedbwd.kernels._partials import sum_partials
from fusedbwd.kernels._tiles import accumulation_dtype, check_shapes, unit_stride


def gelu_backward_reference(
    grad: torch.Tensor, x: torch.Tensor, approximate: str, dx_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of ``gelu(x)``, and its column sums, the gradient of a bias added to get x.

    Exact: gelu(x) = x * Phi(x), slope Phi(x) + x * exp(-x^2 / 2) / sqrt(2 pi), with Phi the
    normal distribution function. Tanh: Phi(x) is replaced by s = sigmoid(2 u) with
    u = sqrt(2 / pi) * (x + 0.044715 x^3), and the slope is s + 2 x s (1 - s) du/dx
    (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; (1 + tanh u) / 2 = sigmoid(2 u)).

    Args:
        grad: [T, I], gradient of the activation; any float dtype.
        x: [T, I], its input.
        approximate: "tanh" or "none", as in torch.nn.functional.gelu.
        dx_dtype: of dx; x's if None.

    Returns:
        dx [T, I], rounded once; dbias [I] in float32 (float64 for float64 inputs), summed
        before dx is rounded.
    """
    wide = accumulation_dtype(grad, x)
    g, x_wide = grad.to(wide), x.to(wide)
    if approximate == "tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        u = scale * (x_wide + cubic * x_wide**3)
        s = torch.sigmoid(2 * u)
        # The spread is zero long before |x| = 100; unclamped, x^2 could overflow: 0 * inf.
        near = x_wide.clamp(-100, 100)
        spread = s * torch.sigmoid(-2 * u)  # s * (1 - s), also where s rounds to 1
        slope = s + 2 * near * spread * scale * (1 + 3 * cubic * near**2)
    else:
        phi = 0.5 * (1 + torch.erf(x_wide * math.sqrt(0.5)))
        slope = phi + x_wide * torch.exp(-0.5 * x_wide**2) / math.sqrt(2 * math.pi)
    dx = g * slope
    return dx.to(dx_dtype or x.dtype).contiguous(), dx.sum(0)


@triton.jit
def gelu_phi_and_slope(x, TANH: tl.constexpr):
    """gelu(x) / x, exact (Phi) or tanh's, and gelu's derivative, at a block ``x`` in float32.

    Each is 1 minus itself at -x. Its value at -|x| comes first, as a product with an exponential
    that cannot overflow: nothing cancels in the tail, and all of it takes fewer instructions than
    erf and an exponential do.
    """
    far = tl.abs(x)
    if TANH:
        # sigmoid(-v), and sigmoid(-v) (1 - sigmoid(v) |x| dv/dx), with v = 2 u at |x|. Both ends
        # are reached long before |x| = 100; beyond, x^2 could overflow: 0 * inf.
        far = tl.minimum(far, 100.0, propagate_nan=tl.PropagateNan.ALL)
        square = far * far
        z = tl.exp2(far * (-2.302208198144325 - 0.1029432395800235 * square))  # exp(-v)
        r = 1 / (1 + z)  # sigmoid(v)
        phi = z * r
        slope = phi * (1 - r * (far * (1.5957691216057308 + 0.21406444881780076 * square)))
    else:
        # With m = Phi(-|x|) exp(x^2 / 2): a polynomial in t, found by minimax, m(0) = 1/2. Times
        # the exponential it is off by at most 2.2e-8.
        t = 1 / (1 + 0.39 * far)
        m = -0.2545391354321608 + t * 0.052915367128343785
        m = -0.012079366575670325 + t * (0.3693301254031641 + t * m)
        m = t * (0.1516960875079475 + t * (0.19267692196837577 + t * m))
        z = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
        phi = z * m
        slope = z * (m - 0.3989422804014327 * far)
    return tl.where(x < 0, phi, 1 - phi), tl.where(x < 0, slope, 1 - slope)


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    """gelu's derivative at a block ``x`` in float32."""
    _, slope = gelu_phi_and_slope(x, TANH)
    return slope


@triton.jit
def _gelu_backward_kernel(
    grad_ptr,
    x_ptr,
    dx_ptr,
    partial_ptr,
    tokens,
    grad_stride,
    x_stride,
    TANH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # One column block and every num_programs-th row block: the sums stay in registers.
    chunk = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_width = column < WIDTH
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(chunk * ROWS, tokens, tl.num_programs(0) * ROWS, num_stages=3):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < tokens) & in_width
        grad = tl.load(grad_ptr + row * grad_stride + column, mask, 0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask, 0.0).to(tl.float32)
        dx = grad * gelu_slope(x, TANH)
        tl.store(dx_ptr + row * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), mask)
        sums += dx
    tl.store(partial_ptr + chunk * WIDTH + column, tl.sum(sums, 0, keep_dims=True), in_width)


def gelu_backward_launch(
    grad: torch.Tensor, x: torch.Tensor, approximate: str, dx_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel over row chunks x column blocks and adds up the chunks' sums.

    ``dx_dtype``: of dx, x's if None.
    """
    grad, x = unit_stride(grad), unit_stride(x)
    tokens, width = x.shape
    columns = min(256, next_power_of_2(width))
    rows = 2048 // columns
    blocks = (width + columns - 1) // columns
    chunks = max(1, 8 * sm_count(x.device) // blocks)
    dx = x.new_empty((tokens, width), dtype=dx_dtype)
    partial = x.new_empty((chunks, width), dtype=torch.float32)
    launch(_gelu_backward_kernel, (chunks, blocks))(
        grad,
        x,
        dx,
        partial,
        tokens,
        grad.stride(0),
        x.stride(0),
        TANH=approximate == "tanh",
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return dx, sum_partials(partial.unsqueeze(1))[0]


def _fake(grad, x, approximate, dx_dtype=None):
    check_shapes(x.shape, grad=grad)
    dbias = x.new_empty((x.shape[1],), dtype=accumulation_dtype(grad, x))
    return x.new_empty(x.shape, dtype=dx_dtype), dbias


gelu_backward = define_op(
    "gelu_backward(Tensor grad, Tensor x, str approximate, ScalarType? dx_dtype=None)"
    " -> (Tensor, Tensor)",
    reference=gelu_backward_reference,
    launcher=gelu_backward_launch,
    fake=_fake,
)
