"""SwiGLU's backward in the epilogue of the down projection's input gradient."""

import pytest
import torch
import torch.nn.functional as F
from harness import WIDTH

PATTERN = "matmul_swiglu_backward"

FIRST = {"swiglu_backward": 1}


def down(g, u, v):
    return F.linear(F.silu(g) * u, v)


def shapes_of(fn, **given):
    tokens = ("b", "s", WIDTH)
    default = {"g": tokens, "u": tokens, "x": tokens, "v": (WIDTH - 1, WIDTH)}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return {n: given.get(n, default[n[0]]) for n in names}


@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_fires(check, dtype, dynamic):
    check(down, shapes_of(down), dtype, dynamic=dynamic, fires=FIRST | {PATTERN: 1})


@pytest.mark.parametrize("tokens", [("t",), ("b", 2, "s"), (1,)], ids=str)
def test_ranks(check, tokens):
    shapes = shapes_of(down) | dict.fromkeys("gu", (*tokens, WIDTH))
    dynamic = any(isinstance(s, str) for s in tokens)
    check(down, shapes, torch.bfloat16, dynamic=dynamic, fires=FIRST | {PATTERN: 1})


def test_frozen_weight(check):
    check(down, shapes_of(down), torch.bfloat16, frozen=("v",), fires=FIRST | {PATTERN: 1})


def test_the_sum_after_it(check):
    """Both halves of its result go on to the sum of the projections' gradients."""

    def fn(x, v1, v2, v3):
        return F.linear(F.silu(F.linear(x, v1)) * F.linear(x, v2), v3)

    shapes = shapes_of(fn, v1=(WIDTH, WIDTH), v2=(WIDTH, WIDTH))
    check(fn, shapes, torch.bfloat16, fires=FIRST | {PATTERN: 1, "sum_matmul": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes(check, dtype):
    report = check(down, shapes_of(down), dtype, fires=FIRST | {PATTERN: 0})
    assert "left to the library's matmuls" in report.missed[0].reason


def test_product_used_elsewhere(check):
    """Where the hidden value has another use, its gradient is a sum and no matmul's result."""

    def fn(g, u, v):
        hidden = F.silu(g) * u
        return F.linear(hidden, v).sum(-1, keepdim=True) + hidden

    check(fn, shapes_of(fn), torch.bfloat16, fires=FIRST | {PATTERN: 0})


def test_something_in_between(check):
    def fn(g, u, v):
        return F.linear(2 * (F.silu(g) * u), v)

    check(fn, shapes_of(fn), torch.bfloat16, fires=FIRST | {PATTERN: 0})


def test_transposed_weight(check):
    def fn(g, u, v):
        return (F.silu(g) * u) @ v

    report = check(fn, shapes_of(fn, v=(WIDTH, WIDTH)), torch.bfloat16, fires=FIRST | {PATTERN: 0})
    assert "has strides" in report.missed[0].reason


def test_product_split_another_way(check):
    """[30, 32] viewed as [15, 64], as heads are."""

    def fn(g, u, v):
        return F.linear((F.silu(g) * u).view(3, 5, 2, 32), v)

    shapes = {"g": (3, 5, 64), "u": (3, 5, 64), "v": (24, 32)}
    report = check(fn, shapes, torch.bfloat16, fires=FIRST)
    assert "is [30, 32]" in report.missed[0].reason
