import pytest
import torch
from checks import ROUNDED, run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.rounding import round_to_launch, round_to_reference

# Around a block of 4096 elements, and empty.
SHAPES = [(3, 5), (4096,), (0, 7), (1, 4097)]

implementations = pytest.mark.parametrize("round_to", [round_to_reference, round_to_launch])


def draw(shape, device):
    return torch.randn(shape, device=device)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@implementations
def test_rounds(round_to, count, device):
    torch.manual_seed(count)
    xs = [draw(shape, device) for shape in SHAPES[:count]]
    for rounded, x in zip(run(round_to, xs, ROUNDED), xs, strict=True):
        assert rounded.dtype == ROUNDED
        assert torch.equal(rounded, x.to(ROUNDED))


@implementations
def test_ties_and_special_values(round_to, device):
    """Ties go to the neighbour whose last bit is 0."""
    unit = torch.finfo(ROUNDED).eps
    largest = torch.finfo(ROUNDED).max
    values = [1 + unit / 2, 1 + 3 * unit / 2, -1 - unit / 2, 1 + 0.51 * unit, 1e-30, torch.inf]
    expected = torch.tensor(values).to(ROUNDED).tolist()
    assert expected[:4] == [1.0, 1 + 2 * unit, -1.0, 1 + unit]
    assert run(round_to, [torch.tensor(values, device=device)], ROUNDED)[0].tolist() == expected
    extremes = torch.tensor([largest * (1 + unit), torch.nan], device=device)
    overflow, nan = run(round_to, [extremes], ROUNDED)[0].tolist()
    assert overflow == torch.inf
    assert nan != nan


@implementations
def test_layouts(round_to, device):
    x = draw((6, 8), device)
    xs = [x.t(), x[:, 2:5], x[0].expand(4, 8)]
    for rounded, strided in zip(run(round_to, xs, torch.float16), xs, strict=True):
        assert rounded.is_contiguous()
        assert torch.equal(rounded, strided.half())


def test_too_many(device):
    with pytest.raises(UnsupportedError, match="got 5"):
        run(round_to_launch, [draw((2,), device)] * 5, torch.bfloat16)


@pytest.mark.gpu
def test_at_size(device):
    """A weight and the input of its linear."""
    xs = [draw((2048, 512), device), draw((14_705, 2048), device)]
    for rounded, x in zip(run(round_to_launch, xs, torch.bfloat16), xs, strict=True):
        assert torch.equal(rounded, x.bfloat16())
