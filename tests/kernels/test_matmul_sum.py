import pytest
import torch
from checks import assert_right, run
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

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.matmul_sum import (
    sum_matmul_fused,
    sum_matmul_launch,
    sum_matmul_reference,
    sum_matmul_unfused,
)

DEPTHS = [(40,), (48, 24), (33, 7, 70)]


def operands(tokens, depths, width, dtype, device):
    a = list(columns(*depths, tokens=tokens, dtype=dtype, device=device))
    b = draw(*((depth, width) for depth in depths), dtype=dtype, device=device)
    (residual,) = draw((tokens, width), dtype=dtype, device=device, seed=1)
    return a, b, residual


def wide(tensors):
    return [t.double() for t in tensors]


def check(route, a, b, residual, out_dtype, compute_dtype):
    actual = run(route, a, b, residual, out_dtype)
    residual_wide = None if residual is None else residual.double()
    expected = sum_matmul_reference(wide(a), wide(b), residual_wide, torch.float64)
    assert actual.dtype == out_dtype
    assert actual.is_contiguous()
    if actual.numel():
        own = sum_matmul_unfused(a, b, residual, out_dtype)
        assert_right(actual, expected, own, compute_dtype)
    return actual


def fused(tile):
    return lambda *args: sum_matmul_fused(*args, tile=tile)


@over_dtypes
@over_tokens
@pytest.mark.parametrize("depths", DEPTHS, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_kernel(tokens, depths, split, dtype, loads, device):
    a, b, residual = operands(tokens, depths, 40, dtype, device)
    check(fused(tile_for(tokens, split=split, subtiles=2)), a, b, residual, dtype, dtype)


@pytest.mark.parametrize("programs_per_sm", [1, 2, 5])
@pytest.mark.parametrize("width", [32, 33, 100])
def test_tiles_left_over_are_split(width, programs_per_sm, device):
    """More programs than tiles, fewer, and none left over: every way of sharing them out."""
    for tokens in (16, 33, 80):
        a, b, _ = operands(tokens, (32, 17), width, torch.float32, device)
        tile = TILE._replace(split=True, programs_per_sm=programs_per_sm, group=2)
        whole = run(fused(tile._replace(split=False)), a, b, None, torch.float32)
        torch.testing.assert_close(check(fused(tile), a, b, None, torch.float32, None), whole)


@over_dtypes
@over_epilogues
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_ways_of_the_residual(epilogue, split, dtype, device):
    """Ahead not of split tiles. Two rounds of tiles a program, so that what is loaded for one is
    not used for another; without a residual there is nothing to load."""
    a, b, residual = operands(70, (40, 24), 88, dtype, device)
    route = fused(TILE._replace(subtiles=4, split=split, **epilogue))
    check(route, a, b, residual.float(), dtype, dtype)
    check(route, a, b, None, dtype, dtype)


@pytest.mark.parametrize("residual_dtype", [None, torch.float16, torch.float32])
def test_residual_and_result_of_other_dtypes(residual_dtype, device):
    a, b, residual = operands(33, (48,), 40, torch.float16, device)
    residual = None if residual_dtype is None else residual.to(residual_dtype)
    for route in (fused(TILE), sum_matmul_unfused):
        check(route, a, b, residual, torch.float32, torch.float16)
        check(route, a, b, residual, torch.float16, torch.float16)


def test_sum_is_rounded_once(device):
    """fp16 steps by 2 here: rounded on the way, each 0.75 would be lost."""
    a = [torch.full((1, 16), 1.0, dtype=torch.float16, device=device) for _ in range(3)]
    b = [torch.zeros(16, 8, dtype=torch.float16, device=device) for _ in range(3)]
    for weight, value in zip(b, (2048.0, 0.75, 0.75), strict=True):
        weight[0] = value
    assert run(fused(TILE), a, b, None, torch.float16).tolist() == [[2050.0] * 8]


def test_neighbours_in_the_packed_buffer_are_not_read(loads, device):
    """Columns and rows past an operand's end may hold anything."""
    packed = torch.full((7, 48), torch.nan, device=device)
    packed[:, :20] = draw((7, 20), dtype=torch.float32, device=device)[0]
    weight = torch.full((48, 64), torch.nan, device=device)
    weight[:20, :40] = draw((20, 40), dtype=torch.float32, device=device)[0]
    check(fused(TILE), [packed[:, :20]], [weight[:20, :40]], None, torch.float32, None)


def test_float32_goes_to_cublas(device):
    a, b, residual = operands(7, (48, 24), 40, torch.float32, device)
    actual = run(sum_matmul_launch, a, b, residual, torch.float32)
    assert torch.equal(actual, sum_matmul_unfused(a, b, residual, torch.float32))


def test_too_many_pairs(device):
    a, b, _ = operands(7, (8, 8, 8, 8), 16, torch.float16, device)
    with pytest.raises(UnsupportedError, match="got 4 a and 4 b"):
        run(fused(TILE), a, b, None, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [127, 449, 2984])
@pytest.mark.parametrize("depths", [(14336, 14336), (5120, 1280, 1280)], ids=str)
def test_kernel_at_size(tokens, depths, device):
    a, b, residual = operands(tokens, depths, 5120, torch.bfloat16, device)
    for route in (sum_matmul_launch, *map(fused, GPU_TILES)):
        check(route, a, b, residual, torch.bfloat16, torch.bfloat16)
