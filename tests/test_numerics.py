"""The error measure and the budget that everything else is judged by."""

import math

import pytest
import torch

from fusedbwd.errors import InputError
from fusedbwd.numerics import budget, relative_l2, rounding_unit, statistics_dtype, within


def test_relative_l2_is_the_ratio_of_norms():
    expected = torch.tensor([3.0, 4.0])
    assert relative_l2(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_l2(1e-20 * torch.ones(3), 2e-20 * torch.ones(3)) == pytest.approx(0.5)


def test_relative_l2_does_not_round_in_the_inputs_dtype():
    expected = torch.full((4096,), 1.0, dtype=torch.float64)
    actual = torch.full((4096,), 1.0078125, dtype=torch.bfloat16)
    assert relative_l2(actual, expected) == pytest.approx(0.0078125, rel=1e-12)


def test_empty_and_zero_references():
    zeros = torch.zeros(4)
    assert relative_l2(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    assert relative_l2(zeros, zeros) == 0.0
    assert relative_l2(torch.full((4,), 1e-30), zeros) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_never_pass(bad):
    good, broken = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    for actual, expected in ((broken, good), (good, broken), (broken, broken)):
        error = relative_l2(actual, expected)
        assert not within(error, budget(error, torch.float32))
        assert not within(error, math.inf)
    assert not within(math.nan, 1.0)


def test_shapes_must_agree():
    with pytest.raises(InputError, match=r"\(3,\).*\(1, 3\)"):
        relative_l2(torch.ones(3), torch.ones(1, 3))


def test_budget():
    assert rounding_unit(torch.bfloat16) == 2.0**-8
    assert budget(0.1, torch.bfloat16) == pytest.approx(0.12)
    assert budget(0.1, torch.float32) == pytest.approx(0.2)
    assert budget(0.1, torch.float32, torch.bfloat16) == pytest.approx(0.12)
    assert budget(0.0, torch.float16) == 2.0**-11
    assert budget(0.0, torch.float32, torch.bfloat16) == 2.0**-24
    assert budget(math.nan, torch.float32) == budget(math.inf, torch.float32) == 2.0**-24


def test_statistics_are_at_least_fp32():
    assert statistics_dtype(torch.bfloat16) == statistics_dtype(torch.float32) == torch.float32
    assert statistics_dtype(torch.float64) == torch.float64
