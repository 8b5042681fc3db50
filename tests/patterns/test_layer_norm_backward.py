"""LayerNorm: (x - mean) / sqrt(var + eps) * w + b, as an op and in primitives."""

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, WIDTH, arguments_of, wide
from torch import nn

PATTERN = "layer_norm_backward"
EPS = 1e-5

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def composite(x, w, b):
    return F.layer_norm(x, (WIDTH,), w, b, EPS)


def centered(x):
    return x - x.mean(-1, keepdim=True)


def biased_var(x):
    return torch.var(x, -1, correction=0, keepdim=True)


def normalized(x):
    return centered(x) / torch.sqrt(biased_var(x) + EPS)


def rms_normalized(c):
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + EPS)


def manual(x, w, b):
    x_wide = wide(x)
    return (normalized(x_wide) * wide(w) + wide(b)).to(x.dtype)


def by_var_mean(x, w, b):
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + EPS) * w + b


COMPOSITE = {
    "F.layer_norm": composite,
    "no bias": lambda x, w: F.layer_norm(x, (WIDTH,), w, None, EPS),
    "no parameters": lambda x: F.layer_norm(x, (WIDTH,), None, None, EPS),
    "projected": lambda x, w, b, m: composite(x, w, b) @ m,
    "x + residual": lambda x, w, b, m: x + composite(x, w, b) @ m,
    "residual + x": lambda x, w, b, m: composite(x, w, b) @ m + x,
    "post-norm": lambda x, w, b, m: composite(x + x @ m, w, b),
    "flattened": lambda x, w, b, m: (composite(x.flatten(0, 1), w, b) @ m).view_as(x),
}

MANUAL = {
    "var": manual,
    "var_mean": by_var_mean,
    "mean of squares": lambda x, w, b: (
        centered(x) * torch.rsqrt(centered(x).pow(2).mean(-1, keepdim=True) + EPS) * w + b
    ),
    "mean of products": lambda x, w, b: (
        centered(x) * torch.rsqrt((centered(x) * centered(x)).mean(-1, keepdim=True) + EPS) * w + b
    ),
    "centered once": lambda x, w, b: rms_normalized(centered(x)) * w + b,
    "1 + weight": lambda x, w, b: normalized(x) * (1 + w) + b,
    "pow -0.5": lambda x, w, b: centered(x) * (biased_var(x) + EPS).pow(-0.5) * w + b,
    "weight first": lambda x, w, b: w * (centered(x) * torch.rsqrt(biased_var(x) + EPS)) + b,
    "bias first": lambda x, w, b: b + w * normalized(x),
    "no bias": lambda x, w: normalized(x) * w,
    "no weight": lambda x, b: normalized(x) + b,
    "no parameters": lambda x: normalized(x),
    "x + residual": lambda x, w, b, m: x + manual(x, w, b) @ m,
    "residual + x": lambda x, w, b, m: manual(x, w, b) @ m + x,
    "post-norm": lambda x, w, b, m: manual(x + x @ m, w, b),
}


@KINDS
@pytest.mark.parametrize("name", COMPOSITE)
def test_composite(check, name, dtype, dynamic):
    fn = COMPOSITE[name]
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


@DTYPES
@pytest.mark.parametrize("name", MANUAL)
def test_manual(check, name, dtype):
    fn = MANUAL[name]
    if dtype == torch.bfloat16 and fn not in (manual, MANUAL["x + residual"], MANUAL["post-norm"]):
        dtype = torch.float64  # bf16 statistics are nothing to compare with
    check(fn, arguments_of(fn), dtype, dynamic=True, fires=1)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_module(check, options):
    check(nn.LayerNorm(WIDTH, EPS, **options), {"input": ("b", "s", WIDTH)}, dynamic=True, fires=1)


@pytest.mark.parametrize(
    "frozen", [("w",), ("b",), ("w", "b"), ("m",), ("w", "b", "m")], ids=",".join
)
@pytest.mark.parametrize("spelling", ["composite", "manual"])
def test_frozen_parameters(check, spelling, frozen):
    fn = {"composite": COMPOSITE, "manual": MANUAL}[spelling]["x + residual"]
    check(fn, arguments_of(fn), dynamic=True, frozen=frozen, fires=1)


@pytest.mark.parametrize("spelling", ["composite", "manual"])
def test_frozen_input(check, spelling):
    fn = {"composite": composite, "manual": manual}[spelling]
    check(fn, arguments_of(fn), frozen=("x",), fires=0)


@pytest.mark.parametrize(
    "tokens", [("t",), ("b", "s"), ("b", 2, "s"), (1,), (1, 1), (127,)], ids=str
)
@pytest.mark.parametrize("spelling", ["composite", "manual"])
def test_shapes(check, spelling, tokens):
    fn = {"composite": COMPOSITE, "manual": MANUAL}[spelling]["x + residual"]
    dynamic = any(isinstance(s, str) for s in tokens)
    check(fn, arguments_of(fn, x=(*tokens, WIDTH)), dynamic=dynamic, fires=1)


def test_several_normalized_dimensions(check):
    def fn(x, w, b):
        return F.layer_norm(x, (4, 40), w, b, EPS)

    check(fn, {"x": (2, "b", 4, 40), "w": (4, 40), "b": (4, 40)}, dynamic=True, fires=1)


@pytest.mark.parametrize("spelling", ["composite", "manual"])
def test_float64(check, spelling):
    fn = {"composite": COMPOSITE, "manual": MANUAL}[spelling]["x + residual"]
    check(fn, arguments_of(fn), torch.float64, fires=1)


def test_two_norms(check):
    def fn(x, w1, b1, w2, b2, m1, m2):
        x = x + composite(x, w1, b1) @ m1
        return x + manual(x, w2, b2) @ m2

    check(fn, arguments_of(fn), dynamic=True, fires=2)


def test_sum_of_the_input_gradient(check):
    """The gradient of a bias before a post-norm is the column sum of the norm's dx."""

    def fn(x, w, b, b2, m):
        return composite(x + (x @ m + b2), w, b)

    report = check(fn, arguments_of(fn), fires=1)
    assert len(report.fired[0].replaced) == 4


@pytest.mark.parametrize("name", ["normalized", "output", "rstd", "mean"])
def test_intermediate_used_elsewhere(check, name):
    def fn(x, w, b, m):
        mean = x.mean(-1, keepdim=True)
        r = torch.rsqrt(biased_var(x) + EPS)
        n = (x - mean) * r
        y = n * w + b
        more = {"normalized": n, "output": y, "rstd": r, "mean": mean}[name]
        return torch.cat([y @ m, more], -1)

    report = check(fn, arguments_of(fn), fires=0 if name in ("rstd", "mean") else 1)
    assert report.fired or report.missed


LOOK_ALIKES = {
    "unbiased variance": lambda x: centered(x) * torch.rsqrt(x.var(-1, keepdim=True) + EPS),
    "eps outside the root": lambda x, w: centered(x) / (biased_var(x).sqrt() + EPS) * w,
    "no eps": lambda x, w: centered(x) / biased_var(x).sqrt() * w,
    "another axis": lambda s: (
        (s - s.mean(0, keepdim=True)) * torch.rsqrt(s.var(0, correction=0, keepdim=True) + EPS)
    ),
    "means of columns": lambda s: (s - s.mean(0, keepdim=True)) * torch.rsqrt(biased_var(s) + EPS),
    "not centered": lambda x, w, b: x * torch.rsqrt(biased_var(x) + EPS) * w + b,
    "centered by another": lambda x, y, w: (
        (x - y.mean(-1, keepdim=True)) * torch.rsqrt(biased_var(x) + EPS) * w
    ),
    "variance of another": lambda x, y, w: centered(x) * torch.rsqrt(biased_var(y) + EPS) * w,
    "mean square": lambda x, w: (
        centered(x) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w
    ),
    "statistics detached": lambda x, w: centered(x) * torch.rsqrt(biased_var(x) + EPS).detach() * w,
    "mean detached": lambda x, w: (
        (x - x.mean(-1, keepdim=True).detach()) * torch.rsqrt(biased_var(x) + EPS) * w
    ),
    "weight before the statistics": lambda x, w: normalized(x * w).square(),
    "absolute deviation": lambda x, w: (
        centered(x) * torch.rsqrt(centered(x).abs().mean(-1, keepdim=True) + EPS) * w
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check, name):
    fn = LOOK_ALIKES[name]
    check(fn, arguments_of(fn, s=(WIDTH, WIDTH)), fires=0)


def test_too_wide(check):
    report = check(manual, {"x": (2, 8193), "w": (8193,), "b": (8193,)}, fires=0)
    assert "wider than the kernel takes" in report.missed[0].reason


def test_two_dimensions_behind_a_bias(check):
    """The bias's rows are not the norm's."""

    def fn(x, m, b):
        return F.layer_norm(x @ m + b, (4, WIDTH)).square()

    check(fn, arguments_of(fn, x=("b", 4, WIDTH)), dynamic=True, fires=1)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_statistic_as_wide_as_the_row(check, rows):
    def fn(x, w):
        return centered(x) / (biased_var(x) + torch.full_like(x, EPS)).sqrt() * w

    check(fn, {"x": (rows, WIDTH), "w": (WIDTH,)}, fires=0)
