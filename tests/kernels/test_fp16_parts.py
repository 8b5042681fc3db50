import pytest
import torch
from checks import run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels import _op
from fusedbwd.kernels.fp16_parts import (
    PART_SCALE,
    fp16_parts_launch,
    fp16_parts_reference,
    results_per_tensor,
    scale_exponent,
)

implementations = pytest.mark.parametrize("split", [fp16_parts_reference, fp16_parts_launch])
over_parts = pytest.mark.parametrize("parts", [1, 2])

UNIT = {1: 2.0**-11, 2: 2.0**-22}  # the largest relative error of an element


@pytest.fixture(autouse=True)
def fewer_programs(few_programs, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(_op, "_DEFAULT_SM_COUNT", 1)


def draw(*shape, device, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape, device=device)


def by_tensor(results, parts):
    each = results_per_tensor(parts)
    return [results[i : i + each] for i in range(0, len(results), each)]


def joined(results):
    """What the parts stand for, in float64."""
    *halves, sample, maxima, _ = results
    total = sum(h.double() / PART_SCALE**i for i, h in enumerate(halves))
    return torch.ldexp(total, total.new_tensor(-scale_exponent(sample, maxima)))


def is_unsafe(results):
    return bool(results[-1].any())


def assert_right(results, x, parts):
    """Every element to its last bit, and safe."""
    assert not is_unsafe(results)
    assert all(h.dtype == torch.float16 and h.is_contiguous() for h in results[:parts])
    assert all(h.shape == x.shape for h in results[:parts])
    error = (joined(results) - x.double()).abs()
    assert (error <= UNIT[parts] * x.double().abs()).all()


@over_parts
@implementations
def test_several_tensors(split, parts, device):
    """Smaller than a block of 64 x 64, larger and ragged, empty, and a vector."""
    xs = [draw(*shape, device=device) for shape in ((3, 5), (70, 2, 65), (0, 7), (130,))]
    for count in (1, 4):
        results = by_tensor(run(split, xs[:count], parts), parts)
        for result, x in zip(results, xs, strict=False):
            assert_right(result, x, parts)


@over_parts
@implementations
def test_uniform_scaling(split, parts, device):
    """Sixty decades, and float32's ends: the parts are the same, to the bit, for powers of two."""
    x = draw(33, 70, device=device)
    halves = run(split, [x], parts)[:parts]
    for exponent in (-100, 60):
        scaled = run(split, [x * 2.0**exponent], parts)
        assert_right(scaled, x * 2.0**exponent, parts)
        assert all(map(torch.equal, scaled, halves))
    for factor in (1e-30, 1e30, 3e38 / x.abs().max().item()):
        assert_right(run(split, [x * factor], parts), x * factor, parts)


@over_parts
@implementations
def test_dynamic_range(split, parts, device):
    magnitude = torch.exp2(-24 * torch.rand(70, 65, device=device))
    magnitude[0, 0], magnitude[1, 1] = 1.0, 2.0**-24
    x = magnitude * draw(70, 65, device=device).sign()
    assert_right(run(split, [x], parts), x, parts)


@over_parts
@implementations
def test_zeros_and_denormals(split, parts, device):
    zero = torch.zeros(5, 70, device=device)
    x = draw(5, 70, device=device) * 1e-40
    assert 0 < x.abs().max() < torch.finfo(torch.float32).tiny
    least = torch.full((2, 3), 1.401298464324817e-45, device=device)
    sparse = zero.clone()
    sparse[2, 3] = 1e20
    results = run(split, [zero, x, least, sparse], parts)
    for result, t in zip(by_tensor(results, parts), (zero, x, least, sparse), strict=True):
        assert_right(result, t, parts)


@over_parts
@implementations
def test_outliers(split, parts, device):
    """What loses bits beside much larger elements is safe; where an outlier takes bits away from
    all others, it is not."""
    for outlier, safe in ((1e6, True), (1e-20, True), (1e12, False)):
        x = draw(70, 130, device=device)
        x[3, 5] = outlier
        result = run(split, [x], parts)
        assert is_unsafe(result) != safe
        if safe:
            x[3, 5] = 0
            rest = joined(result)
            rest[3, 5] = 0
            assert (rest - x).norm() <= UNIT[parts] * x.norm()


@pytest.mark.parametrize("value", [30.0, 1e4, torch.inf], ids=str)
def test_what_the_sample_did_not_foretell(value, device):
    """Most blocks of this tensor are not in the sample here; on a GPU, all are."""
    x = draw(1536, 128, device=device)
    x[33, 5] = value  # in the second block of 4096 elements
    first, sample, maxima, flags = run(fp16_parts_launch, [x], 1)
    assert maxima.max() == value
    if not torch.cuda.is_available():
        assert sample.max() < 6
    assert bool(flags.any()) == (value == torch.inf)
    if value < torch.inf:
        assert first.isfinite().all()
        error = (joined([first, sample, maxima, flags]) - x).abs()
        x[33, 5] = 0
        assert error.norm() <= UNIT[1] * x.norm()


def test_a_sample_of_zeros(device):
    x = torch.zeros(1536, 128, device=device)
    x[33:36] = draw(3, 128, device=device) * 1e5
    assert_right(run(fp16_parts_launch, [x], 2), x, 2)


@over_parts
@implementations
@pytest.mark.parametrize("dim", [0, 1], ids=["row", "column"])
def test_a_small_row_or_column(split, parts, dim, device):
    """It would lose bits that no larger element beside it covers up."""
    x = draw(130, 130, device=device)
    x.select(dim, 129).mul_(2.0**-32)
    assert is_unsafe(run(split, [x], parts))
    x.select(dim, 129).zero_()
    assert_right(run(split, [x], parts), x, parts)


@over_parts
@implementations
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_not_finite(split, parts, value, device):
    x = draw(70, 65, device=device)
    x[69, 64] = value
    assert is_unsafe(run(split, [x], parts))
    assert is_unsafe(run(split, [torch.full((2, 2), value, device=device)], parts))


@over_parts
def test_kernel_and_reference_agree_on_what_is_unsafe(parts, device):
    """Rows of many magnitudes, some elements far below their row's."""
    torch.manual_seed(parts)
    found = set()
    for power in (2, 18, 30):
        x = draw(67, 70, device=device, seed=power)
        x *= torch.exp2(-power * torch.rand(67, 1, device=device))
        x[:, ::3] *= 2.0**-18
        results = [run(split, [x], parts) for split in (fp16_parts_launch, fp16_parts_reference)]
        assert is_unsafe(results[0]) == is_unsafe(results[1])
        assert all(map(torch.equal, results[0][:parts], results[1][:parts]))
        found.add(is_unsafe(results[0]))
    assert found == {False, True}


@implementations
def test_layouts(split, device):
    x = draw(6, 8, device=device)
    xs = [x.t(), x[:, 2:5], x[0].expand(4, 8)]
    for result, strided in zip(by_tensor(run(split, xs, 2), 2), xs, strict=True):
        assert_right(result, strided, 2)


def test_too_many(device):
    with pytest.raises(UnsupportedError, match="got 5"):
        run(fp16_parts_launch, [draw(2, device=device)] * 5, 1)


@pytest.mark.gpu
@over_parts
def test_at_size(parts, device):
    """A weight and the input of its linear."""
    xs = [draw(2048, 512, device=device), draw(14_705, 2048, device=device)]
    results = by_tensor(run(fp16_parts_launch, xs, parts), parts)
    for result, x in zip(results, xs, strict=True):
        assert not is_unsafe(result)
        assert (joined(result) - x).norm() <= UNIT[parts] * x.norm()
