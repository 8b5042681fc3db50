import pytest
import torch
import torch.nn.functional as F
from checks import assert_right, assert_same_formula, cast, gradients, run
from matmul_checks import (
    GPU_TILES,
    TILE,
    draw,
    over_dtypes,
    over_epilogues,
    over_tokens,
    tile_for,
)

from fusedbwd.kernels.matmul_gelu import (
    matmul_gelu_backward_fused,
    matmul_gelu_backward_launch,
    matmul_gelu_backward_reference,
    matmul_gelu_backward_unfused,
)

FLAVOURS = ["tanh", "none"]
over_flavours = pytest.mark.parametrize("approximate", FLAVOURS)


def autograd(grad, weight, x, approximate):
    def forward(x):
        return F.linear(F.gelu(x, approximate=approximate).to(weight.dtype), weight)

    (dx,) = gradients(forward, grad, x)
    return dx.to(grad.dtype), dx.sum(0)


def operands(tokens, hidden, width, dtype, device):
    """grad, weight, x"""
    grad, weight, x = draw(
        (tokens, hidden), (hidden, width), (tokens, width), dtype=dtype, device=device
    )
    return grad, weight / hidden**0.5, x


def fused(tile):
    return lambda *args: matmul_gelu_backward_fused(*args, tile=tile)


def check(route, args, dtype):
    dx, dbias = run(route, *args)
    assert dx.dtype == dtype
    assert dx.is_contiguous()
    assert dbias.dtype == torch.float32
    if len(dx):
        expected = autograd(*cast(args, torch.float64))
        assert_right((dx, dbias), expected, autograd(*args), dtype)
    else:
        assert dbias.tolist() == [0.0] * len(dbias)


@over_flavours
def test_reference_is_autograd(approximate):
    args = *operands(127, 24, 33, torch.float64, "cpu"), approximate
    assert_same_formula(matmul_gelu_backward_reference(*args), autograd(*args))


@over_flavours
@over_dtypes
@over_tokens
@pytest.mark.parametrize(("hidden", "width"), [(24, 40), (33, 130)])
def test_kernel(tokens, hidden, width, approximate, dtype, loads, device):
    args = *operands(tokens, hidden, width, dtype, device), approximate
    tile = tile_for(tokens, subtiles=4, group=1) if width == 40 else tile_for(tokens)
    check(fused(tile), args, dtype)


@over_dtypes
@over_epilogues
def test_ways_of_x(epilogue, dtype, device):
    """Two rounds of tiles a program, so that what is loaded for one is not used for another."""
    args = *operands(70, 24, 88, dtype, device), "tanh"
    check(fused(TILE._replace(subtiles=4, **epilogue)), args, dtype)


@over_flavours
def test_x_in_float32(approximate, device):
    """What a float32 model under reduced matmul precision hands over."""
    grad, weight, x = operands(33, 24, 40, torch.float32, device)
    args = grad.half(), weight.half(), x, approximate
    ahead = TILE._replace(subtiles=2, early=1)
    staged = TILE._replace(subtiles=2, staged=True)
    for route in (fused(TILE), fused(ahead), fused(staged), matmul_gelu_backward_unfused):
        check(route, args, torch.float16)


def test_bias_gradient_ignores_rows_that_are_not_there(device):
    """A weight that is infinite makes zeros past the last token into NaN."""
    grad, weight, x = operands(7, 24, 40, torch.float32, device)
    grad = grad.abs() + 1
    weight[:, 3] = torch.inf
    x[:, 3] = 2.0
    for tile in (TILE, TILE._replace(staged=True)):
        _, dbias = run(fused(tile), grad, weight, x, "tanh")
        assert dbias[3] == torch.inf
        assert dbias[:3].isfinite().all()


def test_float32_goes_to_cublas(device):
    args = *operands(7, 24, 40, torch.float32, device), "tanh"
    actual = run(matmul_gelu_backward_launch, *args)
    expected = run(matmul_gelu_backward_unfused, *args)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.gpu
@over_flavours
@pytest.mark.parametrize("tokens", [613, 2984, 14_704])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernel_at_size(tokens, approximate, x_dtype, device):
    grad, weight, x = operands(tokens, 512, 2048, torch.bfloat16, device)
    args = grad, weight, x.to(x_dtype), approximate
    for route in (matmul_gelu_backward_launch, *map(fused, GPU_TILES)):
        check(route, args, torch.bfloat16)
