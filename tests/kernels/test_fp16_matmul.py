"""Matmuls on float16 parts, held to TF32 (one part) and to float32 (two), also row by row and
column by column."""

import pytest
import torch
from checks import run
from matmul_checks import LARGER_TILE

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.fp16_matmul import (
    fp16_matmul_fused,
    fp16_matmul_launch,
    fp16_matmul_reference,
)
from fusedbwd.kernels.fp16_parts import fp16_parts_launch, fp16_parts_reference
from fusedbwd.numerics import rounding_unit
from fusedbwd.precision import to_tf32

over_parts = pytest.mark.parametrize("parts", [1, 2])


def fused(tile):
    return lambda *args: fp16_matmul_fused(*args, tile=tile)


def split(t, parts):
    """Its parts, seen in its layout, with maxima and flags: by the kernel where there is a GPU."""
    by_rows = t.stride(1) == 1
    split = fp16_parts_launch if t.is_cuda else fp16_parts_reference
    results = run(split, [t if by_rows else t.t()], parts)
    return [r if by_rows or r.dim() == 1 else r.t() for r in results]


def product(multiply, a, b, parts, residual=None):
    out = run(multiply, a, b, split(a, parts), split(b, parts), residual)
    assert out.dtype == torch.float32 and out.is_contiguous()
    return out


def errors(actual, expected):
    """Relative L2 errors: of the whole; of rows and of columns, their root mean square and the
    worst."""
    difference, found = actual.double() - expected, []
    for dim in ((0, 1), 1, 0):
        scale = expected.norm(dim=dim).reshape(-1)
        each = difference.norm(dim=dim).reshape(-1) / scale.clamp(min=1e-300)
        found += [each.square().mean().sqrt(), each.max()]
    return torch.stack(found[1:])


def assert_as_exact(actual, a, b, parts, residual=None):
    """One part: as TF32, whose operands have the same values; two: twice float32's own error."""
    added = 0 if residual is None else residual
    expected = a.double() @ b.double() + added
    if parts == 1:
        allowed = 1.02 * errors(to_tf32(a) @ to_tf32(b) + added, expected) + 1e-6
    else:
        allowed = 2 * errors(a @ b + added, expected)
    found = errors(actual, expected)
    unit = torch.tensor(rounding_unit(torch.float32), dtype=torch.float64, device=found.device)
    assert (found <= allowed.maximum(2 * unit)).all(), (found, allowed)


def operands(rows, depth, columns, device, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, depth, device=device), torch.randn(depth, columns, device=device)


@over_parts
@pytest.mark.parametrize("layout", ["dgrad", "wgrad", "both transposed"])
@pytest.mark.parametrize("shape", [(72, 200, 88), (33, 50, 41)], ids=["described", "odd"])
def test_kernel(shape, layout, parts, device):
    a, b = operands(*shape, device)
    a = a if layout == "dgrad" else a.t().contiguous().t()
    b = b.t().contiguous().t() if layout == "both transposed" else b
    tile = LARGER_TILE._replace(subtiles=2)
    assert_as_exact(product(fused(tile), a, b, parts), a, b, parts)


@over_parts
def test_long_sums(parts, device):
    """Over several partial sums; one tile by one program, the other by two."""
    a, b = operands(33, 1100, 100, device)
    assert_as_exact(product(fused(LARGER_TILE), a, b, parts), a, b, parts)


@over_parts
@pytest.mark.parametrize("multiply", [fused(LARGER_TILE), fp16_matmul_reference])
def test_residual(multiply, parts, device):
    a, b = operands(33, 48, 40, device)
    residual = torch.randn(33, 48, device=device)[:, 3:43]
    assert_as_exact(product(multiply, a, b, parts, residual), a, b, parts, residual)


@pytest.mark.parametrize("shape", [(0, 48, 40), (33, 0, 40)], ids=str)
def test_empty(shape, device):
    a, b = operands(*shape, device)
    assert torch.equal(
        product(fused(LARGER_TILE), a, b, 1), torch.zeros(shape[0], 40, device=device)
    )


def scaled(left, right):
    return lambda a, b: (a * left, b * right)


def wide(a, b):
    """Magnitudes over 24 powers of two in both."""
    return a * torch.exp2(-24 * torch.rand_like(a)), b * torch.exp2(-24 * torch.rand_like(b))


def outlier(size):
    def change(a, b):
        a[3, 5] = size
        b[7, 2] = -size
        return a, b

    return change


def small_rows(a, b):
    """Tokens that hardly count, and channels."""
    a[::3] *= 1e-12
    b[:, 5] *= 1e-14
    return a, b


def sparse(a, b):
    a[torch.rand_like(a) < 0.9] = 0
    a[4], b[:, 6] = 0, 0
    return a, b


def gelu(a, b):
    """Values that fade away below zero, beside large ones."""
    return torch.nn.functional.gelu(5 * a), b


OPERANDS = {
    "1e-30, 1": scaled(1e-30, 1),
    "1e30, 1": scaled(1e30, 1),
    "1e30, 1e-30": scaled(1e30, 1e-30),
    "1e-18, 1e-18": scaled(1e-18, 1e-18),
    "1e-42, 1e30": scaled(1e-42, 1e30),
    "2^24": wide,
    "2^24, outlier 100": lambda a, b: outlier(100.0)(*wide(a, b)),
    "outlier 1e4": outlier(1e4),
    "outlier 1e15": outlier(1e15),
    "small rows": small_rows,
    "sparse": sparse,
    "zeros": scaled(0, 1),
    "gelu": gelu,
}


@over_parts
@pytest.mark.parametrize("multiply", [fused(LARGER_TILE), fp16_matmul_reference])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name, multiply, parts, device):
    a, b = OPERANDS[name](*operands(40, 192, 50, device))
    assert_as_exact(product(multiply, a, b, parts), a, b, parts)


@over_parts
@pytest.mark.parametrize("multiply", [fused(LARGER_TILE), fp16_matmul_reference])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_not_finite(value, multiply, parts, device):
    """They land where float32 puts them: through a zero, an infinity becomes NaN."""
    a, b = operands(33, 48, 40, device)
    a[2, 3], b[7, 5], b[3, 9] = value, -value, 0.0
    actual, expected = product(multiply, a, b, parts), a @ b
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    assert torch.equal(actual.sign()[actual.isinf()], expected.sign()[expected.isinf()])
    finite = expected.isfinite()
    assert 0 < finite.sum() < finite.numel()
    torch.testing.assert_close(actual[finite], expected[finite])


@over_parts
def test_overflow_and_underflow_of_the_product(parts, device):
    a, b = operands(16, 32, 32, device)
    assert (product(fused(LARGER_TILE), a * 1e-30, b * 1e-30, parts) == 0).all()
    large = product(fused(LARGER_TILE), a.abs() * 1e30, b.abs() * 1e30, parts)
    assert (large == torch.inf).all()


def test_parts_must_agree(device):
    a, b = operands(4, 4, 4, device)
    with pytest.raises(UnsupportedError, match="got 1 and 2"):
        run(fp16_matmul_launch, a, b, split(a, 1), split(b, 2), None)


@pytest.mark.gpu
@over_parts
@pytest.mark.parametrize("unsafe", [False, True], ids=["float16", "float32"])
@pytest.mark.parametrize("tokens", [131, 14_704])
def test_at_size(tokens, unsafe, parts, device):
    """The FFN's four: both input gradients, both weight gradients."""
    torch.manual_seed(0)
    wide, narrow = (torch.randn(tokens, n, device=device) for n in (2048, 512))
    fc1, fc2 = (torch.randn(*s, device=device) for s in ((2048, 512), (512, 2048)))
    if unsafe:
        narrow[5] *= 1e-14
        wide[5] *= 1e-14
    for a, b in ((narrow, fc2), (wide, fc1), (narrow.t(), wide), (wide.t(), narrow)):
        assert_as_exact(product(fp16_matmul_launch, a, b, parts), a, b, parts)
