import math

import pytest
import torch
import torch.nn.functional as F
from checks import DTYPES, ROUNDED, SHAPES, assert_right, assert_same_formula, cast, gradients, run

from fusedbwd.kernels.gelu import gelu_backward_launch, gelu_backward_reference

FLAVOURS = ["tanh", "none"]


def autograd(grad, x, approximate):
    dx = gradients(lambda x: F.gelu(x, approximate=approximate), grad, x)[0]
    return dx, dx.sum(0)


def draw(tokens, width, dtype, device):
    torch.manual_seed(tokens + width)
    return [torch.randn(tokens, width, dtype=dtype, device=device) for _ in range(2)]


@pytest.mark.parametrize("approximate", FLAVOURS)
def test_reference_is_autograd(approximate):
    grad, x = draw(127, 33, torch.float64, "cpu")
    x = 3 * x
    assert_same_formula(
        gelu_backward_reference(grad, x, approximate), autograd(grad, x, approximate)
    )


@pytest.mark.parametrize("approximate", FLAVOURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [*SHAPES, (3, 300)])
def test_kernel(tokens, width, dtype, approximate, device):
    args = [*draw(tokens, width, dtype, device), approximate]
    assert_right(
        run(gelu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        dtype,
    )


@pytest.mark.parametrize("approximate", FLAVOURS)
def test_rounded(approximate, device):
    """dx in another dtype is the same dx, rounded; the sums are of the unrounded one."""
    args = [*draw(127, 33, torch.float32, device), approximate]
    dx, dbias = run(gelu_backward_launch, *args)
    rounded, same = run(gelu_backward_launch, *args, ROUNDED)
    assert torch.equal(rounded, dx.to(ROUNDED))
    assert torch.equal(same, dbias)


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", FLAVOURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_at_size(dtype, approximate, device):
    args = [*draw(4097, 2048, dtype, device), approximate]
    assert_right(
        run(gelu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        dtype,
    )


def test_flavours_differ(device):
    x = torch.full((1, 33), 2.0186, device=device)
    grad = torch.ones_like(x)
    tanh, exact = (run(gelu_backward_launch, grad, x, a)[0] for a in FLAVOURS)
    assert 8e-4 < (tanh - exact).abs().max() < 9e-4


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("approximate", FLAVOURS)
def test_large_inputs(approximate, implementation, device):
    x = torch.tensor([[30.0, 1e4, 1e20, -30.0, -1e4, -1e20]], device=device)
    grad = torch.ones_like(x)
    if implementation == "kernel":
        dx, _ = run(gelu_backward_launch, grad, x, approximate)
    else:
        dx, _ = gelu_backward_reference(grad, x, approximate)
    assert dx.tolist() == [[1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("approximate", FLAVOURS)
def test_slope(approximate, device):
    """To float32's last digits everywhere, and relative to itself in the tail, where 1 + erf and
    1 + tanh leave nothing."""
    x = torch.linspace(-12, 12, 24001, device=device)[:, None]
    slope, _ = run(gelu_backward_launch, torch.ones_like(x), x, approximate)
    wide = x.double()
    if approximate == "tanh":
        exact = gelu_backward_reference(torch.ones_like(wide), wide, "tanh")[0]
    else:
        density = torch.exp(-(wide**2) / 2) / math.sqrt(2 * math.pi)
        exact = torch.special.erfc(-wide * math.sqrt(0.5)) / 2 + wide * density
    error = (slope - exact).abs()
    assert error.max() < 2.5e-7
    tail = (x > -12) & (x < -2) & (exact.abs() > 1e-35)
    assert (error / exact.abs())[tail].max() < 3e-5


@pytest.mark.parametrize("approximate", FLAVOURS)
def test_nan_stays_in_its_column(approximate, device):
    grad, x = draw(7, 33, torch.float32, device)
    x[2, 5] = torch.nan
    dx, dbias = run(gelu_backward_launch, grad, x, approximate)
    assert dx.isnan().nonzero().tolist() == [[2, 5]]
    assert dbias.isnan().nonzero().tolist() == [[5]]
