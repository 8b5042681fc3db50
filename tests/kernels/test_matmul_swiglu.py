import pytest
import torch
import torch.nn.functional as F
from checks import assert_right, cast, gradients, run
from matmul_checks import (
    GPU_TILES,
    TILE,
    columns,
    draw,
    over_dtypes,
    over_epilogues,
    over_tokens,
    tile_for,
)

from fusedbwd.kernels.matmul_swiglu import (
    matmul_swiglu_backward_fused,
    matmul_swiglu_backward_launch,
    matmul_swiglu_backward_reference,
    matmul_swiglu_backward_unfused,
)


def autograd(grad, weight, act, linear):
    def forward(act, linear):
        return F.linear(F.silu(act) * linear, weight)

    return torch.cat(gradients(forward, grad, act, linear), 1)


def operands(tokens, hidden, width, dtype, device):
    """grad, weight, act, linear; the last two are slices of one buffer."""
    grad, weight = draw((tokens, hidden), (hidden, width), dtype=dtype, device=device)
    act, linear = columns(width, width, tokens=tokens, dtype=dtype, device=device)
    return grad, weight / hidden**0.5, act, linear


def fused(tile):
    return lambda *args: matmul_swiglu_backward_fused(*args, tile=tile)


def check(route, args, dtype):
    actual = run(route, *args)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    expected = autograd(*cast(args, torch.float64))
    if actual.numel():
        assert_right(actual, expected, autograd(*args), dtype)


def test_reference_is_autograd():
    args = operands(127, 24, 33, torch.float64, "cpu")
    torch.testing.assert_close(
        matmul_swiglu_backward_reference(*args), autograd(*args), rtol=1e-11, atol=1e-13
    )


@over_dtypes
@over_tokens
@pytest.mark.parametrize(("hidden", "width"), [(24, 40), (33, 130)])
def test_kernel(tokens, hidden, width, dtype, loads, device):
    tile = tile_for(tokens, subtiles=4, group=1) if width == 40 else tile_for(tokens)
    check(fused(tile), operands(tokens, hidden, width, dtype, device), dtype)


@over_dtypes
@over_epilogues
def test_ways_of_the_factors(epilogue, dtype, device):
    """Two rounds of tiles a program, so that what is loaded for one is not used for another."""
    args = operands(70, 24, 88, dtype, device)
    check(fused(TILE._replace(subtiles=4, **epilogue)), args, dtype)


def test_unfused(device):
    check(
        matmul_swiglu_backward_unfused, operands(33, 24, 40, torch.float16, device), torch.float16
    )


def test_float32_goes_to_cublas(device):
    args = operands(7, 24, 40, torch.float32, device)
    actual = run(matmul_swiglu_backward_launch, *args)
    assert torch.equal(actual, run(matmul_swiglu_backward_unfused, *args))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [127, 449, 2984])
def test_kernel_at_size(tokens, device):
    args = operands(tokens, 5120, 14336, torch.bfloat16, device)
    for route in (matmul_swiglu_backward_launch, *map(fused, GPU_TILES)):
        check(route, args, torch.bfloat16)
