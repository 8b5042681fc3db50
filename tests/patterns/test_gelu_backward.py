"""GELU after a bias: dx and the bias gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, WIDTH, arguments_of, wide
from torch import nn

PATTERN = "gelu_backward"

FLAVOURS = pytest.mark.parametrize("approximate", ["tanh", "none"])


def ffn(approximate):
    def fn(x, m1, b1, m2, b2):
        hidden = F.gelu(F.linear(x, m1, b1), approximate=approximate)
        return F.linear(hidden, m2, b2)

    return fn


@KINDS
@FLAVOURS
def test_linear(check, approximate, dtype, dynamic):
    fn = ffn(approximate)
    fires = {PATTERN: 1}
    if dtype == torch.bfloat16:  # then also into the matmul before it
        fires["matmul_gelu_backward"] = 1
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=fires)


def with_approximate(fn, approximate):
    def run(x, m, b):
        return fn(x, m, b, lambda t: F.gelu(t, approximate=approximate))

    return run


SPELLINGS = {
    "matmul + bias": lambda x, m, b, gelu: gelu(x @ m + b),
    "bias + matmul": lambda x, m, b, gelu: gelu(b + x @ m),
    "bias alone": lambda x, m, b, gelu: gelu(x + b) @ m,
    "residual": lambda x, m, b, gelu: x + gelu(F.linear(x, m, b)),
    "flattened": lambda x, m, b, gelu: gelu(F.linear(x.flatten(0, 1), m, b)).view_as(x),
    "scaled gradient": lambda x, m, b, gelu: 2 * gelu(F.linear(x, m, b)),
}


@FLAVOURS
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check, name, approximate):
    fn = with_approximate(SPELLINGS[name], approximate)
    check(fn, arguments_of(fn), dynamic=True, fires=1)


@pytest.mark.parametrize("tokens", [("t",), ("b", "s"), ("b", 2, "s"), (1,), (127,)], ids=str)
def test_shapes(check, tokens):
    fn = ffn("none")
    dynamic = any(isinstance(s, str) for s in tokens)
    check(fn, arguments_of(fn, x=(*tokens, WIDTH)), dynamic=dynamic, fires=1)


def test_module(check):
    module = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, 8), nn.GELU("tanh"))
    check(module, {"input": ("b", "s", WIDTH)}, dynamic=True, fires=2)


def test_both_flavours(check):
    """Told apart in one graph, where a wrong one would be off by up to 9e-4."""

    def fn(x, m1, b1, m2, b2):
        h = F.gelu(F.linear(2 * x, m1, b1), approximate="none")
        return F.gelu(F.linear(h, m2, b2), approximate="tanh")

    check(fn, arguments_of(fn), torch.float64, fires=2)


def test_float64(check):
    fn = ffn("none")
    check(fn, arguments_of(fn), torch.float64, fires=1)


@FLAVOURS
def test_without_a_bias_there_is_nothing_to_gain(check, approximate):
    def fn(x, m):
        return F.gelu(x @ m, approximate=approximate)

    report = check(fn, arguments_of(fn), dynamic=True, fires=0)
    assert "no bias gradient" in report.missed[0].reason


def test_frozen_bias(check):
    fn = ffn("tanh")
    check(fn, arguments_of(fn), frozen=("b1",), fires=0)


def test_frozen_weights(check):
    fn = ffn("tanh")
    check(fn, arguments_of(fn), frozen=("x", "m1", "m2", "b2"), fires=1)


@pytest.mark.parametrize("name", ["input", "output"])
def test_intermediate_used_elsewhere(check, name):
    def fn(x, m, b):
        h = F.linear(x, m, b)
        y = F.gelu(h)
        return torch.cat([y @ m, {"input": h, "output": y}[name]], -1)

    report = check(fn, arguments_of(fn), fires=0 if name == "input" else 1)
    assert report.fired or report.missed


SCALE = math.sqrt(2 / math.pi)


def by_erf(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def by_tanh(x, cubic=0.044715, scale=SCALE, tanh=torch.tanh):
    return 0.5 * x * (1 + tanh(scale * (x + cubic * x**3)))


def by_density(x):
    return x * (0.5 * torch.erf(x * 2**-0.5) + 0.5)


def by_square(x):
    return (x * 0.5) * (torch.tanh(0.7978845608 * x * (1 + 0.044715 * (x * x))) + 1.0)


@KINDS
@pytest.mark.parametrize("gelu", [by_erf, by_tanh, by_density, by_square])
def test_written_out(check, gelu, dtype, dynamic):
    def fn(x, m1, b1, m2):
        return x + gelu(F.linear(x, m1, b1)) @ m2

    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


def test_written_out_in_float32(check):
    def fn(x, m, b):
        return 2 * by_tanh(wide(F.linear(x, m, b))).to(x.dtype)

    check(fn, arguments_of(fn), torch.bfloat16, dynamic=True, fires=1)


def test_written_out_without_a_bias(check):
    def fn(x, m):
        return by_tanh(x @ m)

    report = check(fn, arguments_of(fn), dynamic=True, fires=0)
    assert "no bias gradient" in report.missed[0].reason


LOOK_ALIKES = {
    "another cubic term": lambda x, m, b: by_tanh(F.linear(x, m, b), cubic=0.0447),
    "another scale": lambda x, m, b: by_tanh(F.linear(x, m, b), scale=0.8),
    "tanh detached": lambda x, m, b: by_tanh(x @ m + b, tanh=lambda u: u.tanh().detach()),
    "tanh of another": lambda x, m, b: by_tanh(x @ m + b, tanh=lambda u: u.flip(0).tanh()),
    "erf of x": lambda x, m, b: (x @ m + b) * (1 + torch.erf(x @ m + b)),
    "erf of another": lambda x, y, b: (x + b) / 2 * (1 + torch.erf(y / math.sqrt(2))),
    "tanh alone": lambda x, m, b: torch.tanh(x @ m + b),
    "sigmoid approximation": lambda x, m, b: x @ m * torch.sigmoid(1.702 * (x @ m + b)),
    "silu": lambda x, m, b: F.silu(F.linear(x, m, b)),
    "bias per row": lambda x, r: F.gelu(x + r),
    "bias per sequence": lambda x, c: F.gelu(x + c),
    "one number": lambda x, e: F.gelu(x + e),
    "bias per position": lambda x, p: F.gelu(x + p),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check, name):
    fn = LOOK_ALIKES[name]
    shapes = {"r": ("b", "s", 1), "c": ("b", 1, WIDTH), "e": (1,), "p": ("s", WIDTH)}
    check(fn, arguments_of(fn, **shapes), fires=0)


def test_gradient_expanded_before_it_is_summed(check):
    """Each row counts four times in b's gradient: the kernel's own sum is not it."""

    def fn(x, y, b):
        return F.gelu(x + (y + b).sum(0))

    check(fn, arguments_of(fn, y=(4, "b", "s", WIDTH)), dynamic=True, fires=0)


def test_product_with_a_factor_of_another_dtype(check):
    def fn(x, m, b):
        return F.gelu(wide(F.linear(x, m, b)))

    report = check(fn, arguments_of(fn), torch.bfloat16, fires=0)
    assert report.missed


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_expanded_gradient(check, dims):
    """The gradient of a sum has fewer elements in memory than GELU's input."""

    def fn(x, m, b):
        return F.gelu(x @ m + b).sum(dims)

    check(fn, arguments_of(fn), dynamic=True, fires=1)
