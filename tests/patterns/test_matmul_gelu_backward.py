"""GELU's backward in the epilogue of the second projection's input gradient."""

import pytest
import torch
import torch.nn.functional as F
from harness import WIDTH

from fusedbwd import Config
from fusedbwd.precision import MEDIUM

PATTERN = "matmul_gelu_backward"

FIRST = {"gelu_backward": 1}
# The sums of matmuls that follow are not what is tested here.
CONFIG = Config(verify=True, sum_matmul=False)


def ffn(x, b, v):
    return F.linear(F.gelu(x + b, approximate="tanh"), v)


def exact(x, b, v):
    return F.linear(F.gelu(x + b), v)


def shapes_of(fn, **given):
    default = {"x": ("b", "s", WIDTH), "b": (WIDTH,), "v": (WIDTH - 1, WIDTH)}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return {n: given.get(n, default[n[0]]) for n in names}


@pytest.mark.parametrize("fn", [ffn, exact])
@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_fires(check, fn, dtype, dynamic):
    check(fn, shapes_of(fn), dtype, dynamic=dynamic, config=CONFIG, fires=FIRST | {PATTERN: 1})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_float32_on_rounded_operands(check, dynamic):
    """Under "medium" the matmuls have bfloat16 operands, and so has what this gives."""
    fires = FIRST | {PATTERN: 1, "bf16_matmuls": 4}

    def fn(x, v1, b, v2):
        return F.linear(F.gelu(F.linear(x, v1, b)), v2)

    shapes = shapes_of(fn, v1=(WIDTH, WIDTH))
    check(fn, shapes, dynamic=dynamic, config=CONFIG, precision=MEDIUM, fires=fires)


@pytest.mark.parametrize("tokens", [("t",), ("b", 2, "s"), (1,)], ids=str)
def test_ranks(check, tokens):
    shapes = shapes_of(ffn, x=(*tokens, WIDTH))
    dynamic = any(isinstance(s, str) for s in tokens)
    fires = FIRST | {PATTERN: 1}
    check(ffn, shapes, torch.bfloat16, dynamic=dynamic, config=CONFIG, fires=fires)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes(check, dtype):
    report = check(ffn, shapes_of(ffn), dtype, config=CONFIG, fires=FIRST)
    assert "left to the library's matmuls" in report.missed[0].reason


def test_float32_read_by_something_else(check):
    """Under "medium", but the gradient at GELU's input has a float32 reader."""
    fires = FIRST | {"bf16_matmuls": 2}
    report = check(ffn, shapes_of(ffn), config=CONFIG, precision=MEDIUM, fires=fires)
    assert "torch.float32, the matmul's operands are torch.bfloat16" in report.missed[0].reason


def test_product_used_elsewhere(check):
    def fn(x, b, v):
        hidden = F.gelu(x + b)
        return F.linear(hidden, v).sum(-1, keepdim=True) + hidden

    check(fn, shapes_of(fn), torch.bfloat16, config=CONFIG, fires=FIRST)


def test_something_in_between(check):
    def fn(x, b, v):
        return F.linear(2 * F.gelu(x + b), v)

    check(fn, shapes_of(fn), torch.bfloat16, config=CONFIG, fires=FIRST)


def test_transposed_weight(check):
    def fn(x, b, v):
        return F.gelu(x + b) @ v

    shapes = shapes_of(fn, v=(WIDTH, WIDTH))
    report = check(fn, shapes, torch.bfloat16, config=CONFIG, fires=FIRST)
    assert "has strides" in report.missed[0].reason


def test_product_split_another_way(check):
    """[30, 32] viewed as [15, 64], as heads are."""

    def fn(x, b, v):
        return F.linear(F.gelu(x + b).view(3, 5, 2, 32), v)

    shapes = {"x": (3, 5, 64), "b": (64,), "v": (24, 32)}
    report = check(fn, shapes, torch.bfloat16, config=CONFIG, fires=FIRST)
    assert "is [30, 32]" in report.missed[0].reason
