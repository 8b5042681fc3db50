import pytest
import torch
from checks import assert_right, run
from matmul_checks import TILE, columns, draw, over_dtypes, over_tokens, tile_for

from fusedbwd.kernels.matmul_weight_grad import (
    weight_grad_fused,
    weight_grad_launch,
    weight_grad_reference,
    weight_grad_unfused,
)


def fused(tile):
    return lambda *args: weight_grad_fused(*args, tile=tile)


def check(route, a, b, out_dtype, compute_dtype):
    actual = run(route, a, b, out_dtype)
    expected = weight_grad_reference(a.double(), b.double(), torch.float64)
    assert actual.dtype == out_dtype
    assert actual.is_contiguous()
    assert_right(actual, expected, weight_grad_unfused(a, b, out_dtype), compute_dtype)
    return actual


@over_dtypes
@over_tokens
@pytest.mark.parametrize(("height", "width"), [(24, 40), (33, 130)])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_kernel(tokens, height, width, split, dtype, loads, device):
    a, _, b = columns(height, 8, width, tokens=tokens, dtype=dtype, device=device)
    for out_dtype in {dtype, torch.float32}:
        check(fused(tile_for(tokens, split=split, subtiles=2)), a, b, out_dtype, dtype)


def test_one_tile_is_shared_by_all_programs(device):
    """And the shares are added up in one order: results repeat to the bit."""
    a, b = columns(16, 32, tokens=449, dtype=torch.float16, device=device)
    tile = TILE._replace(split=True, programs_per_sm=4)
    first, second = (check(fused(tile), a, b, torch.float32, torch.float16) for _ in range(2))
    assert torch.equal(first, second)
    whole = run(fused(tile._replace(split=False)), a, b, torch.float32)
    assert not torch.equal(first, whole)  # another order of adding: it was split


def test_layouts(loads, device):
    a, b = draw((33, 24), (33, 40), dtype=torch.float16, device=device)
    expected = run(fused(TILE), a, b, torch.float16)
    for strided in (a.t().contiguous().t(), torch.cat([a, a], 1)[:, :24], a.repeat(2, 1)[:33]):
        assert torch.equal(run(fused(TILE), strided, b, torch.float16), expected)
    row = a[:1].expand(33, 24)
    assert torch.equal(
        run(fused(TILE), row, b, torch.float16), run(fused(TILE), row.clone(), b, torch.float16)
    )


def test_float32_goes_to_cublas(device):
    a, b = draw((7, 24), (7, 40), dtype=torch.float32, device=device)
    actual = run(weight_grad_launch, a, b, torch.float32)
    assert torch.equal(actual, weight_grad_unfused(a, b, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "height", "width"),
    [(449, 1280, 5120), (2984, 512, 2048), (69_568, 2048, 512), (1025, 5120, 14336)],
)
def test_kernel_at_size(tokens, height, width, out_dtype, device):
    a, b = columns(height, width, tokens=tokens, dtype=torch.bfloat16, device=device)
    check(weight_grad_launch, a, b, out_dtype, None)
