import pytest
import torch
import torch.nn.functional as F
from checks import DTYPES, ROUNDED, SHAPES, assert_right, cast, gradients, run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.layer_norm import (
    layer_norm_backward_dx_launch,
    layer_norm_backward_launch,
    layer_norm_backward_reference,
    layer_norm_backward_rounded_launch,
    supported,
)
from fusedbwd.numerics import statistics_dtype

EPS = 1e-5


def draw(tokens, width, dtype, device):
    """grad, x, weight, bias, residual"""
    torch.manual_seed(tokens + width)
    shapes = [(tokens, width), (tokens, width), (width,), (width,), (tokens, width)]
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def statistics(x):
    """Mean, biased variance and eps, as tensors."""
    x = x.to(statistics_dtype(x.dtype))
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return mean, var, torch.tensor(EPS, dtype=x.dtype, device=x.device)


def autograd(grad, x, weight, bias, residual):
    dx, dw, db = gradients(
        lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b, EPS), grad, x, weight, bias
    )
    dx = dx + residual
    return dx, dw, db, dx.sum(0)


def test_reference_is_autograd():
    grad, x, weight, bias, residual = draw(127, 33, torch.float64, "cpu")
    mean, var, eps = statistics(x)
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - mean) * rstd
    expected = autograd(grad, x, weight, bias, residual)
    for x_given, mean_given, stat, eps_given in (
        (x, mean, var, eps),
        (x, mean[:, 0], rstd[:, 0], None),
        (x_hat, None, var, eps),
        (x_hat, None, rstd, None),
    ):
        actual = layer_norm_backward_reference(
            grad, x_given, mean_given, weight, stat, eps_given, residual, torch.float64, True
        )
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def check_kernel(tokens, width, dtype, device):
    args = draw(tokens, width, dtype, device)
    grad, x, weight, _, residual = args
    mean, var, eps = statistics(x)
    given = (grad, x, mean, weight, var, eps, residual, dtype)
    actual = run(layer_norm_backward_launch, *given, True)
    assert_right(actual, autograd(*cast(args, torch.float64)), autograd(*args), dtype)
    *same, nothing = run(layer_norm_backward_launch, *given, False)
    assert all(map(torch.equal, same, actual)) and nothing.shape == (0,)
    assert torch.equal(run(layer_norm_backward_dx_launch, *given), actual[0])
    # Another compilation of the kernel, which may contract other products: right, not equal.
    *again, rounded = run(layer_norm_backward_rounded_launch, *given, True, ROUNDED)
    assert_right(again, autograd(*cast(args, torch.float64)), autograd(*args), dtype)
    if dtype == torch.float32:
        assert torch.equal(rounded, again[0].to(ROUNDED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [*SHAPES, (5, 2500)])
def test_kernel(tokens, width, dtype, device):
    check_kernel(tokens, width, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(65_537, 160), (4097, 512), (513, 4096)])
def test_kernel_at_size(tokens, width, dtype, device):
    check_kernel(tokens, width, dtype, device)


@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize("form", ["rstd", "variance"])
@pytest.mark.parametrize("with_weight", [False, True])
def test_statistics_are_used_as_given(form, with_weight, with_mean, device):
    grad, x, weight, _, residual = draw(127, 48, torch.float32, device)
    args = [
        grad,
        x,
        torch.randn(127, device=device) if with_mean else None,
        weight if with_weight else None,
        torch.randn(127, 1, device=device).abs() + 0.1,
        None if form == "rstd" else torch.tensor(EPS, device=device),
        residual,
    ]
    assert_right(
        run(layer_norm_backward_launch, *args, torch.float32, True),
        layer_norm_backward_reference(*cast(args, torch.float64), torch.float64, True),
        layer_norm_backward_reference(*args, torch.float32, True),
        torch.float32,
    )


def test_large_mean(device):
    """Rows far from zero: the mean is taken off before anything is squared or summed."""
    grad, x, weight, bias, residual = draw(7, 160, torch.float32, device)
    x = x + 1000
    args = (grad, x, weight, bias, residual)
    wide = cast(args, torch.float64)
    mean, var, eps = statistics(wide[1])
    rounded = cast([mean, var, eps], torch.float32)
    actual = run(
        layer_norm_backward_launch,
        *(grad, x, rounded[0], weight, *rounded[1:], residual, x.dtype, True),
    )
    assert_right(actual, autograd(*wide), autograd(*args), torch.float32)


def test_nan_stays_in_its_row(device):
    grad, x, weight, _, _ = draw(7, 33, torch.float32, device)
    x[2, 5] = torch.nan
    mean, var, eps = statistics(x)
    dx, dw, db, dx_sum = run(
        layer_norm_backward_launch, grad, x, mean, weight, var, eps, None, torch.float32, True
    )
    assert dx.isnan().any(1).tolist() == [row == 2 for row in range(7)]
    assert dw.isnan().all()
    assert db.isfinite().all()
    assert dx_sum.isnan().all()


def test_too_wide(device):
    assert supported(8192)
    assert not supported(8193)
    assert supported(4096, sum_dx=True)
    assert not supported(4097, sum_dx=True)
    x, weight = torch.ones(1, 8193, device=device), torch.ones(8193, device=device)
    with pytest.raises(UnsupportedError, match="got 8193"):
        run(layer_norm_backward_dx_launch, x, x, None, weight, x[:, :1], None, None, x.dtype)
