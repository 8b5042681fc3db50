"""What follows a rewritten result may read how it lies in memory."""

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, arguments_of

PATTERN = "geglu_backward"


def as_strided(grad):
    return 2 * grad.as_strided(grad.shape, torch.empty(grad.shape).stride())


@torch.library.custom_op("fusedbwd_tests::takes_any", mutates_args=())
def takes_any(grad: torch.Tensor) -> torch.Tensor:
    return 2 * grad.contiguous()


@takes_any.register_fake
def _(grad):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


@torch.library.custom_op("fusedbwd_tests::takes_contiguous", mutates_args=())
def takes_contiguous(grad: torch.Tensor) -> torch.Tensor:
    assert grad.is_contiguous()
    return 2 * grad


@takes_contiguous.register_fake
def _(grad):
    if not grad.is_contiguous():
        raise RuntimeError("takes contiguous tensors")
    return torch.empty_like(grad)


@torch.library.custom_op(
    "fusedbwd_tests::by_order", mutates_args=(), tags=[torch.Tag.needs_fixed_stride_order]
)
def by_order(grad: torch.Tensor) -> torch.Tensor:
    return 2 * grad.contiguous()


@by_order.register_fake
def _(grad):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def through(backward):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Doubled.apply


@KINDS
@pytest.mark.parametrize(
    "backward",
    [as_strided, takes_contiguous, by_order],
    ids=["as_strided", "custom, contiguous", "custom, by order"],
)
@pytest.mark.parametrize("viewed", [False, True])
def test_what_reads_how_its_operand_lies(check, backward, viewed, dtype, dynamic):
    """The gradient, or a view of it, would be read as if it lay otherwise."""

    def fn(g, u):
        f = through(backward)
        return F.gelu(f(g.unsqueeze(0)).squeeze(0) if viewed else f(g)) * u

    report = check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=0)
    (miss,) = report.near_misses()[PATTERN]
    assert "may read how its operand lies" in miss.reason


@KINDS
def test_a_custom_op_that_takes_any_layout(check, dtype, dynamic):
    def fn(g, u):
        return F.gelu(through(takes_any)(g)) * u

    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


def test_a_view_as_complex_numbers(check):
    def fn(g, u):
        def backward(grad):
            return 2 * torch.view_as_real(
                torch.view_as_complex(grad.unflatten(-1, (-1, 2)))
            ).flatten(-2)

        return F.gelu(through(backward)(g)) * u

    check(fn, arguments_of(fn, g=("b", "s", 34), u=("b", "s", 34)), fires=1)
