import pytest
import torch
from checks import DTYPES, ROUNDED, SHAPES, assert_right, cast, gradients, run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.rms_norm import (
    rms_norm_backward_dx_launch,
    rms_norm_backward_launch,
    rms_norm_backward_reference,
    rms_norm_backward_rounded_launch,
    supported,
)
from fusedbwd.numerics import statistics_dtype

EPS = 1e-5


def norm(x, weight, offset=0.0):
    wide = x.to(statistics_dtype(x.dtype))
    normalized = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
    return (normalized * (weight.to(wide.dtype) + offset)).to(x.dtype)


def draw(tokens, width, dtype, device):
    """grad, x, weight, residual"""
    torch.manual_seed(tokens + width)
    shapes = [(tokens, width), (tokens, width), (width,), (tokens, width)]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def statistics(x, wide=None):
    """Mean of squares, and eps, as tensors."""
    x = x.to(wide or statistics_dtype(x.dtype))
    return x.square().mean(1, keepdim=True), torch.tensor(EPS, dtype=x.dtype, device=x.device)


def autograd(grad, x, weight, residual, offset=0.0):
    dx, dw = gradients(lambda x, w: norm(x, w, offset), grad, x, weight)
    return dx + residual, dw


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_reference_is_autograd(offset):
    grad, x, weight, residual = draw(127, 33, torch.float64, "cpu")
    stat, eps = statistics(x)
    expected = autograd(grad, x, weight, residual, offset)
    rstd = torch.rsqrt(stat + eps)
    for given in ((stat, eps, None), (rstd, None, None), (rstd[:, 0], None, x * rstd)):
        actual = rms_norm_backward_reference(
            grad, x, weight, *given, residual, offset, torch.float64
        )
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def test_reference_without_weight_is_autograd():
    grad, x, _, _ = draw(7, 33, torch.float64, "cpu")
    expected = gradients(lambda x: norm(x, torch.ones(33, dtype=x.dtype)), grad, x)[0]
    stat, eps = statistics(x)
    actual, _ = rms_norm_backward_reference(
        grad, x, None, stat, eps, None, None, 0.0, torch.float64
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def check_kernel(tokens, width, dtype, device, offset=0.0):
    grad, x, weight, residual = draw(tokens, width, dtype, device)
    wide = cast([grad, x, weight, residual], torch.float64)
    expected = autograd(*wide, offset)
    own = autograd(grad, x, weight, residual, offset)
    stat, eps = statistics(x)
    given = (grad, x, weight, stat, eps)
    actual = run(rms_norm_backward_launch, *given, None, residual, offset, dtype)
    assert_right(actual, expected, own, dtype)
    dx = run(rms_norm_backward_dx_launch, *given, residual, offset, dtype)
    assert torch.equal(dx, actual[0])
    twice = (*given, None, residual, offset, dtype, ROUNDED)
    # Another compilation of the kernel, which may contract other products: right, not equal.
    *again, rounded = run(rms_norm_backward_rounded_launch, *twice)
    assert_right(again, expected, own, dtype)
    if dtype == torch.float32:
        assert torch.equal(rounded, again[0].to(ROUNDED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [*SHAPES, (5, 5120)])
def test_kernel(tokens, width, dtype, device):
    check_kernel(tokens, width, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(4097, 512), (1025, 5120), (513, 16384)])
def test_kernel_at_size(tokens, width, dtype, device):
    check_kernel(tokens, width, dtype, device)


@pytest.mark.parametrize("with_x_hat", [False, True])
@pytest.mark.parametrize("form", ["rstd", "mean of squares"])
@pytest.mark.parametrize("with_weight", [False, True])
def test_statistics_are_used_as_given(form, with_weight, with_x_hat, device):
    grad, x, weight, residual = draw(127, 48, torch.float32, device)
    stat = torch.randn(127, device=device).abs() + 0.1
    x_hat = torch.randn(127, 48, device=device) if with_x_hat else None
    args = [
        grad,
        x,
        weight if with_weight else None,
        stat,
        None if form == "rstd" else torch.tensor(EPS, device=device),
        x_hat,
        residual,
        1.0,
    ]
    assert_right(
        run(rms_norm_backward_launch, *args, torch.float32),
        rms_norm_backward_reference(*cast(args, torch.float64), torch.float64),
        rms_norm_backward_reference(*args, torch.float32),
        torch.float32,
    )


def test_offset_is_added_in_float32(device):
    """bfloat16 would round 1 + 0.00390625 to 1 and 1 + 15.8125 to 16.75."""
    weight = torch.tensor([[0.00390625, 15.8125]], device=device).repeat(1, 16)[0].bfloat16()
    check = torch.zeros(4, 32, device=device)  # x = 0: dx = grad * (1 + weight)
    grad, one = torch.ones_like(check), torch.ones(4, 1, device=device)
    dx = run(rms_norm_backward_dx_launch, grad, check, weight, one, None, None, 1.0, torch.float32)
    assert torch.equal(dx, torch.tensor([1.00390625, 16.8125], device=device).repeat(4, 16))


def test_zero_input(device):
    x = torch.zeros(1, 4, device=device)
    grad = torch.tensor(-1.0, device=device).expand(1, 4)
    stat, eps = statistics(x)
    dx, dw = run(
        rms_norm_backward_launch, grad, x, x[0] + 1, stat, eps, None, None, 0.0, torch.float32
    )
    assert dw.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(dx, torch.full_like(x, -(EPS**-0.5)))


def test_squares_past_the_range_of_fp16(device):
    grad, x, weight, residual = draw(4, 5120, torch.float16, device)
    x = 500 * x
    assert x.square().isinf().float().mean() > 0.5
    stat, eps = statistics(x)
    actual = run(rms_norm_backward_launch, grad, x, weight, stat, eps, None, residual, 0.0, x.dtype)
    expected = autograd(*cast([grad, x, weight, residual], torch.float64))
    assert_right(actual, expected, autograd(grad, x, weight, residual), torch.float16)


def test_nan_stays_in_its_row(device):
    grad, x, weight, _ = draw(7, 33, torch.float32, device)
    x[2, 5] = torch.nan
    stat, eps = statistics(x)
    dx, dw = run(
        rms_norm_backward_launch, grad, x, weight, stat, eps, None, None, 0.0, torch.float32
    )
    assert dx.isnan().any(1).tolist() == [row == 2 for row in range(7)]
    assert dw.isnan().all()  # autograd's too: the row's statistics are NaN


def test_too_wide(device):
    assert supported(16384)
    assert not supported(16385)
    x, weight = torch.ones(1, 16385, device=device), torch.ones(16385, device=device)
    with pytest.raises(UnsupportedError, match="got 16385"):
        run(rms_norm_backward_dx_launch, x, x, weight, x[:, :1], None, None, 0.0, torch.float32)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31(device):
    tokens, width = 420_000, 5120
    grad, x = (torch.zeros(tokens, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    edges = torch.cat([torch.arange(8), torch.arange(tokens - 8, tokens)]).to(device)
    torch.manual_seed(0)
    for t in (grad, x):
        t[edges] = torch.randn(16, width, dtype=t.dtype, device=device)
    weight = torch.randn(width, device=device)
    rstd = torch.rand(tokens, 1, device=device) + 0.1

    def backward(rows):
        given = (grad[rows], x[rows], weight, rstd[rows])
        return run(rms_norm_backward_launch, *given, None, None, None, 0.0, torch.bfloat16)

    dx, dw = backward(slice(None))
    dx_alone, dw_alone = backward(edges)
    assert torch.equal(dx[edges], dx_alone)
    torch.testing.assert_close(dw, dw_alone)
    assert not dx[8:-8].any()
